"""Claim: costs taken from a simulated run are those that it was simulated with."""

from fractions import Fraction

import pytest

from stagewright.pipelining.actions import Kind, parse_action
from stagewright.pipelining.calibrate import measured_costs
from stagewright.pipelining.schedules import ZBH1, Interleaved1F1B, OneFOneB
from stagewright.pipelining.simulate import ProgramCosts, simulate_program
from stagewright.pipelining.timeline import (
    Costs,
    OuterSpan,
    Span,
    Timeline,
    Transfer,
    simulate_order,
)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=lambda s: s.name)
def test_task_costs_come_back(schedule):
    costs = Costs(forward=(2, 3), backward_input=(4, 5), backward_weight=(6, 7))
    got = measured_costs([simulate_order(schedule.order(2, 4), costs)])
    table = costs.table(2)
    assert got.tasks == {(kind, s): table[kind][s] for kind, s in got.tasks}
    kinds = {Kind.F, Kind.I, Kind.W} if schedule.name == "zbh1" else {Kind.F, Kind.B}
    assert set(got.tasks) == {(kind, stage) for kind in kinds for stage in (0, 1)}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1(), Interleaved1F1B(2)], ids=lambda s: s.name)
def test_all_costs_come_back_and_give_the_same_timeline(schedule, overlap, program_of):
    order = schedule.order(3, 6)
    program = program_of(order, lambda action: 8 * (1 + action.stage))
    kinds = {action.kind for actions in order.actions for action in actions}
    tasks = {
        (kind, stage): 10 + 3 * stage + ord(kind.value) % 7
        for kind in kinds
        for stage in range(order.num_stages)
    }
    costs = ProgramCosts(tasks, latency=Fraction(1, 3), bandwidth=16.0, overlap=overlap)
    timeline = simulate_program(program, costs)
    got = measured_costs([timeline], ProgramCosts({}, overlap=overlap))
    assert got.tasks == pytest.approx(tasks, rel=1e-12)  # times are floats: bytes over a bandwidth
    assert got.latency == pytest.approx(1 / 3, rel=1e-9)
    assert got.bandwidth == pytest.approx(16.0, rel=1e-9)
    again = simulate_program(program, got)
    assert [span.start for span in again.spans] == pytest.approx(
        [span.start for span in timeline.spans], rel=1e-9
    )


def test_a_step_that_was_disturbed_does_not_count():
    spans = [Span(0, parse_action(f"0F{i}"), 0, 90 if i == 1 else 3) for i in range(5)]
    outer = [OuterSpan(0, "update", 0, length) for length in (7, 7, 50)]
    got = measured_costs([Timeline(tuple(spans), 1, tuple(outer), unit="s")])
    assert got.tasks == {(Kind.F, 0): 3}
    assert got.outer == {"update": 7}
    assert got.unit == "s"


def sent(times, busy=()):
    """A timeline of transfers ((bytes, start, end), ...) to rank 1, which is busy at times."""
    transfers = tuple(Transfer(0, 1, "0F0", *values) for values in times)
    outer = tuple(OuterSpan(1, "work", *interval) for interval in busy)
    return Timeline((), 2, outer, transfers)


def test_a_transfer_that_nobody_waited_for_tells_nothing_of_its_link():
    """The second was had late because its receiver was at work; of the third it is not so."""
    got = measured_costs([sent([(8, 0, 2), (8, 5, 50), (8, 60, 62)], busy=[(4, 50)])])
    assert (got.latency, got.bandwidth) == (2, None)


def test_latency_and_bandwidth_are_the_line_through_the_sizes():
    got = measured_costs([sent([(0, 0, 3), (8, 10, 15), (16, 20, 27), (8, 30, 35), (8, 40, 99)])])
    assert (got.latency, got.bandwidth) == (3, 4.0)


def test_latency_is_never_less_than_nothing():
    """The line through both would begin at -1; the best one that begins at 0 has a slope of 70 / 500."""
    got = measured_costs([sent([(10, 0, 1), (20, 10, 13)])])
    assert got.latency == 0
    assert got.bandwidth == pytest.approx(500 / 70)


def test_a_size_that_is_rarely_sent_moves_the_line_little():
    """Sixty messages lie on 3 + bytes / 4, and one of 16 bytes took 12 longer.

    By hand: the line is 0.34 too low at 0 bytes and 0.69 too high at 8. Were all sizes worth the same it would
    be 2 too low and 4 too high.
    """
    often = [(size, 100 * i, 100 * i + 3 + size // 4) for i, size in enumerate([0, 8] * 30)]
    got = measured_costs([sent([*often, (16, 9000, 9000 + 7 + 12)])])
    assert got.latency == pytest.approx(3 - 0.343, abs=0.001)
    assert got.latency + 8 / got.bandwidth == pytest.approx(5 + 0.686, abs=0.001)


def test_bigger_messages_that_are_faster_leave_only_latency():
    got = measured_costs([sent([(8, 0, 5), (8, 10, 15), (64, 20, 21)])])
    assert (got.latency, got.bandwidth) == (5, None)


def test_what_is_not_measured_comes_from_the_base():
    timeline = simulate_order(OneFOneB().order(2, 2))
    base = ProgramCosts({}, latency=5, bandwidth=8.0, overlap=False, overhead=3)
    got = measured_costs([timeline], base)
    assert (got.latency, got.bandwidth, got.overlap, got.overhead) == (5, 8.0, False, 3)


def test_without_a_timeline_there_are_no_costs():
    with pytest.raises(ValueError, match=r"at least one measured timeline.* got none"):
        measured_costs([])


def test_units_are_not_mixed():
    with pytest.raises(ValueError, match="all in one unit, got several units: '', 's'"):
        measured_costs([Timeline((), 1), Timeline((), 1, unit="s")])
