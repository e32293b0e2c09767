"""Cases 1, 3 and 4: losses weighted by tokens, micro-batches without a token, bf16 gradients added up in float32.

Symptoms elsewhere: a mean of micro-batches' means (huggingface/transformers#34191), NaN from one masked micro-batch
(NVIDIA-NeMo/Automodel#3796), late micro-batches lost in a bf16 accumulator (deepspeedai/DeepSpeed#2768).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.schedules import OneFOneB


def sum_and_count(weight, batch):
    per_token = pipeline_yield(weight * batch["toks"])
    return (per_token * batch["mask"]).sum(), batch["mask"].sum()


def token_mean(grads, toks, mask, *, microbatches, schedule, ranks):
    batch = {"toks": np.asarray(toks, np.float32), "mask": np.asarray(mask, np.float32)}
    batch = {k: v.reshape(microbatches, -1, v.shape[-1]) for k, v in batch.items()}
    (sums, counts), gradient = grads(
        sum_and_count, jnp.float32(1.0), batch, schedule=schedule, ranks=ranks, has_aux=True
    )
    count = float(counts.sum())
    scale = 1 / count if count else 0.0
    return float(sums.sum()) * scale, float(gradient) * scale


@pytest.mark.parametrize("microbatches", [1, 2])
def test_tokens_weigh_the_same_wherever_they_are(grads, schedule, ranks_for, microbatches):
    loss, gradient = token_mean(
        grads,
        [[10, 0, 0, 0], [2, 2, 2, 0]],
        [[1, 0, 0, 0], [1, 1, 1, 0]],
        microbatches=microbatches,
        schedule=schedule,
        ranks=ranks_for(2),
    )
    assert (loss, gradient) == (4.0, 4.0)


@pytest.mark.parametrize(
    ("mask", "right"), [([[0, 0, 0], [1, 1, 1]], 2.0), ([[0, 0, 0], [0, 0, 0]], 0.0)]
)
def test_a_microbatch_without_a_token_counts_for_nothing(grads, mask, right):
    toks = [[9, 9, 9], [2, 2, 2]]
    found = token_mean(grads, toks, mask, microbatches=2, schedule=OneFOneB(), ranks=2)
    assert found == (right, right)


def test_bf16_gradients_add_up_in_float32(grads, schedule, ranks_for):
    scales = np.array([256.0, 1.0, 1.0, 1.0], np.float32).astype(jnp.bfloat16)

    def loss(weight, scale):
        return pipeline_yield(weight * scale) * jnp.bfloat16(1)

    _, gradient = grads(loss, jnp.bfloat16(1), scales, schedule=schedule, ranks=ranks_for(2))
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient) == 260.0  # 259, as the nearest bf16; 256 if added up in bf16
