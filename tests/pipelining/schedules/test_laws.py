"""Claim: every schedule obeys every law, for ranks 1-8 and micro-batches 1-16, with no tolerance.

A new schedule joins ``SCHEDULES_UNDER_TEST`` and inherits them all. It must offer ``bubble`` and
``max_activations`` beyond the protocol. (That gradients equal the oracle under each schedule is
tested with the engine.)
"""

import functools
from collections import Counter
from fractions import Fraction
from typing import Protocol

import pytest

from stagewright.pipelining.actions import Kind, Order, parse_order
from stagewright.pipelining.drawing import draw_order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.schedules import (
    ZBH1,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    by_name,
)
from stagewright.pipelining.timeline import peak_activations, simulate_order


class Lawful(Schedule, Protocol):
    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction: ...

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]: ...


SCHEDULES_UNDER_TEST: list[Lawful] = [
    GPipe(),
    OneFOneB(),
    Interleaved1F1B(repeat=1),
    Interleaved1F1B(repeat=2),
    Interleaved1F1B(repeat=3),
    ZBH1(),
]
every_schedule = pytest.mark.parametrize(
    "schedule", SCHEDULES_UNDER_TEST, ids=lambda schedule: schedule.name
)
every_size = pytest.mark.parametrize(
    ("ranks", "microbatches"), [(p, m) for p in range(1, 9) for m in range(1, 17)]
)


@functools.lru_cache(maxsize=1024)
def order_of(schedule: Schedule, ranks: int, microbatches: int) -> Order:
    return schedule.order(ranks, microbatches)


@every_schedule
@every_size
def test_order_is_legal(schedule: Lawful, ranks: int, microbatches: int) -> None:
    validate_order(order_of(schedule, ranks, microbatches))


@every_schedule
@every_size
def test_order_has_the_size_it_was_asked_for(
    schedule: Lawful, ranks: int, microbatches: int
) -> None:
    order = order_of(schedule, ranks, microbatches)
    assert order.num_ranks == ranks
    assert order.num_microbatches == microbatches
    assert order.num_stages == schedule.num_stages(ranks)


@every_schedule
@every_size
def test_each_task_runs_once(schedule: Lawful, ranks: int, microbatches: int) -> None:
    order = order_of(schedule, ranks, microbatches)
    counts = Counter((a.kind, a.stage, a.microbatch) for actions in order.actions for a in actions)
    kinds = [Kind.F, Kind.I, Kind.W] if order.splits_backward else [Kind.F, Kind.B]
    assert counts == Counter(
        (k, s, m) for k in kinds for s in range(order.num_stages) for m in range(microbatches)
    )


@every_schedule
@every_size
def test_each_stage_takes_microbatches_in_order(
    schedule: Lawful, ranks: int, microbatches: int
) -> None:
    """So that gradients add up in the same sequence, to the same bits, as on one device."""
    order = order_of(schedule, ranks, microbatches)
    sequences: dict[tuple[int, Kind], list[int]] = {}
    for actions in order.actions:
        for action in actions:
            sequences.setdefault((action.stage, action.kind), []).append(action.microbatch)
    assert all(sequence == list(range(microbatches)) for sequence in sequences.values())


@every_schedule
@every_size
def test_bubble_equals_the_formula(schedule: Lawful, ranks: int, microbatches: int) -> None:
    timeline = simulate_order(order_of(schedule, ranks, microbatches))
    assert timeline.bubble_fraction == schedule.bubble(ranks, microbatches)


@every_schedule
@every_size
def test_activations_reach_their_bound_and_no_more(
    schedule: Lawful, ranks: int, microbatches: int
) -> None:
    peaks = peak_activations(order_of(schedule, ranks, microbatches))
    bounds = schedule.max_activations(ranks, microbatches)
    assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
    assert max(peaks) == max(bounds)


@every_schedule
def test_order_prints_and_parses(schedule: Lawful) -> None:
    order = order_of(schedule, 4, 6)
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
    assert "Reference:" in doc
    assert "rank 0" in draw_order(order_of(schedule, 2, 2))


@every_schedule
@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (4, 0), (-1, 2)])
def test_impossible_sizes_are_refused_with_both_numbers(
    schedule: Lawful, ranks: int, microbatches: int
) -> None:
    message = f"got {ranks} ranks and {microbatches} micro-batches"
    for method in (schedule.order, schedule.bubble, schedule.max_activations):
        with pytest.raises(ScheduleError, match=message):
            method(ranks, microbatches)
