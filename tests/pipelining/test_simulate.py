"""Claim: a simulated program takes the time one gets by hand, and holds the bytes that the runtime holds."""

import dataclasses
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.actions import Kind, parse_action
from stagewright.pipelining.bubbles import attribute_bubble
from stagewright.pipelining.compile import compile_step
from stagewright.pipelining.errors import CommunicationError, ScheduleError
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.program import Code, Free, Program, RankProgram, Recv, Run, Send
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.schedules.names import all_names
from stagewright.pipelining.simulate import ProgramCosts, simulate_program
from stagewright.pipelining.timeline import Costs, simulate_order

WIDTH, BATCH = 4, 2
VALUE = BATCH * WIDTH * 4  # bytes of one micro-batch's activation
NAMES = all_names()
EVEN = ["gpipe", "1f1b", "interleaved:2", "zbh1", "zbv", "vhalf", "dualpipev"]


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


def without_first_inputs(order):
    """A first stage of one product hands no input gradient on: its I is empty, and its W waits in its place.

    Each 0I stands beside its 0W then, at no cost.
    """
    ranks = []
    for actions in order.actions:
        late = [a for a in actions if (a.stage, a.kind) != (0, Kind.I)]
        for action in [a for a in late if (a.stage, a.kind) == (0, Kind.W)]:
            late.insert(late.index(action), dataclasses.replace(action, kind=Kind.I))
        ranks.append(tuple(late))
    return dataclasses.replace(order, actions=tuple(ranks))


def starts(timeline):
    return {str(s.action): s.start for s in timeline.spans if not str(s.action).startswith("0I")}


def order_or_skip(name, ranks, microbatches):
    try:
        return by_name(name).order(ranks, microbatches)
    except ScheduleError as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (3, 7), (4, 8), (8, 33)])
@pytest.mark.parametrize("latency", [0, Fraction(1, 3)])
def test_it_is_the_orders_own_timeline(name, ranks, microbatches, latency, program_of):
    """Every span of every schedule, exactly: with costs that differ by kind and stage, in fractions."""
    order = order_or_skip(name, ranks, microbatches)
    stages = range(order.num_stages)
    costs = Costs(
        forward=tuple(Fraction(7 + s % 3, 5) for s in stages),
        backward_input=tuple(Fraction(9 + s % 2, 7) for s in stages),
        backward_weight=tuple(Fraction(11 - s % 4, 9) for s in stages),
        latency=latency,
    )
    table = costs.table(order.num_stages)
    tasks = {(kind, stage): table[kind][stage] for kind in Kind for stage in stages}
    got = simulate_program(program_of(order), ProgramCosts(tasks, latency=latency, unit=""))
    assert got.spans == simulate_order(order, costs).spans


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize(
    ("ranks", "microbatches", "latency"), [(2, 4, 0), (3, 7, 0), (2, 4, Fraction(1, 3))]
)
def test_a_compiled_program_takes_as_long_as_its_order(name, ranks, microbatches, latency):
    plan = compiled(name, ranks, microbatches)
    costs = units(plan.order.num_stages, latency=latency)
    costs = costs.with_stage(0, {Kind.I: 0, Kind.B: 1})
    inputs = (0, *[1] * (plan.order.num_stages - 1))
    wanted = simulate_order(
        without_first_inputs(plan.order), Costs(backward_input=inputs, latency=latency)
    )
    assert starts(simulate_program(plan.program, costs)) == starts(wanted)


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


def test_a_single_task_may_take_longer_than_its_kind():
    plan = compiled("gpipe", 2, 3)
    costs = units(2)
    plain = simulate_program(plan.program, costs)
    longer = dataclasses.replace(costs, single={parse_action("1F1"): 5})
    assert simulate_program(plan.program, longer).makespan == plain.makespan + 4


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


def by_hand(*ranks):
    """A program of these instructions; each run makes one value of 8 bytes."""
    struct = jax.ShapeDtypeStruct((8,), jnp.uint8)
    numbers = [i.code for rank in ranks for i in rank if isinstance(i, Run)]
    codes = [Code("code", 0, lambda: (), (), (struct,))] * (1 + max(numbers, default=-1))
    programs = [RankProgram(tuple(rank), 9, (), (), ()) for rank in ranks]
    return Program(tuple(programs), tuple(codes), (), (), (), (), ())


