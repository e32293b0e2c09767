"""What belongs to one stage stays on its rank; what is sent around the loop is small, tied weights apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.primitives import SMALL
from stagewright.pipelining.program import Run, Send
from stagewright.pipelining.schedules import OneFOneB

RANKS, WIDTH = 4, 80  # 80 x 80 elements are large, 80 are small
BATCH = np.ones((4, 2, WIDTH), np.float32)


def init(*, tied=False):
    layers = [
        {"kernel": jnp.full((WIDTH, WIDTH), 0.01 + 0.001 * i), "bias": jnp.zeros(WIDTH)}
        for i in range(RANKS)
    ]
    return layers + ([{"kernel": jnp.ones((WIDTH, WIDTH))}] if tied else [])


def loss(params, x):
    table = params[RANKS]["kernel"] if len(params) > RANKS else None
    x = x if table is None else x @ table
    for i, layer in enumerate(params[:RANKS]):
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
        x = pipeline_yield(x) if i < RANKS - 1 else x
    return (x if table is None else x @ table.T).sum(), jnp.float32(x.size)


def make(optimizer):
    @mpmd_jit(mesh=MeshSpec(pipe=RANKS), schedule=OneFOneB(), donate_argnums=(0,))
    def step(state, batch):
        params, opt_state, count = state
        (losses, sizes), grads = accumulate_grads(
            lambda x: jax.value_and_grad(loss, has_aux=True)(params, x), batch
        )
        grads = jax.tree.map(lambda g: g / sizes.sum(), grads)
        updates, new_opt = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        keep = lambda new, old: jnp.where(sizes.sum() > 0, new, old)  # noqa: E731
        state = (
            jax.tree.map(keep, new_params, params),
            jax.tree.map(keep, new_opt, opt_state),
            count + 1,
        )
        return state, {"loss": losses.sum(), "norm": optax.tree.norm(grads)}

    return step


def sends_around_the_loop(program):
    """(source, destination, elements) of each array that is sent before or after the loop."""
    found = []
    for rank, rank_program in enumerate(program.ranks):
        shape_of = {}
        for instruction in rank_program.instructions:
            if isinstance(instruction, Run):
                code = program.codes[instruction.code]
                outs = jax.eval_shape(code.function, *code.inputs)
                shape_of.update(zip(instruction.inputs, code.inputs, strict=True))
                shape_of.update(zip(instruction.outputs, outs, strict=True))
            elif isinstance(instruction, Send) and "the loop" in instruction.tag:
                found += [
                    (rank, instruction.to, shape_of[s].size if s in shape_of else None)
                    for s in instruction.slots
                ]
    return found


OPTIMIZERS = {
    "adamw with clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "sgd with schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9),
    "skips non-finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "every second step": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_small_values_are_sent_and_the_state_stays_at_home(name):
    optimizer = OPTIMIZERS[name]
    step = make(optimizer)
    params = init()
    state = (params, optimizer.init(params), jnp.int32(0))
    program = step.compile(state, BATCH).plan.program
    sizes = [size for _, _, size in sends_around_the_loop(program)]
    assert all(size is not None and size <= SMALL for size in sizes), sizes
    reference = jax.jit(step.__wrapped__)
    expected = state
    ours = jax.tree.map(jnp.array, state)
    placements = []
    for _ in range(3):
        ours, metrics = step(ours, BATCH)
        expected, right = reference(expected, BATCH)
        placements.append([leaf.sharding for leaf in jax.tree.leaves(ours)])
        assert float(metrics["norm"]) == pytest.approx(float(right["norm"]), rel=1e-5)
    assert placements[1] == placements[2]
    for i in range(RANKS):
        assert ours[0][i]["kernel"].devices() == {jax.devices()[i]}
        assert ours[0][i]["bias"].devices() == {jax.devices()[i]}
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_global_norm_takes_one_partial_and_one_scalar_a_rank():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    params = init()
    program = (
        make(optimizer).compile((params, optimizer.init(params), jnp.int32(0)), BATCH).plan.program
    )
    sends = sends_around_the_loop(program)
    assert max(size for _, _, size in sends) == BATCH.shape[0]  # the token counts, stacked
    to_first = [source for source, to, size in sends if to == 0 and size == 1]
    assert sorted(to_first) == [1, 1, 2, 2, 3, 3]  # two norms: the optimizer's and the metric's
    back = [to for source, to, size in sends if source == 0 and size == 1]
    assert sorted(back) == [1, 2, 3]


def test_a_tied_weight_goes_out_once_and_its_gradient_comes_back_once():
    optimizer = optax.sgd(0.1)
    params = init(tied=True)
    program = (
        make(optimizer).compile((params, optimizer.init(params), jnp.int32(0)), BATCH).plan.program
    )
    large = [
        (a, b) for a, b, size in sends_around_the_loop(program) if size is None or size > SMALL
    ]
    assert sorted(large) == [(0, RANKS - 1), (RANKS - 1, 0)]
