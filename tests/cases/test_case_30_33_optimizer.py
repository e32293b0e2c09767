"""Cases 30 and 33: one norm over all stages, before clipping; counters count updates; decay by path or shape.

Symptoms elsewhere: pytorch/torchtitan#596, huggingface/transformers#1563, Lightning-AI/pytorch-lightning#1476,
huggingface/accelerate#963.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stagewright.nn.yields import pipeline_yield as end
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.reductions import Mean, Stack
from stagewright.pipelining.schedules import ZBH1, OneFOneB


def make_step(loss, optimizer, schedule, ranks, ops=None):
    @mpmd_jit(mesh=MeshSpec(pipe=ranks), schedule=schedule)
    def step(params, opt_state, batch):
        _, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(params, x), batch, ops)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)

    return step


def test_30_clips_by_the_norm_of_all_stages(schedule, ranks_for):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))

    def loss(w, x):
        return (end(3.0 * w["first"] * x) + 4.0 * w["second"]).sum()

    w = {"first": jnp.float32(0.0), "second": jnp.float32(0.0)}
    step = make_step(loss, optimizer, schedule, ranks_for(2))
    new, _, norm = step(w, optimizer.init(w), np.ones((1, 1), np.float32))
    assert float(norm) == pytest.approx(5.0, rel=1e-6)
    np.testing.assert_allclose([new["first"], new["second"]], [-0.6, -0.8], rtol=1e-6)


def test_30_clips_the_mean_and_not_each_microbatch(schedule, ranks_for):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))

    def loss(w, x):
        return (end(w * x) * 1.0).sum()

    step = make_step(loss, optimizer, schedule, ranks_for(2), (Stack(), Mean()))
    w = jnp.zeros(2)
    new, _, _ = step(w, optimizer.init(w), np.array([[2, 0], [0, 2]], np.float32))
    np.testing.assert_allclose(new, [-0.70710677, -0.70710677], rtol=1e-6)


def test_33_schedules_count_updates(schedule, ranks_for):
    optimizer = optax.sgd(optax.linear_schedule(0.0, 1.0, 4))
    step = make_step(
        lambda w, x: (end(w * x) * 1.0).sum(), optimizer, schedule, ranks_for(2), (Stack(), Mean())
    )
    w, batch = jnp.zeros(()), np.ones((4, 1), np.float32)
    opt_state, seen = optimizer.init(w), []
    for _ in range(3):
        before = w
        w, opt_state, _ = step(w, opt_state, batch)
        seen.append(float(before - w))
    assert seen == [0.0, 0.25, 0.5]
    assert float(w) == -0.75


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=str)
def test_33_moving_averages_move_once_an_update(schedule):
    @mpmd_jit(mesh=MeshSpec(pipe=2), schedule=schedule)
    def step(w, ema, batch):
        def loss(w, x):
            return (end(w * x) * 1.0).sum()

        _, grad = accumulate_grads(
            lambda x: jax.value_and_grad(loss)(w, x), batch, (Stack(), Mean())
        )
        w = w - grad
        return w, 0.5 * ema + 0.5 * w

    w = ema = jnp.ones(())
    for _ in range(2):
        w, ema = step(w, ema, np.ones((4, 1), np.float32))
    assert (float(w), float(ema)) == (-1.0, -0.25)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=str)
def test_33_decay_masks_see_each_parameter_as_it_is(schedule):
    optimizer = optax.chain(
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda a: a.ndim >= 2, p)),
        optax.sgd(1.0),
    )

    def loss(w, x):
        for stage in range(4):
            part = w[f"stage{stage}"]
            x = x @ part["kernel"] * part["scale"][None] + part["bias"][None]
            x = end(x) if stage < 3 else x
        return 0.0 * x.sum()

    params = {
        f"stage{stage}": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2), "scale": jnp.ones(2)}
        for stage in range(4)
    }
    step = make_step(loss, optimizer, schedule, 4)
    new, _, _ = step(params, optimizer.init(params), np.ones((2, 1, 2), np.float32))
    for part in new.values():
        np.testing.assert_allclose(part["kernel"], 0.9, rtol=1e-6)
        np.testing.assert_array_equal(part["bias"], 1.0)
        np.testing.assert_array_equal(part["scale"], 1.0)
