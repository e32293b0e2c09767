"""Case 5: a parameter that two stages read has one gradient, one optimizer state, and stays one.

Symptom elsewhere: the copies get half the gradient each and drift apart (uw-syfi/piper#13, pytorch/pytorch#51931).
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB


class Tied(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.float32(2.0))
        self.b = self.a


def loss(model, x):
    return pipeline_yield(pipeline_yield(model.a[...] * x) * 1.0) * model.b[...]


@pytest.mark.parametrize(
    ("schedule", "ranks"), [(GPipe(), 3), (OneFOneB(), 3), (ZBH1(), 3), (Interleaved1F1B(3), 1)]
)
def test_tied_parameters_are_one(schedule, ranks):
    model, alone = Tied(), Tied()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    optimizer_alone = nnx.Optimizer(alone, optax.adam(0.1), wrt=nnx.Param)

    @mpmd_jit(mesh=MeshSpec(pipe=ranks), schedule=schedule)
    def step(model, optimizer, batch):
        _, grads = accumulate_grads(lambda x: nnx.value_and_grad(loss)(model, x), batch)
        optimizer.update(model, grads)
        return grads

    batch = np.array([3.0], np.float32)
    for number in range(2):
        grads = step(model, optimizer, batch)
        leaves = nnx.to_flat_state(grads)
        assert len(leaves) == 1
        if number == 0:
            assert float(leaves[0][1][...]) == 12.0
        optimizer_alone.update(alone, nnx.grad(loss)(alone, 3.0))
    assert model.a is model.b
    assert float(model.a[...]) == pytest.approx(float(alone.a[...]), rel=1e-6)
