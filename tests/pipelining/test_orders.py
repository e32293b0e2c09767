"""Claim: validate_order accepts exactly the orders that can run, and shows where others fail."""

import doctest
import graphlib
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.pipelining import orders
from stagewright.pipelining.actions import Action, Kind, Order, dependency_map, parse_order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.orders import topological_order, validate_order
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB, Schedule
from stagewright.pipelining.timeline import Costs

SCHEDULES: list[Schedule] = [GPipe(), OneFOneB(), Interleaved1F1B(2), Interleaved1F1B(3), ZBH1()]
LEGAL = st.builds(
    lambda schedule, ranks, microbatches: schedule.order(ranks, microbatches),
    st.sampled_from(SCHEDULES),
    st.integers(1, 4),
    st.integers(1, 6),
)


@st.composite
def mutated_orders(draw: st.DrawFn) -> Order:
    """A legal order after one to three swaps, drops, duplicates, moves or relabelled actions."""
    order = draw(LEGAL)
    lists = [list(actions) for actions in order.actions]
    for _ in range(draw(st.integers(1, 3))):
        source = draw(st.sampled_from([actions for actions in lists if actions]))
        target = draw(st.sampled_from(lists))
        at = draw(st.integers(0, len(source) - 1))
        to = draw(st.integers(0, len(source) - 1))
        match draw(st.sampled_from(["swap", "drop", "duplicate", "move", "other rank", "relabel"])):
            case "swap":
                source[at], source[to] = source[to], source[at]
            case "drop" if sum(map(len, lists)) > 1:
                source.pop(at)
            case "duplicate":
                target.insert(draw(st.integers(0, len(target))), source[at])
            case "move":
                source.insert(to, source.pop(at))
            case "other rank":
                action = source.pop(at)
                target.insert(draw(st.integers(0, len(target))), action)
            case "relabel":
                stage, kind, microbatch = source[at].stage, source[at].kind, source[at].microbatch
                kind = draw(st.sampled_from(Kind))
                source[at] = Action(
                    stage + draw(st.integers(0, 1)), kind, microbatch + draw(st.integers(0, 1))
                )
    return Order(tuple(map(tuple, lists)), order.placement, order.num_microbatches)


def is_legal(order: Order) -> bool:
    """An independent checker: count the tasks, then let the standard library sort the graph."""
    count = Counter(
        (a.stage, a.kind.value, a.microbatch) for actions in order.actions for a in actions
    )
    tasks = [(s, m) for s in range(len(order.placement)) for m in range(order.num_microbatches)]
    whole = {
        (s, m): Counter(k for (t, k, n) in count.elements() if (t, n) == (s, m)) for s, m in tasks
    }
    if any("".join(sorted(kinds.elements())) not in ("BF", "FIW") for kinds in whole.values()):
        return False
    if sum(count.values()) != sum(sum(kinds.values()) for kinds in whole.values()):
        return False
    graph: dict[tuple[int, str, int], set[tuple[int, str, int]]] = {key: set() for key in count}
    for rank, actions in enumerate(order.actions):
        if any(order.placement[a.stage] != rank for a in actions):
            return False
        keys = [(a.stage, a.kind.value, a.microbatch) for a in actions]
        for before, after in itertools.pairwise(keys):
            graph[after].add(before)
    for s, k, m in graph:
        if k == "F":
            graph[s, k, m] |= {(s - 1, "F", m)} & set(graph)
        elif k == "W":
            graph[s, k, m].add((s, "I", m))
        else:
            graph[s, k, m].add((s, "F", m))
            graph[s, k, m] |= {(s + 1, "B", m), (s + 1, "I", m)} & set(graph)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


def is_accepted(order: Order) -> bool:
    problem = None
    try:
        validate_order(order)
    except ScheduleError as error:
        problem = str(error)
    assert problem is None or len(problem.splitlines()) <= 15
    return problem is None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(mutated_orders())
def test_mutated_orders_are_accepted_exactly_if_legal(order: Order) -> None:
    assert is_accepted(order) == is_legal(order)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(LEGAL)
def test_schedules_are_legal_for_the_independent_checker(order: Order) -> None:
    assert is_legal(order)
    assert is_accepted(order)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(LEGAL, st.data())
def test_a_dropped_or_doubled_task_is_always_refused(order: Order, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, order.num_ranks - 1))
    actions = order.actions[rank]
    at = data.draw(st.integers(0, len(actions) - 1))
    dropped, doubled = actions[:at] + actions[at + 1 :], actions[: at + 1] + actions[at:]
    for broken in (dropped, doubled):
        lists = (*order.actions[:rank], broken, *order.actions[rank + 1 :])
        assert not is_accepted(Order(lists, order.placement, order.num_microbatches))


