"""Claim: simulated times are those one gets by hand, exact for fractions, in linear time."""

import doctest
import time
from fractions import Fraction

import pytest

from stagewright.pipelining import timeline
from stagewright.pipelining.actions import parse_action, parse_order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.schedules import ZBH1, Interleaved1F1B, OneFOneB
from stagewright.pipelining.timeline import (
    Costs,
    OuterSpan,
    Span,
    Timeline,
    peak_activations,
    simulate_order,
)

TWO_BY_TWO = parse_order(
    """
    2 micro-batches, stages on ranks 0 1
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """
)


def times(result: Timeline) -> dict[str, tuple[object, object]]:
    return {str(span.action): (span.start, span.end) for span in result.spans}


def test_unit_costs_by_hand() -> None:
    got = simulate_order(TWO_BY_TWO)
    assert times(got) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1, 2),
        "1B0": (2, 4),
        "0B0": (4, 6),
        "1F1": (4, 5),
        "1B1": (5, 7),
        "0B1": (7, 9),
    }
    assert got.makespan == 9
    assert (got.busy(0), got.busy(1)) == (6, 6)
    assert got.bubble_fraction == Fraction(1, 3)


def test_latency_counts_between_ranks_only() -> None:
    got = times(simulate_order(TWO_BY_TWO, Costs(latency=10)))
    assert got["0F1"] == (1, 2)
    assert got["1F0"] == (11, 12)
    assert got["1B0"] == (12, 14)
    assert got["0B0"] == (24, 26)


def test_costs_by_stage() -> None:
    got = times(
        simulate_order(
            TWO_BY_TWO, Costs(forward=(1, 5), backward_input=(2, 3), backward_weight=(4, 1))
        )
    )
    assert got["1F0"] == (1, 6)
    assert got["1B0"] == (6, 10)
    assert got["0B0"] == (10, 16)


def test_fractions_stay_exact() -> None:
    third = Fraction(1, 3)
    got = simulate_order(OneFOneB().order(4, 7), Costs(third, third, third))
    assert got.makespan == 10
    assert got.bubble_fraction == Fraction(3, 10)


def test_split_backward_frees_the_stage_before() -> None:
    got = times(
        simulate_order(
            parse_order(
                "1 micro-batch, stages on ranks 0 1\nrank 0: 0F0 0I0 0W0\nrank 1: 1F0 1I0 1W0"
            )
        )
    )
    assert got["0I0"] == got["1W0"] == (3, 4)


def test_spans_come_by_start_then_rank() -> None:
    spans = simulate_order(ZBH1().order(4, 8)).spans
    assert [(span.start, span.rank) for span in spans] == sorted(
        (span.start, span.rank) for span in spans
    )


def test_peak_activations_by_hand() -> None:
    assert peak_activations(TWO_BY_TWO) == (2, 1)
    held = parse_order("2 micro-batches, stages on ranks 0\nrank 0: 0F0 0I0 0F1 0I1 0W0 0W1")
    assert peak_activations(held) == (2,)


def test_nothing_takes_no_time() -> None:
    assert Timeline((), 2).makespan == 0
    assert Timeline((), 2).bubble_fraction == 0
    assert Timeline((Span(0, parse_action("0F0"), 0, 0),), 1).bubble_fraction == 0


def test_floats_never_give_a_negative_bubble() -> None:
    got = simulate_order(ZBH1().order(1, 50), Costs(0.1, 0.2, 0.3))
    assert 0 <= got.bubble_fraction < Fraction(1, 10**9)


@pytest.mark.parametrize("costs", [Costs(forward=(1, 1, 1)), Costs(backward_weight=(1,))])
def test_costs_for_other_stages_are_refused(costs: Costs) -> None:
    with pytest.raises(ValueError, match=r"costs for 2 stages, got [13]"):
        simulate_order(TWO_BY_TWO, costs)


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="expected backward_input of 0 or more"):
        Costs(backward_input=(1, -1))


def test_an_order_that_cannot_run_is_refused() -> None:
    order = parse_order("1 micro-batch, stages on ranks 0\nrank 0: 0B0 0F0")
    with pytest.raises(ScheduleError, match=r"only 0 of 2 tasks can run; orders.validate_order"):
        simulate_order(order)


def test_ten_thousand_tasks_a_second() -> None:
    order = Interleaved1F1B(4).order(16, 256)
    begin = time.perf_counter()
    spans = simulate_order(order).spans
    assert len(spans) / (time.perf_counter() - begin) > 10_000


def test_doctests() -> None:
    assert doctest.testmod(timeline).failed == 0


def test_outer_work_counts_as_busy_and_lengthens_the_step() -> None:
    spans = (Span(0, parse_action("0F0"), 0, 2), Span(1, parse_action("1F0"), 2, 4))
    got = Timeline(spans, 2, outer=(OuterSpan(0, "update", 4, 6),))
    assert got.makespan == 6
    assert (got.busy(0), got.busy(1)) == (4, 2)
    assert got.bubble_fraction == Fraction(1, 2)


def test_placement_is_read_off_the_spans() -> None:
    assert simulate_order(Interleaved1F1B(2).order(2, 3)).placement == (0, 1, 0, 1)


def test_peak_bytes() -> None:
    got = Timeline((), 2, memory=(((0, 5), (1, 9), (3, 2)), ()))
    assert (got.peak_bytes(0), got.peak_bytes(1)) == (9, 0)
    assert Timeline((), 2).peak_bytes(1) == 0


def test_holes_are_waits_between_a_ranks_own_first_and_last_task() -> None:
    got = simulate_order(TWO_BY_TWO)
    assert (got.holes(0), got.holes(1)) == (3, 0)
    late = OuterSpan(1, "optimizer", 9, 10)
    assert Timeline(got.spans, 3, outer=(late,)).holes(1) == 2
    assert Timeline(got.spans, 3).holes(2) == 0
