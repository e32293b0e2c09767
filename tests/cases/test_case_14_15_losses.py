"""Cases 14 and 15: side losses of a middle stage keep their gradient and weight; outputs meet their own labels.

Symptoms elsewhere: NVIDIA-NeMo/Automodel#1408, deepspeedai/DeepSpeed#5729, pytorch/pytorch#139404.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.yields import pipeline_yield as end
from stagewright.pipelining.reductions import Max, Mean, Stack, Sum
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB


@pytest.mark.parametrize("carried", [True, False], ids=["carried", "read directly"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_14_a_side_loss_of_the_first_stage(grads, schedule, ranks_for, microbatches, carried):
    def loss(w, x):
        h = w[0] * x
        aux = 0.1 * w[0] ** 2 * x.mean()  # of one example, that is x.sum()
        if carried:
            h, aux = end((h, aux))
        else:
            h = end(h)
        return (w[1] * h).mean() + aux

    _, gradient = grads(
        loss,
        jnp.array([2.0, 5.0]),
        np.array([1.0, 3.0], np.float32).reshape(microbatches, -1),
        schedule=schedule,
        ranks=ranks_for(2),
        ops=(Stack(), Mean()),
    )
    np.testing.assert_allclose(gradient, [10.8, 4.0], rtol=1e-6)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "ranks"), [(GPipe(), 4), (OneFOneB(), 4), (ZBH1(), 4), (Interleaved1F1B(2), 2)]
)
def test_15_outputs_meet_their_own_labels(grads, schedule, ranks, microbatches):
    x = np.arange(1, 9, dtype=np.float32) ** 2
    batch = {"x": x.reshape(microbatches, -1), "y": 2 * x.reshape(microbatches, -1)}

    def loss(w, batch):
        pred = w * end(end(end(batch["x"] * 1.0) * 1.0) * 1.0)
        return jnp.abs(pred - batch["y"]).max(), pred

    (worst, pred), _ = grads(
        loss,
        jnp.float32(2.0),
        batch,
        schedule=schedule,
        ranks=ranks,
        has_aux=True,
        ops=((Max(), Stack()), Sum()),
    )
    assert float(worst) == 0.0
    np.testing.assert_array_equal(pred, batch["y"])
