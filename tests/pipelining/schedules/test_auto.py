"""Claim: the order that is found is legal, keeps within the limit, and is never slower than a named one that does."""

import doctest
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.pipelining.actions import Kind, Order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.schedules import Auto, Schedule, auto
from stagewright.pipelining.schedules.names import all_names, by_name
from stagewright.pipelining.timeline import Costs, peak_activations, simulate_order

DURATION = st.integers(1, 5)


def makespan(order: Order, costs: Costs):
    return simulate_order(order, costs).makespan


@st.composite
def questions(draw):
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    per_rank = draw(st.sampled_from([1, 2]))
    shape = draw(st.sampled_from(["loop", "v"])) if per_rank == 2 else "loop"
    stages = ranks * per_rank
    times = [tuple(draw(st.lists(DURATION, min_size=stages, max_size=stages))) for _ in range(3)]
    costs = Costs(*times, latency=draw(st.integers(0, 3)))
    limit = draw(st.sampled_from([None, stages, 2 * stages]))
    search = Auto(costs, limit, per_rank, shape, evaluations=40)
    return search, ranks, microbatches


@settings(max_examples=25)
@given(questions())
def test_it_is_legal_within_the_limit_and_never_slower(question) -> None:
    search, ranks, microbatches = question
    order = search.order(ranks, microbatches)
    validate_order(order)
    assert order == search.order(ranks, microbatches)
    if search.memory_limit is not None:
        assert max(peak_activations(order)) <= search.memory_limit
    length = makespan(order, search.costs)
    assert length >= search.lower_bound(ranks, microbatches)
    for name in all_names():
        try:
            named = by_name(name).order(ranks, microbatches)
        except ScheduleError:
            continue
        fits = search.memory_limit is None or max(peak_activations(named)) <= search.memory_limit
        if fits and named.placement == order.placement:
            assert length <= makespan(named, search.costs), name


def test_each_stage_takes_its_microbatches_in_order() -> None:
    order = Auto(Costs(forward=(1, 3, 2), latency=1), 4).order(3, 6)
    for row in order.actions:
        for _, group in itertools.groupby(
            sorted(row, key=lambda a: (a.stage, a.kind)), key=lambda a: (a.stage, a.kind)
        ):
            assert [a.microbatch for a in group] == list(range(6))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "limit", "length"),
    [(4, 8, 4, 3 * 8 + 3), (8, 24, 8, 3 * 24 + 7), (2, 3, 4, 3 * 3 + 1)],
)
def test_it_fills_the_bubble_as_the_zero_bubble_paper_does(
    ranks: int, microbatches: int, limit: int, length: int
) -> None:
    search = Auto(memory_limit=limit)
    assert makespan(search.order(ranks, microbatches), Costs()) == length
    assert search.lower_bound(ranks, microbatches) == length


def test_it_beats_what_has_a_name_where_stages_are_uneven() -> None:
    costs = Costs((1, 1, 1), (1, 4, 2), (4, 1, 2), latency=3)
    search = Auto(costs, memory_limit=4, evaluations=100)
    found = makespan(search.order(3, 6), costs)
    named = [by_name(name).order(3, 6) for name in ("gpipe", "1f1b", "zbh1", "zbh2")]
    fitting = [makespan(o, costs) for o in named if max(peak_activations(o)) <= 4]
    assert found < min(fitting)


def brute_force(ranks: int, microbatches: int) -> int:
    """The shortest of all orders in which each stage takes its micro-batches in order."""
    lengths = []
    rows = by_name("zbh1").order(ranks, microbatches).actions
    for permuted in itertools.product(*(list(in_order(row)) for row in rows)):
        try:
            order = Order(permuted, tuple(range(ranks)), microbatches)
            lengths.append(simulate_order(order).makespan)
        except ScheduleError:
            continue
    return min(lengths)


def in_order(row):
    for permuted in itertools.permutations(row):
        kinds = {kind: [a.microbatch for a in permuted if a.kind is kind] for kind in Kind}
        if all(found == sorted(found) for found in kinds.values()):
            yield permuted


def test_on_the_smallest_case_nothing_is_shorter() -> None:
    assert makespan(Auto().order(2, 2), Costs()) == brute_force(2, 2)


def test_a_limit_that_nothing_keeps_is_refused_with_the_least() -> None:
    with pytest.raises(ScheduleError, match="at most 0 activations a rank; the least found is 1"):
        Auto(memory_limit=0).order(1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages_per_rank": 0}, "got 0 and 400"),
        ({"shape": "w"}, "got 'w' with 1"),
        ({"shape": "v"}, "'v' with stages_per_rank=2, got 'v' with 1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Auto(**changes)


def test_it_is_a_schedule() -> None:
    assert isinstance(Auto(), Schedule)
    assert (Auto().name, Auto(stages_per_rank=3).num_stages(2)) == ("auto", 6)
    assert doctest.testmod(auto).failed == 0
