"""Effects (`jax.debug.print`, unread callbacks) happen once a micro-batch, or once a step outside of the loop."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import ZBH1, GPipe, OneFOneB

WEIGHTS = [np.float32(2.0), np.float32(3.0), np.float32(0.5)]
BATCH = np.arange(1, 5, dtype=np.float32)


class Seen:
    """Collects what callbacks are called with."""

    def __init__(self):
        self.values = collections.defaultdict(list)

    def __call__(self, name, *values):
        for value in values:
            jax.debug.callback(lambda v: self.values[name].append(float(v)), value)

    def sorted(self):
        jax.effects_barrier()
        return {name: sorted(values) for name, values in self.values.items()}


def make_step(seen):
    def loss(weights, x):
        seen("parameter", weights[2])
        first = pipeline_yield(weights[0] * x)
        seen("middle", first)
        second = pipeline_yield(weights[1] * first)
        seen("over a skip", second + first)
        last = jax.lax.scan(lambda c, w: (c * w, seen("in a scan", c)), second, weights[2][None])[0]
        return jax.checkpoint(jnp.square)(last)

    def grads(weights, x):
        value, grad = jax.value_and_grad(loss)(weights, x)
        seen("a gradient", grad[1])
        return value, grad

    def step(weights, batch):
        losses, sums = accumulate_grads(lambda x: grads(weights, x), batch)
        norm = jnp.sqrt(sum(g * g for g in sums))
        seen("outside: of one rank", sums[2])
        seen("outside: of all ranks", norm)
        seen("outside: an argument", weights[0])
        return losses, sums

    return step


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), ZBH1()], ids=lambda s: s.name)
def test_every_effect_happens_as_often_as_on_one_device(schedule):
    seen, expected = Seen(), Seen()
    found = mpmd_jit(make_step(seen), mesh=MeshSpec(pipe=3), schedule=schedule)(WEIGHTS, BATCH)
    right = jax.jit(make_step(expected))(WEIGHTS, BATCH)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    ours, theirs = seen.sorted(), expected.sorted()
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-6, err_msg=name)


def test_a_callback_whose_result_nobody_reads_is_called():
    called = []

    def look(x):
        called.append(float(x))
        return np.float32(0)

    def loss(w, x):
        io_callback(look, jax.ShapeDtypeStruct((), np.float32), x)
        return pipeline_yield(w * x) * 2

    step = mpmd_jit(
        lambda w, batch: accumulate_grads(lambda x: jax.value_and_grad(loss)(w, x), batch),
        mesh=MeshSpec(pipe=2),
        schedule=OneFOneB(),
    )
    step(np.float32(3), BATCH)
    jax.effects_barrier()
    assert sorted(called) == BATCH.tolist()