def test_whole_and_split_backwards_may_mix() -> None:
    validate_order(
        parse_order(
            """
            2 micro-batches, stages on ranks 0 1 2
            rank 0: 0F0 0F1 0B0 0I1 0W1
            rank 1: 1F0 1F1 1I0 1B1 1W0
            rank 2: 2F0 2B0 2F1 2I1 2W1
            """
        )
    )


CROSSED = """
    2 micro-batches, stages on ranks 0 1
    rank 0: 0F0 0B0 0F1 0B1
    rank 1: 1F1 1B1 1F0 1B0
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 micro-batches, stages on ranks 0\nrank 0: 0F0 0B0", "at least 1 micro-batch, got 0"),
        ("1 micro-batch, stages on ranks", "got 0 ranks and 0 stages"),
        (
            "1 micro-batch, stages on ranks 0 3\nrank 0: 0F0\nrank 1: 1F0",
            "stage 1 is placed on rank 3, .* 2 ranks",
        ),
        (
            "1 micro-batch, stages on ranks 0 2\nrank 0: 0F0\nrank 1:\nrank 2: 1F0\nrank 3:",
            r"not fill its mesh: 4 ranks, but stages on only 2 of them \(ranks 1, 3 without",
        ),
        (
            "1 micro-batch, stages on ranks 0 1\nrank 0: 0F0 1F0 0B0\nrank 1: 1B0",
            r"rank 0, position 1: 1F0 belongs on rank 1, .*\n.*\[1F0\] 0B0   <-- ERROR HERE",
        ),
        (
            "1 micro-batch, stages on ranks 0\nrank 0: 0F0 7F0",
            "7F0 names stage 7, but there are only 1 stages",
        ),
        (
            "1 micro-batch, stages on ranks 0\nrank 0: 0F0 0F7",
            "0F7 names micro-batch 7, but there are only 1",
        ),
        (
            "1 micro-batch, stages on ranks 0\nrank 0: 0F0 0B0 0B0",
            r"0B0 comes twice\n  rank 0: 0F0 0B0 \[0B0\]",
        ),
        (
            "1 micro-batch, stages on ranks 0\nrank 0: 0F0 0I0",
            "micro-batch 0, on rank 0: .* F B, or F I W, got F I$",
        ),
        (
            "1 micro-batch, stages on ranks 0\nrank 0: 0F0 0B0 0W0",
            "expected the tasks F B, or F I W, got F B W$",
        ),
        ("1 micro-batch, stages on ranks 0\nrank 0:", "got none$"),
        (
            "1 micro-batch, stages on ranks 0\nrank 0: 0B0 0F0",
            (
                r"rank 0 is stuck at 0B0\n  rank 0: \[0B0\] 0F0   <-- ERROR HERE\n"
                r"0B0 \(rank 0, position 0\) waits for 0F0 \(rank 0, position 1\)"
            ),
        ),
        (
            CROSSED,
            (
                r"rank 0: 0F0 \[0B0\] 0F1 0B1   <-- ERROR HERE\n  rank 1: \[1F1\] 1B1 1F0 1B0\n"
                r"0B0 \(rank 0, position 1\) waits for 1B0 \(rank 1, position 3\)\n"
                r"1F1 \(rank 1, position 0\) waits for 0F1 \(rank 0, position 2\)\n"
            ),
        ),
    ],
)
def test_illegal_orders_are_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate_order(parse_order(text))


def test_the_message_shows_only_what_lies_around_the_error() -> None:
    order = OneFOneB().order(32, 64)
    lists = [list(actions) for actions in order.actions]
    lists[20][3], lists[20][40] = lists[20][40], lists[20][3]
    with pytest.raises(ScheduleError) as caught:
        validate_order(Order(tuple(map(tuple, lists)), order.placement, order.num_microbatches))
    lines = str(caught.value).splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 100
    [marked] = [line for line in lines if line.endswith("<-- ERROR HERE")]
    assert marked.startswith("  rank 20: ")
    assert f"[{lists[20][3]}]" in marked


@pytest.mark.parametrize(
    "costs", [None, Costs(), Costs(forward=0, backward_input=0), Costs(0, 0, 0), Costs(3, 1, 7)]
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_topological_order_keeps_lists_and_dependencies(
    schedule: Schedule, costs: Costs | None
) -> None:
    order = schedule.order(4, 6)
    sequence = topological_order(order, costs)
    for rank in range(order.num_ranks):
        assert tuple(action for at, action in sequence if at == rank) == order.actions[rank]
    place = {action: index for index, (_, action) in enumerate(sequence)}
    for action, needs in dependency_map(order).items():
        assert all(place[needed] < place[action] for needed in needs)


def test_topological_order_follows_the_clock() -> None:
    got = topological_order(OneFOneB().order(2, 2))
    assert (
        " ".join(f"{rank}:{action}" for rank, action in got)
        == "0:0F0 0:0F1 1:1F0 1:1B0 0:0B0 1:1F1 1:1B1 0:0B1"
    )


def test_doctests() -> None:
    assert doctest.testmod(orders).failed == 0
