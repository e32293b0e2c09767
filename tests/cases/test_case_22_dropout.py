"""Case 22: dropout masks differ by micro-batch, stage and step, and not by schedule or number of ranks.

Symptom elsewhere: a mask frozen over the accumulation loop, or "cannot mutate RngCount from a different trace level"
(google/flax#4951, pytorch/pytorch#139304).
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB

MICROBATCHES = 4


class TwoDropouts(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.float32(1.0))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        first = self.first(self.scale[...] * jnp.ones(64))
        x = pipeline_yield(first + x)
        second = self.second(jnp.ones(64))
        return (x * second).sum(), (first, second)


def loss(model, x):
    return model(x)


@functools.cache
def masks(schedule, ranks):
    """Kept or dropped, bool[step, stage, micro-batch, 64]."""
    model = TwoDropouts(nnx.Rngs(0))
    batch = np.zeros((MICROBATCHES, 64), np.float32)

    def run(model, batch):
        (_, aux), grads = accumulate_grads(
            lambda x: nnx.value_and_grad(loss, has_aux=True)(model, x), batch
        )
        return aux, grads

    step = mpmd_jit(run, mesh=MeshSpec(pipe=ranks), schedule=schedule)
    return np.stack([np.stack(step(model, batch)[0]) for _ in range(2)]) > 0


CASES = [(GPipe(), 2), (OneFOneB(), 1), (OneFOneB(), 2), (ZBH1(), 2), (Interleaved1F1B(2), 1)]


@pytest.mark.parametrize(("schedule", "ranks"), CASES)
def test_masks_differ_where_they_must_and_nowhere_else(schedule, ranks):
    found = masks(schedule, ranks)
    rows = found.reshape(-1, 64)
    assert len({row.tobytes() for row in rows}) == 2 * 2 * MICROBATCHES
    assert 0.4 < found.mean() < 0.6
    np.testing.assert_array_equal(found, masks(OneFOneB(), 2))


def test_a_module_that_could_only_repeat_its_masks_is_refused():
    model = TwoDropouts(nnx.Rngs(0))

    @mpmd_jit(mesh=MeshSpec(pipe=2), schedule=OneFOneB())
    def step(batch):
        return accumulate_grads(lambda x: nnx.value_and_grad(loss, has_aux=True)(model, x), batch)

    with pytest.raises(ValueError, match="pass the module to the step as an argument"):
        step(np.zeros((MICROBATCHES, 64), np.float32))


def test_deterministic_is_off():
    model = TwoDropouts(nnx.Rngs(0))
    model.eval()
    _, (first, second) = model(jnp.zeros(64))
    assert bool((first == 1).all())
    assert bool((second == 1).all())
