"""A gradient that several stages contribute to is one sum after the loop; nothing as large is sent inside of it.

Checked on a weight that every stage reads, in the forms in which autodiff or the user adds its parts up: straight,
through casts and transposes, through the stage marks themselves, with terms that no stage makes, negated, and where the
sum is read a second time (then it has to be made whole in the loop).  Numbers are those of one device, rtol 1e-6.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import ZBH1, OneFOneB
from stagewright.pipelining.stages import cut_stages
from stagewright.pipelining.trace import trace_step

STAGES, WIDTH = 3, 4
WEIGHT = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
BATCH = np.random.default_rng(1).normal(size=(3, 2, WIDTH)).astype(np.float32)


def straight(w, x):
    for _ in range(STAGES - 1):
        x = pipeline_yield(jnp.tanh(x @ w))
    return (x @ w).sum()


def transposed(w, x):
    x = pipeline_yield(jnp.tanh(x @ w))
    x = pipeline_yield(jnp.tanh(x @ w.T))
    return (x @ w.T.reshape(-1).reshape(WIDTH, WIDTH)).sum()


def cast(w, x):
    low = w.astype(jnp.bfloat16)
    x = pipeline_yield(jnp.tanh(x @ low.astype(jnp.float32)))
    x = pipeline_yield(jnp.tanh(x @ low.astype(jnp.float32)))
    return (x @ low.astype(jnp.float32)).sum()


def negated(w, x):
    x = pipeline_yield(jnp.tanh(x @ -w))
    x = pipeline_yield(jnp.tanh(x @ w))
    return (x @ -w).sum()


def through_the_marks(w, x):
    for _ in range(STAGES - 1):
        x, w = pipeline_yield((jnp.tanh(x @ w), w))
    return (x @ w).sum()


def plain(loss, w, x):
    return jax.value_and_grad(loss)(w, x)


def with_terms_of_no_stage(loss, w, x):
    """Gradients to which the user adds the weight itself: decay inside the loop."""
    value, grad = jax.value_and_grad(loss)(w, x)
    return value, (grad + w) + w


def flattened_with_terms_of_no_stage(loss, w, x):
    value, grad = jax.value_and_grad(loss)(w, x)
    return value, (grad + w).reshape(-1)


LOSSES = [straight, transposed, cast, negated, through_the_marks]
FORMS = [plain, with_terms_of_no_stage, flattened_with_terms_of_no_stage]
CASES = [(loss, plain) for loss in LOSSES] + [(straight, form) for form in FORMS[1:]]


def make_step(loss, form):
    return lambda w, batch: accumulate_grads(lambda x: form(loss, w, x), batch)


@pytest.mark.parametrize(("loss", "form"), CASES)
def test_the_parts_add_up(loss, form):
    step = make_step(loss, form)
    values, grad = mpmd_jit(step, mesh=MeshSpec(pipe=STAGES), schedule=OneFOneB())(WEIGHT, BATCH)
    expected_values, expected = jax.jit(step)(WEIGHT, BATCH)
    np.testing.assert_allclose(values, expected_values, rtol=1e-6)
    rtol = 1e-6 if loss is not cast else 2**-7  # each stage's part is rounded to bfloat16 by itself
    np.testing.assert_allclose(grad, expected, rtol=0, atol=rtol * np.abs(expected).max())


def plan_of(loss, form):
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (WEIGHT, BATCH)]
    trace = trace_step(lambda *flat: jax.tree.leaves(make_step(loss, form)(*flat)), structs)
    return cut_stages(trace.loop, STAGES, Uniform())


@pytest.mark.parametrize(("loss", "form"), CASES)
def test_no_stage_hands_on_a_gradient(loss, form):
    plan = plan_of(loss, form)
    exported = [value.shape for task in plan.tasks.values() for value in task.exports]
    assert set(exported) == {(2, WIDTH)}  # activations and their cotangents
    parts = [
        task.stage for task in plan.tasks.values() for result in task.results if result.output == 1
    ]
    assert sorted(set(parts)) == list(range(STAGES))


def test_a_gradient_that_is_read_in_the_loop_is_made_whole_there():
    def form(loss, w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return (value, (grad**2).sum()), grad

    step = make_step(straight, form)
    expected = jax.jit(step)(WEIGHT, BATCH)
    for schedule in (OneFOneB(), ZBH1()):
        found = mpmd_jit(step, mesh=MeshSpec(pipe=STAGES), schedule=schedule)(WEIGHT, BATCH)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_gradients_behind_a_parted_one_keep_their_own_dtype(dtype):
    """A tied weight has one part a stage; what comes after it must not take a neighbour's dtype."""
    parameters = {"a_tied": jnp.asarray(WEIGHT), "b_other": jnp.full((WIDTH,), 1.5, dtype)}

    def loss(p, x):
        x = pipeline_yield(jnp.tanh(x @ p["a_tied"]))
        return jnp.abs((x @ p["a_tied"]) * p["b_other"][None]).astype(jnp.float32).sum()

    def step(p, batch):
        losses, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(p, x), batch)
        return losses, jax.tree.map(lambda g: g / jnp.asarray(2, g.dtype), grads)

    got = mpmd_jit(step, mesh=MeshSpec(pipe=2), schedule=OneFOneB())(parameters, BATCH)
    wanted = jax.jit(step)(parameters, BATCH)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.complex64), np.asarray(theirs, np.complex64), rtol=2e-2, atol=1e-2
        )
