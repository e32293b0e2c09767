"""Claim: every schedule obeys every law, for ranks 1-8, micro-batches 1-33, repeats 1-4, exactly.

A new schedule joins ``SCHEDULES_UNDER_TEST`` and inherits them all. It must offer ``bubble`` and
``max_activations`` beyond the protocol. A schedule that does not exist for some sizes refuses them,
with both numbers, and says in ``REFUSED`` which. (That gradients equal the oracle under each
schedule is tested with the engine.)

One test is one law for one schedule and number of ranks, over all numbers of micro-batches: there
are some five thousand cells. Repeats of 1 are other schedules, which is tested by itself; Hanayo's
waves are two stages a rank each.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import pytest

from stagewright.pipelining.actions import Kind, Order, parse_order
from stagewright.pipelining.drawing import draw_order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.schedules import (
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    Eager1F1B,
    GPipe,
    HanayoWaves,
    Interleaved1F1B,
    LoopedBFS,
    LoopedDFS,
    OneFOneB,
    Schedule,
    VHalf,
    VMin,
    by_name,
)
from stagewright.pipelining.timeline import peak_activations, simulate_order


class Lawful(Schedule, Protocol):
    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction: ...

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]: ...


SCHEDULES_UNDER_TEST: list[Lawful] = [
    GPipe(),
    OneFOneB(),
    Eager1F1B(),
    *(Interleaved1F1B(repeat) for repeat in (2, 3, 4)),
    *(LoopedBFS(repeat) for repeat in (2, 3, 4)),
    *(LoopedDFS(repeat) for repeat in (2, 3, 4)),
    *(HanayoWaves(waves) for waves in (1, 2)),
    ZBH1(),
    ZBH2(),
    ZBV(),
    VHalf(),
    VMin(),
    DualPipeV(),
]
REFUSED: dict[str, Callable[[int, int], bool]] = {
    "dualpipev": lambda ranks, microbatches: microbatches < 2 * ranks,
}
RANKS = range(1, 9)
MICROBATCHES = range(1, 34)
every_schedule = pytest.mark.parametrize(
    "schedule", SCHEDULES_UNDER_TEST, ids=lambda schedule: schedule.name
)


@dataclass(frozen=True)
class Row:
    """A schedule's orders for one number of ranks, by number of micro-batches."""

    schedule: Lawful
    ranks: int
    orders: dict[int, Order]


def refuses(schedule: Lawful, ranks: int, microbatches: int) -> bool:
    return REFUSED.get(schedule.name, lambda *_: False)(ranks, microbatches)


@pytest.fixture(
    scope="module",
    params=itertools.product(SCHEDULES_UNDER_TEST, RANKS),
    ids=lambda param: f"{param[0].name}-{param[1]}",
)
def row(request: pytest.FixtureRequest) -> Row:
    schedule, ranks = request.param
    sizes = [m for m in MICROBATCHES if not refuses(schedule, ranks, m)]
    return Row(schedule, ranks, {m: schedule.order(ranks, m) for m in sizes})


def test_orders_are_legal(row: Row) -> None:
    for order in row.orders.values():
        validate_order(order)


def test_orders_have_the_size_they_were_asked_for(row: Row) -> None:
    for microbatches, order in row.orders.items():
        assert order.num_ranks == row.ranks
        assert order.num_microbatches == microbatches
        assert order.num_stages == row.schedule.num_stages(row.ranks)


def test_each_task_runs_once_and_micro_batches_in_order(row: Row) -> None:
    """In order, so that gradients add up in the same sequence, to the same bits, as on one device.

    A stage may give some micro-batches a whole backward and some a split one; then the places where
    inputs' gradients are made (``B`` or ``I``) are in order, and where weights' are (``B`` or ``W``).
    """
    places = {Kind.F: "F", Kind.B: "IW", Kind.I: "I", Kind.W: "W"}
    for microbatches, order in row.orders.items():
        sequences: dict[tuple[int, str], list[int]] = {}
        for actions in order.actions:
            for action in actions:
                for place in places[action.kind]:
                    sequences.setdefault((action.stage, place), []).append(action.microbatch)
        assert sequences == {
            (stage, place): list(range(microbatches))
            for stage in range(order.num_stages)
            for place in "FIW"
        }


def test_bubble_equals_the_formula(row: Row) -> None:
    for microbatches, order in row.orders.items():
        work = 3 * order.num_stages * microbatches
        got = 1 - Fraction(work, row.ranks * Fraction(simulate_order(order).makespan))
        assert got == row.schedule.bubble(row.ranks, microbatches)


def test_activations_reach_their_bound_and_no_more(row: Row) -> None:
    for microbatches, order in row.orders.items():
        peaks = peak_activations(order)
        bounds = row.schedule.max_activations(row.ranks, microbatches)
        assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
        assert max(peaks) == max(bounds)


@every_schedule
def test_refusals_give_both_numbers_and_what_would_work(schedule: Lawful) -> None:
    for ranks, microbatches in itertools.product(RANKS, MICROBATCHES):
        if not refuses(schedule, ranks, microbatches):
            continue
        message = f"got {ranks} ranks and {microbatches} micro-batches; use {2 * ranks} micro-"
        for method in (schedule.order, schedule.bubble, schedule.max_activations):
            with pytest.raises(ScheduleError, match=message):
                method(ranks, microbatches)


@pytest.mark.parametrize("ranks", RANKS)
def test_repeats_of_one_are_other_schedules(ranks: int) -> None:
    for once, plain in (
        (Interleaved1F1B(1), OneFOneB()),
        (LoopedBFS(1), GPipe()),
        (LoopedDFS(1), GPipe()),
    ):
        for m in MICROBATCHES:
            assert once.order(ranks, m) == plain.order(ranks, m)
            assert once.bubble(ranks, m) == plain.bubble(ranks, m)
            assert once.max_activations(ranks, m) == plain.max_activations(ranks, m)
            assert once.num_stages(ranks) == plain.num_stages(ranks)


def test_only_names_under_test_may_refuse() -> None:
    assert set(REFUSED) <= {schedule.name for schedule in SCHEDULES_UNDER_TEST}


@every_schedule
def test_order_is_the_same_when_asked_again(schedule: Lawful) -> None:
    assert schedule.order(4, 9) == schedule.order(4, 9)


@every_schedule
def test_order_prints_and_parses(schedule: Lawful) -> None:
    order = schedule.order(4, 9)
    assert parse_order(str(order)) == order


@every_schedule
def test_name_makes_the_schedule_again(schedule: Lawful) -> None:
    assert isinstance(schedule, Schedule)
    assert by_name(schedule.name) == schedule


@every_schedule
def test_docstring_shows_the_picture(schedule: Lawful) -> None:
    doc = type(schedule).__doc__
    assert doc is not None
    assert ">>> print(draw_order(" in doc
    assert "- bubble: " in doc
    assert "- activations: " in doc
    assert "Reference:" in doc
    assert "rank 0" in draw_order(schedule.order(2, 4))


@every_schedule
@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (4, 0), (-1, 2)])
def test_impossible_sizes_are_refused_with_both_numbers(
    schedule: Lawful, ranks: int, microbatches: int
) -> None:
    message = f"got {ranks} ranks and {microbatches} micro-batches"
    for method in (schedule.order, schedule.bubble, schedule.max_activations):
        with pytest.raises(ScheduleError, match=message):
            method(ranks, microbatches)