def run(label, *inputs, makes):
    return Run(0, inputs, (makes,), None, label)


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_that_wait_for_each_other_are_named(overlap):
    """Receive, then send, on both: neither can, whether sends wait or not."""
    ranks = [
        [Recv((0,), 1 - r, "a"), Send((0,), 1 - r, "b")] for r in (0, 1)
    ]  # each would send on what it gets
    costs = ProgramCosts({}, overlap=overlap)
    with pytest.raises(CommunicationError, match=r"rank 0 at .* rank 1 at "):
        simulate_program(by_hand(*ranks), costs)


def test_two_sends_that_meet_block_each_other_only_without_overlap():
    ranks = [[run("make", makes=0), Send((0,), 1 - r, "a"), Recv((1,), 1 - r, "a")] for r in (0, 1)]
    got = simulate_program(by_hand(*ranks), ProgramCosts({}, {"make": 2}, latency=3))
    assert [(t.source, t.start, t.end) for t in got.transfers] == [(0, 2, 5), (1, 2, 5)]
    with pytest.raises(CommunicationError, match="rank 0 at SEND a"):
        simulate_program(by_hand(*ranks), ProgramCosts({}, {"make": 2}, overlap=False))


def test_a_receive_keeps_nobody_waiting_until_its_value_is_read():
    """Rank 1 works from 0 to 4 though its receive, posted first, brings nothing before 10."""
    ranks = [
        [run("slow", makes=0), Send((0,), 1, "a")],
        [Recv((0,), 0, "a"), run("own", makes=1), run("reader", 0, makes=2)],
    ]
    costs = ProgramCosts({}, {"slow": 8, "own": 4, "reader": 1}, latency=2)
    got = simulate_program(by_hand(*ranks), costs)
    assert [(s.label, s.start, s.end) for s in got.outer if s.rank == 1] == [
        ("own", 0, 4),
        ("reader", 10, 11),
    ]


def test_the_two_directions_of_a_link_and_two_links_do_not_share_their_bandwidth():
    ranks = [
        [run("make", makes=0), Send((0,), 1, "a"), Send((0,), 2, "b"), Recv((1,), 1, "c")],
        [run("make", makes=0), Send((0,), 0, "c"), Recv((1,), 0, "a")],
        [Recv((0,), 0, "b")],
    ]
    got = simulate_program(by_hand(*ranks), ProgramCosts({}, {"make": 1}, bandwidth=2.0))
    assert {(t.label, t.start, t.end) for t in got.transfers} == {
        ("a", 1, 5),
        ("b", 1, 5),
        ("c", 1, 5),
    }


def test_live_bytes_by_hand():
    """Made at 1; a second value takes over the first one's buffer at 3, and is freed at 4."""
    struct = jax.ShapeDtypeStruct((8,), jnp.uint8)
    takes = Code("takes", 0, lambda x: (x,), (struct,), (struct,), donate=(0,))
    keeps = Code("keeps", 0, lambda x: (x,), (struct,), (struct,))
    makes = Code("makes", 0, lambda: (), (), (struct,))
    rank = RankProgram(
        (
            Run(0, (), (0,), None, "make"),
            Run(1, (0,), (1,), None, "take"),
            Run(2, (1,), (2,), None, "keep"),
            Free((1,)),
        ),
        3,
        (),
        (),
        (),
    )
    program = Program((rank,), (makes, takes, keeps), (), (), (), (), ())
    costs = ProgramCosts({}, {"make": 1, "take": 2, "keep": 1}, overhead=Fraction(1, 2))
    (curve,) = simulate_program(program, costs).memory
    half = Fraction(1, 2)
    assert curve == ((0, 0), (1 + half, 8), (5 + half, 16), (6, 8))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:2", "zbh1"])
def test_work_grows_with_the_number_of_tasks_and_no_faster(name, program_of):
    """Counted in calls of Python functions, so that no clock is asked."""
    calls = [
        calls_of(program_of(by_name(name).order(4, microbatches))) for microbatches in (32, 64, 128)
    ]
    assert calls[1] < 2.1 * calls[0]
    assert calls[2] < 2.1 * calls[1]


def calls_of(program):
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    costs = units(8)
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        simulate_program(program, costs)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_the_bytes_are_those_that_the_runtime_holds(name, ranks, microbatches):
    schedule = by_name(name)
    order_or_skip(name, ranks, microbatches)
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
