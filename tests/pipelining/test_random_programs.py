"""Claim: whatever the model, the program that the compiler writes computes what the traced step computes.

Hypothesis draws models: layers of several kinds (plain, scanned, rematerialised, branching, transposed) on few
parameters, so that stages share some; sums of any two earlier values, so that there are skips; stage marks over any
part of the values; losses from the middle; an optimizer with a norm over all ranks.  Each is compiled for a drawn
schedule, and its program is run here by an interpreter of its own: plain Python, slots as dictionaries, values that
are gone once they were donated or freed, operations one by one.  So this proves cut, split, placement, communication
and liveness, and leaves XLA and the runtime to `test_oracle.py`.

Both sides run operation by operation: numbers agree within rtol 1e-4 of each leaf's largest; what is left is sums in
another order (tied parameters, norms), which a model of this kind may magnify.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.compile import compile_step
from stagewright.pipelining.program import Free, Recv, Run, Send
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB

ROWS, WIDTH, NUM_PARAMS = 2, 3, 4
PARAMS = list(
    np.random.default_rng(0).normal(size=(NUM_PARAMS, WIDTH, WIDTH)).astype(np.float32) / 2
)

# ---- models ---------------------------------------------------------------------------------------------------------


def dense(x, w):
    return jnp.tanh(x @ w)


def scanned(x, w, v, layer=dense):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack([w, v, w]))[0]


LAYERS = {
    "dense": lambda x, w, v: dense(x, w) @ v,
    "transposed": lambda x, w, v: x @ w.T + v.T[:ROWS],
    "scanned": scanned,
    "scanned remat": functools.partial(scanned, layer=jax.checkpoint(dense)),
    "one weight in a scan": lambda x, w, v: jax.lax.scan(
        lambda x, row: (jnp.tanh(x @ w) * row, None), x, v[:, :1].reshape(WIDTH, 1, 1)
    )[0].reshape(ROWS, WIDTH),
    "remat": lambda x, w, v: jax.checkpoint(lambda x, w: dense(x, w) @ v)(x, w),
    "branch": lambda x, w, v: jax.lax.cond(x.sum() > 0, dense, lambda x, w: x * w[:ROWS], x, w),
    "low precision": lambda x, w, v: (x @ w.astype(jnp.bfloat16).astype(jnp.float32)) * 0.5,
}

index = st.integers(0, 100)
layers = st.tuples(st.sampled_from(sorted(LAYERS)), index, index, index)
joins = st.tuples(st.sampled_from(["add", "mul", "where"]), index, index, index)
losses = st.tuples(st.just("loss"), index, index, index)
steps = st.one_of(layers, layers, joins, losses)
marks = st.tuples(st.just("mark"), st.lists(index, min_size=1, max_size=3))


@st.composite
def models(draw, num_stages):
    """A list of steps with at least as many marks as the stages need."""
    model = []
    for _ in range(num_stages - 1 + draw(st.integers(0, 1))):
        model += draw(st.lists(steps, min_size=1, max_size=3))
        model.append(draw(marks))
    return model + draw(st.lists(steps, min_size=1, max_size=3))


def run_model(model, params, microbatch):
    """(loss, aux) of a drawn model."""
    values = [microbatch["x"]]
    ids = microbatch["ids"]
    total = jnp.float32(0)
    for kind, *args in model:
        if kind == "mark":
            chosen = sorted({i % len(values) for i in args[0]} | {len(values) - 1})
            *marked, ids = pipeline_yield([*(values[i] for i in chosen), ids])
            for i, value in zip(chosen, marked, strict=True):
                values[i] = value
            continue
        a, b, c = args
        left, right = values[-1 - a % min(2, len(values))], values[b % len(values)]
        if kind == "loss":
            total = total + jnp.mean(left**2) * 0.1
        elif kind == "add":
            values.append(left + right)
        elif kind == "mul":
            values.append(jnp.tanh(left * right))
        elif kind == "where":
            values.append(jnp.where((ids > c % 4)[:, None], left, right))
        else:
            values.append(LAYERS[kind](left, params[b % NUM_PARAMS], params[c % NUM_PARAMS]))
    return jnp.mean(jnp.tanh(values[-1]) ** 2) + total, {"ids": ids, "early": values[0].sum()}


def make_step(model, with_optimizer):
    def step(params, momentum, batch):
        def f(microbatch):
            loss = lambda p: run_model(model, p, microbatch)  # noqa: E731
            return jax.value_and_grad(loss, has_aux=True)(params)

        (values, aux), grads = accumulate_grads(f, batch)
        if not with_optimizer:
            return params, momentum, values, aux, grads
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads)) + 1e-3
        momentum = [0.5 * m + g / norm for m, g in zip(momentum, grads, strict=True)]
        params = [p - 0.1 * m for p, m in zip(params, momentum, strict=True)]
        return params, momentum, values.mean(), aux, norm

    return step


def make_batch(num_microbatches):
    rng = np.random.default_rng(num_microbatches)
    shape = (num_microbatches, ROWS)
    return {
        "x": rng.normal(size=(*shape, WIDTH)).astype(np.float32),
        "ids": rng.integers(0, 5, shape).astype(np.int32),
    }


# ---- an interpreter -------------------------------------------------------------------------------------------------


def run_program(program, args):
    """The results of a program, found without JAX's jit, without threads and without the project's runtime."""
    slots = [
        {slot: args[i] for i, slot in rank.inputs}
        | {slot: program.constants[i] for i, slot in rank.constants}
        for rank in program.ranks
    ]
    waiting = collections.defaultdict(collections.deque)
    todo = [collections.deque(rank.instructions) for rank in program.ranks]
    while any(todo):
        moved = False
        for rank, instructions in enumerate(todo):
            while instructions and can_run(instructions[0], rank, waiting):
                run_instruction(program, rank, instructions.popleft(), slots[rank], waiting)
                moved = True
        assert moved, "deadlock"
    assert not any(waiting.values())
    results = {
        i: slots[r][slot] for r, rank in enumerate(program.ranks) for i, slot in rank.outputs
    }
    results |= {i: args[a] for i, a in program.passed} | dict(program.literals)
    return [results[i] for i in range(len(program.structs))]


def can_run(instruction, rank, waiting):
    return not isinstance(instruction, Recv) or bool(waiting[instruction.source, rank])


def run_instruction(program, rank, instruction, slots, waiting):
    if isinstance(instruction, Run):
        code = program.codes[instruction.code]
        given_arrays = [slots[slot] for slot in instruction.inputs]
        for array, struct in zip(given_arrays, code.inputs, strict=True):
            assert (np.shape(array), array.dtype) == (struct.shape, struct.dtype)
        found = code.function(*given_arrays)
        for position in code.donate:
            del slots[instruction.inputs[position]]
        slots.update(zip(instruction.outputs, found, strict=True))
    elif isinstance(instruction, Send):
        waiting[rank, instruction.to].append([slots[slot] for slot in instruction.slots])
    elif isinstance(instruction, Recv):
        slots.update(
            zip(instruction.slots, waiting[instruction.source, rank].popleft(), strict=True)
        )
    else:
        assert isinstance(instruction, Free)
        for slot in instruction.slots:
            del slots[slot]


# ---- the claim ------------------------------------------------------------------------------------------------------


def compare(model, schedule, num_ranks, num_microbatches, with_optimizer):
    step = make_step(model, with_optimizer)
    args = (PARAMS, [p * 0 + 0.1 for p in PARAMS], make_batch(num_microbatches))
    flat, treedef = jax.tree.flatten(args)

    def on_flat(*flat):
        return [jnp.asarray(x) for x in jax.tree.leaves(step(*jax.tree.unflatten(treedef, flat)))]

    num_state = 2 * NUM_PARAMS
    plan = compile_step(
        on_flat,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat],
        schedule=schedule,
        num_ranks=num_ranks,
        partition=Uniform(),
        donated=frozenset(range(num_state)),
        same_home=lambda: [(i, i) for i in range(num_state)],
    )
    found = run_program(plan.program, flat)
    with jax.disable_jit():
        expected = on_flat(*flat)
    for ours, theirs in zip(found, expected, strict=True):
        theirs = np.asarray(theirs)
        atol = 1e-4 * np.abs(theirs).max() if theirs.size else 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


SETUPS = [
    (OneFOneB(), 2), (OneFOneB(), 3), (ZBH1(), 1), (ZBH1(), 2), (ZBH1(), 3), (GPipe(), 2),
    (Interleaved1F1B(2), 1), (Interleaved1F1B(2), 2),
]  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_programs_compute_what_steps_compute(data):
    schedule, num_ranks = data.draw(st.sampled_from(SETUPS))
    model = data.draw(models(schedule.num_stages(num_ranks)))
    num_microbatches = data.draw(st.integers(1, 3))
    compare(model, schedule, num_ranks, num_microbatches, data.draw(st.booleans()))
