"""Updates run before the norm is known, and the numbers are those of updates that wait for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.program import Recv, Run, Send
from stagewright.pipelining.schedules import ZBH1, OneFOneB

RANKS, WIDTH = 3, 72  # 72 x 72 elements are large
BATCH = np.random.default_rng(0).normal(size=(4, 2, WIDTH)).astype(np.float32)


def init():
    keys = jax.random.split(jax.random.key(0), RANKS)
    return [
        {"kernel": jax.random.normal(k, (WIDTH, WIDTH)) / 9, "bias": jnp.zeros(WIDTH)} for k in keys
    ]


def loss(params, x):
    for i, layer in enumerate(params):
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
        x = pipeline_yield(x) if i < RANKS - 1 else x
    return jnp.sum(x**2)


def make(optimizer, schedule=None, *, post_validation, scale=1.0):
    @mpmd_jit(
        mesh=MeshSpec(pipe=RANKS),
        schedule=schedule or OneFOneB(),
        donate_argnums=(0,),
        post_validation=post_validation,
    )
    def step(state, batch):
        params, opt_state = state
        losses, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(params, x), batch)
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses.sum()

    return step


def clipped(norm):
    return optax.chain(optax.clip_by_global_norm(norm), optax.adamw(1e-2))


OPTIMIZERS = {
    "never clips": clipped(1e6),
    "always clips": clipped(1e-3),
    "clips now and then": clipped(40.0),
    "skips non-finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "skips non-finite, then clips": optax.apply_if_finite(clipped(40.0), 3),
    "never waits": optax.adam(1e-2),
}


def run(step, optimizer, batches):
    params = init()
    state = (params, optimizer.init(params))
    losses = []
    for batch in batches:
        state, value = step(state, batch)
        losses.append(value)
    return state, losses


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, OneFOneB()) for name in OPTIMIZERS), ("clips now and then", ZBH1())],
    ids=str,
)
def test_the_numbers_are_those_of_updates_that_wait(name, schedule):
    optimizer = OPTIMIZERS[name]
    batches = [BATCH * scale for scale in (1.0, 0.1, 3.0, 1.0)]
    if "non-finite" in name:
        batches[1] = np.full_like(BATCH, np.nan)
    ours = run(make(optimizer, schedule, post_validation=True), optimizer, batches)
    waiting = run(make(optimizer, schedule, post_validation=False), optimizer, batches)
    assert jax.tree.structure(ours) == jax.tree.structure(waiting)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(waiting), strict=True):
        assert a.devices() == b.devices()
        # The update is compiled apart from the validation, so XLA may contract other products.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_the_norms_lie_on_both_sides_of_the_clip():
    """Or the test above would not try both outcomes of the guess."""
    norms = []
    for batch in (BATCH, BATCH * 0.1):
        total = lambda p: sum(loss(p, x) for x in batch)  # noqa: E731, B023
        norms.append(float(optax.tree.norm(jax.grad(total)(init()))))
    assert norms[0] > 40 > norms[1] > 1e-3


def update_positions(program, rank):
    """Positions of the last send of this rank's share of the norm, its largest outer run, and the next receive."""
    instructions = program.ranks[rank].instructions
    sizes = {
        i: program.codes[r.code].num_operations
        for i, r in enumerate(instructions)
        if isinstance(r, Run) and r.action is None and "after" in r.label
    }
    return instructions, sizes


def test_a_rank_updates_between_sending_its_share_and_reading_the_norm():
    optimizer = clipped(40.0)
    params = init()
    plan = (
        make(optimizer, post_validation=True).compile((params, optimizer.init(params)), BATCH).plan
    )
    for rank in range(1, RANKS):
        instructions, sizes = update_positions(plan.program, rank)
        share, update, validation = sorted(sizes)
        sends = [i for i, x in enumerate(instructions) if isinstance(x, Send) and "after" in x.tag]
        recvs = {
            s for x in instructions if isinstance(x, Recv) and "after" in x.tag for s in x.slots
        }
        assert share < sends[-1] < update < validation
        assert sizes[update] > 10
        assert not recvs & set(instructions[update].inputs)
        assert recvs & set(instructions[validation].inputs)


def test_a_step_without_a_global_condition_is_left_as_it_is():
    optimizer = optax.adam(1e-2)
    params = init()
    state = (params, optimizer.init(params))
    programs = [
        str(make(optimizer, post_validation=flag).compile(state, BATCH).plan.program)
        for flag in (False, True)
    ]
    assert programs[0] == programs[1]


def test_an_update_that_always_uses_the_norm_waits_for_it():
    """Dividing by the norm has no case without it; the step is right, and not optimistic."""

    def divide(updates, state, params=None):
        norm = optax.tree.norm(updates)
        return jax.tree.map(lambda u: -0.1 * u / norm, updates), state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), divide)
    ours = run(make(optimizer, post_validation=True), optimizer, [BATCH])
    waiting = run(make(optimizer, post_validation=False), optimizer, [BATCH])
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(waiting), strict=True):
        np.testing.assert_array_equal(a, b)


def test_guesses_that_contradict_each_other_are_not_made():
    """Two selections by one condition, of which each keeps another case."""

    def update(updates, state, params=None):
        large = optax.tree.norm(updates) > 1e6  # it is not
        pick = lambda g: jnp.where(large, 0.1 * g, 0.0) + jnp.where(large, 0.0, g)  # noqa: E731
        return jax.tree.map(lambda g: -0.1 * pick(g), updates), state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    ours = run(make(optimizer, post_validation=True), optimizer, [BATCH])
    waiting = run(make(optimizer, post_validation=False), optimizer, [BATCH])
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(waiting), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
