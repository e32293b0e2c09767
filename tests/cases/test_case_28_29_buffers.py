"""Cases 28 and 29: the second step compiles nothing; one buffer under two names, kept inputs, permuted devices.

Symptoms elsewhere: marin-community/marin PR 8911, jax-ml/jax#15924, jax-ml/jax#9635 and #15903.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.jax_seams import count_compilations
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit

OPTIMIZER = optax.adam(0.1)
BATCH = np.arange(1, 9, dtype=np.float32).reshape(4, 2) / 8


def loss(params, x):
    return ((pipeline_yield(jnp.tanh(params["a"] * x)) * params["b"]) ** 2).sum()


def train(state, batch):
    losses, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(state["params"], x), batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda old, new: 0.5 * old + 0.5 * new, state["ema"], params)
    return {"params": params, "ema": ema, "opt": opt}, losses.sum()


def evaluate(params, batch):
    return accumulate_grads(lambda x: (loss(params, x), None), batch)[0].sum()


def fresh():
    params = {"a": jnp.float32(0.5), "b": jnp.float32(1.5)}
    return {"params": params, "ema": params, "opt": OPTIMIZER.init(params)}


def test_28_nothing_compiles_after_the_first_step(schedule, ranks_for):
    mesh = MeshSpec(pipe=ranks_for(2))
    step = mpmd_jit(train, mesh=mesh, schedule=schedule, donate_argnums=(0,))
    predict = mpmd_jit(evaluate, mesh=mesh, schedule=schedule)
    state, _ = step(fresh(), BATCH)
    predict(state["params"], BATCH[:2])
    with count_compilations() as count:
        for number in range(5):
            state, _ = step(state, BATCH + number)
            if number == 2:
                predict(state["params"], BATCH[:2])
                jax.tree.map(np.asarray, state)
        assert count() == 0


@pytest.mark.parametrize("devices", [None, (3, 1)])
def test_29_one_buffer_under_two_names(schedule, ranks_for, devices):
    ranks = ranks_for(2)
    mesh = MeshSpec(pipe=ranks, devices=devices and devices[:ranks])
    step = mpmd_jit(train, mesh=mesh, schedule=schedule, donate_argnums=(0,))
    ours, theirs = fresh(), fresh()
    for _ in range(2):
        ours, value = step(ours, BATCH)
        theirs, expected = jax.jit(train)(theirs, BATCH)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_29_arguments_that_were_not_given_away_stay(schedule, ranks_for):
    step = mpmd_jit(train, mesh=MeshSpec(pipe=ranks_for(2)), schedule=schedule)
    state = fresh()
    step(state, BATCH)
    assert float(state["params"]["a"]) == 0.5


def test_21_forward_only_and_training_do_not_disturb_each_other(schedule, ranks_for):
    mesh = MeshSpec(pipe=ranks_for(2))
    results = []
    for with_eval in (False, True):
        step = mpmd_jit(train, mesh=mesh, schedule=schedule, donate_argnums=(0,))
        predict = mpmd_jit(evaluate, mesh=mesh, schedule=schedule)
        state, losses = fresh(), []
        for number in range(2):
            if with_eval:
                batch = np.concatenate([BATCH, BATCH])[: 6 + number]
                found = predict(state["params"], batch)
                expected = loss(jax.device_get(state["params"]), batch)
                np.testing.assert_allclose(found, expected, rtol=1e-6)
            state, value = step(state, BATCH)
            losses.append(np.asarray(value))
        results.append([*losses, *map(np.asarray, jax.tree.leaves(state))])
    for without, with_ in zip(*results, strict=True):
        np.testing.assert_array_equal(without, with_)
