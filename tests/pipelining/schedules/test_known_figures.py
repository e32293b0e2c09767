"""Claim: for 8 ranks, 24 micro-batches and F = I = W = 1 we get the figures of the literature."""

import doctest
import importlib
from fractions import Fraction

import pytest

from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB, Schedule
from stagewright.pipelining.timeline import Costs, peak_activations, simulate_order


@pytest.mark.parametrize(
    ("schedule", "bubble", "percent", "activations"),
    [
        (GPipe(), Fraction(7, 31), 22.6, 24),
        (OneFOneB(), Fraction(7, 31), 22.6, 8),
        (Interleaved1F1B(2), Fraction(7, 55), 12.7, 11.5),
        (Interleaved1F1B(4), Fraction(7, 103), 6.8, 9.75),
        (ZBH1(), Fraction(7, 79), 8.9, 8),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_eight_ranks(
    schedule: Schedule, bubble: Fraction, percent: float, activations: float
) -> None:
    order = schedule.order(8, 24)
    got = simulate_order(order).bubble_fraction
    assert got == bubble
    assert round(float(got) * 100, 1) == percent
    stages_per_rank = schedule.num_stages(8) // 8
    assert max(peak_activations(order)) / stages_per_rank == activations


@pytest.mark.parametrize(
    "costs", [Costs(1, 2, 1), Costs(2, 3, 2), Costs(3, 1, 1), Costs(1, 1, Fraction(1, 2))]
)
@pytest.mark.parametrize("size", [(2, 2), (4, 7), (8, 24)])
def test_zbh1_bubble_for_other_costs(costs: Costs, size: tuple[int, int]) -> None:
    """Zero-bubble paper, section 2.3: (p - 1) (F + I - W) on every rank, while W <= F and I."""
    ranks, microbatches = size
    table = costs.table(ranks)
    work = microbatches * sum(table[kind][0] for kind in table if kind != "B")
    [forward], [inputs], [weights] = (set(table[kind]) for kind in table if kind != "B")
    bubble = (ranks - 1) * (forward + inputs - weights)
    assert simulate_order(ZBH1().order(ranks, microbatches), costs).makespan == work + bubble


@pytest.mark.parametrize(
    "schedule", [GPipe(), OneFOneB(), Interleaved1F1B(2)], ids=lambda schedule: schedule.name
)
@pytest.mark.parametrize("size", [(4, 3), (4, 7), (8, 24)])
def test_bubble_without_split_is_the_same_for_any_costs(
    schedule: GPipe | OneFOneB | Interleaved1F1B, size: tuple[int, int]
) -> None:
    got = simulate_order(schedule.order(*size), Costs(3, 5, 2)).bubble_fraction
    assert got == schedule.bubble(*size)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 9, 11, 17, 23, 31, 33])
@pytest.mark.parametrize("repeat", [2, 4])
def test_interleaved_takes_any_number_of_microbatches(
    ranks: int, microbatches: int, repeat: int
) -> None:
    schedule = Interleaved1F1B(repeat)
    timeline = simulate_order(schedule.order(ranks, microbatches))
    assert timeline.bubble_fraction == schedule.bubble(ranks, microbatches)


def test_interleaved_once_is_1f1b() -> None:
    assert Interleaved1F1B(1).order(4, 6) == OneFOneB().order(4, 6)


def test_repeat_must_be_positive() -> None:
    with pytest.raises(ValueError, match="repeat of 1 or more stages per rank, got 0"):
        Interleaved1F1B(0)


@pytest.mark.parametrize(
    "module", ["gpipe", "one_f_one_b", "interleaved", "zbh1", "names", "schedule"]
)
def test_doctests(module: str) -> None:
    assert (
        doctest.testmod(
            importlib.import_module(f"stagewright.pipelining.schedules.{module}")
        ).failed
        == 0
    )
