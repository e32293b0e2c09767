"""Claim: costs taken from a simulated run are those that it was simulated with."""

import pytest

from stagewright.pipelining.actions import Kind, parse_action
from stagewright.pipelining.calibrate import measured_costs
from stagewright.pipelining.schedules import ZBH1, OneFOneB
from stagewright.pipelining.simulate import ProgramCosts
from stagewright.pipelining.timeline import Costs, OuterSpan, Span, Timeline, simulate_order


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=lambda s: s.name)
def test_costs_come_back(schedule):
    costs = Costs(forward=(2, 3), backward_input=(4, 5), backward_weight=(6, 7))
    got = measured_costs([simulate_order(schedule.order(2, 4), costs)])
    table = costs.table(2)
    assert got.tasks == {(kind, s): table[kind][s] for kind, s in got.tasks}
    kinds = {Kind.F, Kind.I, Kind.W} if schedule.name == "zbh1" else {Kind.F, Kind.B}
    assert set(got.tasks) == {(kind, stage) for kind in kinds for stage in (0, 1)}


def test_a_step_that_was_disturbed_does_not_count():
    spans = [Span(0, parse_action(f"0F{i}"), 0, 90 if i == 1 else 3) for i in range(5)]
    outer = [OuterSpan(0, "update", 0, length) for length in (7, 7, 50)]
    got = measured_costs([Timeline(tuple(spans), 1, tuple(outer), unit="s")])
    assert got.tasks == {(Kind.F, 0): 3}
    assert got.outer == {"update": 7}
    assert got.unit == "s"


def test_what_is_not_measured_comes_from_the_base():
    timeline = simulate_order(OneFOneB().order(2, 2))
    got = measured_costs([timeline], ProgramCosts({}, latency=5, bandwidth=8.0, overlap=False))
    assert (got.latency, got.bandwidth, got.overlap) == (5, 8.0, False)


def test_without_a_timeline_there_are_no_costs():
    with pytest.raises(ValueError, match="at least one measured timeline, got none"):
        measured_costs([])
