"""Claim: a simulated program takes the time one gets by hand, and holds the bytes that the runtime holds."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.actions import Kind
from stagewright.pipelining.bubbles import attribute_bubble
from stagewright.pipelining.compile import compile_step
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.simulate import ProgramCosts, simulate_program
from stagewright.pipelining.timeline import Costs, simulate_order

WIDTH, BATCH = 4, 2
VALUE = BATCH * WIDTH * 4  # bytes of one micro-batch's activation
NAMES = ["gpipe", "1f1b", "interleaved:2", "zbh1", "zbv", "vhalf", "dualpipev"]


def make_step(num_layers):
    def step(weights, batch):
        def loss(weights, x):
            skip = x
            for i, w in enumerate(weights):
                x = jnp.tanh(x @ w)
                x = pipeline_yield(x) if i < num_layers - 1 else x
            return jnp.sum(x * skip + x @ weights[0])  # a skip, and a tied weight

        losses, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(weights, x), batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        new = [w - 0.1 * g / norm for w, g in zip(weights, grads, strict=True)]
        return new, losses

    return step


def plain_step(num_layers):
    """The same without skip, tied weight and norm: every value goes to the next stage."""

    def step(weights, batch):
        def loss(weights, x):
            for i, w in enumerate(weights):
                x = jnp.tanh(x @ w)
                x = pipeline_yield(x) if i < num_layers - 1 else x
            return jnp.sum(x)

        return accumulate_grads(lambda x: jax.value_and_grad(loss)(weights, x), batch)

    return step


def compiled(name, ranks, microbatches, make=plain_step):
    schedule = by_name(name)
    num_layers = schedule.num_stages(ranks)
    step = make(num_layers)

    def flat(*leaves):
        return jax.tree.leaves(step(list(leaves[:-1]), leaves[-1]))

    structs = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * num_layers
    structs.append(jax.ShapeDtypeStruct((microbatches, BATCH, WIDTH), jnp.float32))
    return compile_step(flat, structs, schedule=schedule, num_ranks=ranks, partition=Uniform())


def units(num_stages, **changes):
    tasks = {(kind, s): 2 if kind is Kind.B else 1 for kind in Kind for s in range(num_stages)}
    return ProgramCosts(**{"tasks": tasks, "unit": "", **changes})


def starts_by_hand(order, latency):
    """The first stage's input gradient is for nobody: its I is empty, and its W waits in its place."""
    inputs = (0, *[1] * (order.num_stages - 1))
    return starts(simulate_order(order, Costs(backward_input=inputs, latency=latency)))


def starts(timeline):
    return {str(s.action): s.start for s in timeline.spans if not str(s.action).startswith("0I")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("ranks", "microbatches", "latency"), [(2, 4, 0), (3, 7, 0), (2, 4, Fraction(1, 3))]
)
def test_it_is_the_orders_own_timeline(name, ranks, microbatches, latency):
    plan = compiled(name, ranks, microbatches)
    costs = units(plan.order.num_stages, latency=latency)
    first = {(Kind.I, 0): 0, (Kind.B, 0): 1}
    costs = dataclasses.replace(costs, tasks={**costs.tasks, **first})
    got, wanted = starts(simulate_program(plan.program, costs)), starts_by_hand(plan.order, latency)
    if name in (
        "zbv",
        "vhalf",
    ):  # other tasks stand between the first stage's I, which waits for nobody, and its W
        assert all(got[task] <= wanted[task] for task in wanted)
    else:
        assert got == wanted


def test_a_link_carries_one_message_after_the_other():
    """Two forwards in a row: the second message starts when the first is through."""
    plan = compiled("gpipe", 2, 2)
    got = simulate_program(plan.program, units(2, bandwidth=VALUE / 5))  # 5 units a value
    forward = [t for t in got.transfers if t.source == 0 and t.label.startswith("0F")]
    assert [(t.start, t.end, t.num_bytes) for t in forward] == [(1, 6, VALUE), (6, 11, VALUE)]
    assert (starts(got)["1F0"], starts(got)["1F1"]) == (6, 11)


def test_without_overlap_both_ranks_are_busy_sending():
    plan = compiled("gpipe", 2, 2)
    got = simulate_program(plan.program, units(2, bandwidth=VALUE / 5, overlap=False))
    assert (starts(got)["0F0"], starts(got)["0F1"]) == (0, 6)
    assert (starts(got)["1F0"], starts(got)["1F1"]) == (
        12,
        13,
    )  # both receives are posted before the first task


def test_a_straggler_and_slower_links_cost_what_they_cost():
    plan = compiled("gpipe", 2, 3)
    costs = units(2, latency=1)
    plain = simulate_program(plan.program, costs)
    assert plain.makespan == 3 + 1 + 1 + 6 + 1 + 2
    slow = simulate_program(plan.program, costs.with_slower_links(10))
    assert slow.makespan - plain.makespan == 2 * 9  # there and back
    late = simulate_program(plan.program, costs.with_straggler(1, 3))
    assert late.makespan == 1 + 1 + 3 * 3 + 3 * 6 + 1 + 2


def test_overhead_is_paid_for_every_instruction_before_a_task():
    plan = compiled("gpipe", 1, 1)
    costs = units(1, overhead=Fraction(1, 10))
    got = simulate_program(plan.program, costs)
    instructions = [str(i) for i in plan.program.ranks[0].instructions]
    place = next(i for i, text in enumerate(instructions) if text.startswith("RUN 0F0"))
    assert got.spans[0].start == place * Fraction(1, 10)


def test_outer_work_is_timed_by_its_label():
    plan = compiled("1f1b", 2, 2, make_step)
    labels = {
        run.label for r in plan.program.ranks for run in r.instructions if hasattr(run, "label")
    }
    outer = {label: 10 for label in labels if "after" in label}
    got = simulate_program(plan.program, units(2, outer=outer))
    assert {span.label for span in got.outer} >= set(outer)
    assert got.makespan > simulate_program(plan.program, units(2)).makespan
    assert sum(b.barrier for b in attribute_bubble(got)) > 0


def test_a_task_without_a_cost_is_named():
    plan = compiled("1f1b", 2, 2)
    costs = ProgramCosts({(Kind.F, 0): 1})
    with pytest.raises(
        ValueError, match="no cost for F of stage 1; there are costs for F of stage 0"
    ):
        simulate_program(plan.program, costs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_the_bytes_are_those_that_the_runtime_holds(name, ranks, microbatches):
    schedule = by_name(name)
    num_layers = schedule.num_stages(ranks)
    step = mpmd_jit(
        make_step(num_layers), mesh=MeshSpec(pipe=ranks), schedule=schedule, donate_argnums=(0,)
    )
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(w, jnp.float32) for w in rng.normal(size=(num_layers, WIDTH, WIDTH))]
    batch = rng.normal(size=(microbatches, BATCH, WIDTH)).astype(np.float32)
    function = step.compile(weights, batch)
    function.runtime.count_bytes = True
    step(weights, batch)
    planned = simulate_program(function.plan.program, units(num_layers))
    measured = function.runtime.live_bytes
    for rank in range(ranks):
        assert changes(measured[rank]) == [size for _, size in planned.memory[rank]]
        assert planned.peak_bytes(rank) == max(measured[rank])


def changes(sizes):
    return [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
