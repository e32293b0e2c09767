"""Claim: the picture shows every task where and as long as it runs, and fits the page."""

import doctest
import re

import pytest

from stagewright.pipelining import drawing
from stagewright.pipelining.actions import parse_action, parse_order
from stagewright.pipelining.drawing import draw_order, draw_timeline
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB, Schedule
from stagewright.pipelining.timeline import Costs, OuterSpan, Span, Timeline, simulate_order

SCHEDULES: list[Schedule] = [GPipe(), OneFOneB(), Interleaved1F1B(2), ZBH1()]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def rows(picture: str) -> list[str]:
    return [line for line in ANSI.sub("", picture).splitlines() if line.startswith("rank ")]


def test_picture_of_zbh1() -> None:
    assert draw_order(ZBH1().order(3, 4)) == "\n".join(
        [
            "3 ranks, 3 stages, 4 micro-batches, 14 time units, bubble 14.3%, peak activations 3",
            "        0           4           8           12",
            "rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3",
            "rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
            "rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
            "F forward  I input gradient  W weight gradient  . idle  numbers: micro-batches",
        ]
    )


def test_every_second_stage_of_a_rank_is_in_lower_case() -> None:
    picture = draw_order(Interleaved1F1B(2).order(2, 2))
    assert rows(picture)[0] == "rank 0  F0 F1 f0 f1 .  .  b0--- .  b1--- B0--- B1---"
    assert picture.endswith("lower case: every second stage")


def test_cells_are_as_long_as_tasks() -> None:
    order = parse_order("2 micro-batches, stages on ranks 0\nrank 0: 0F0 0B0 0F1 0B1")
    assert rows(draw_order(order, Costs(2, 1, 2))) == ["rank 0  F0  B0--- F1  B1---"]
    assert rows(draw_order(order, Costs(0.5, 0.5, 1.0))) == ["rank 0  F0 B0------ F1 B1------"]
    assert rows(draw_order(order, Costs(0, 1, 1))) == ["rank 0  B0 B1"]


def test_two_digit_microbatches_get_wider_cells() -> None:
    assert rows(draw_order(OneFOneB().order(1, 11)))[0].endswith("F9  B9----- F10 B10----")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("width", [20, 40, 80, 110, 200])
@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (4, 8), (12, 40)])
def test_picture_fits_the_page(
    schedule: Schedule, width: int, color: bool, size: tuple[int, int]
) -> None:
    picture = draw_order(schedule.order(*size), color=color, width=width)
    lines = ANSI.sub("", picture).splitlines()
    assert max(map(len, lines)) <= width
    assert len(rows(picture)) == size[0]
    assert ("\x1b" in picture) == color


def test_readme_picture_fits_without_scaling() -> None:
    order = OneFOneB().order(4, 8)
    assert draw_order(order, width=110) == draw_order(order)


def test_a_narrow_page_gets_a_smaller_picture_and_then_a_cut_one() -> None:
    order = OneFOneB().order(2, 12)
    assert rows(draw_order(order, width=50))[1] == "rank 1  .FB0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB-FB-.."
    assert rows(draw_order(order, width=20))[1] == "rank 1  .FB0FB1FB2F…"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_color_replaces_letters(schedule: Schedule) -> None:
    order = schedule.order(3, 5)
    plain, colored = (rows(draw_order(order, color=color)) for color in (False, True))
    letters = str.maketrans("", "", "FBIWfbiw")
    for row, other in zip(plain, colored, strict=True):
        assert re.findall(r"\d+", other) == re.findall(r"\d+", row.translate(letters))
        assert not set("FBIWfbiw") & set(other)


def test_every_color_is_reset() -> None:
    picture = draw_order(Interleaved1F1B(3).order(2, 4), color=True, width=30)
    for line in picture.splitlines():
        assert line.count("\x1b[0m") * 2 == line.count("\x1b[")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("color", [False, True])
def test_a_timeline_is_drawn_as_its_order(schedule: Schedule, color: bool) -> None:
    order = schedule.order(3, 5)
    costs = Costs(1, 2, 1, latency=1)
    timeline = simulate_order(order, costs)
    assert draw_timeline(timeline, color, 80) == draw_order(order, costs, color, 80)


def in_seconds(factor: float) -> Timeline:
    """1F1B's step as if measured, with work around the loop."""
    planned = simulate_order(OneFOneB().order(3, 12))
    spans = tuple(
        Span(span.rank, span.action, (span.start + 2) * factor, (span.end + 2) * factor)
        for span in planned.spans
    )
    end = (planned.makespan + 2) * factor
    outer = (OuterSpan(0, "data", 0, 2 * factor), OuterSpan(2, "update", end, end + 9 * factor))
    return Timeline(spans, 3, outer, unit="s")


@pytest.mark.parametrize("factor", [1.7, 0.0031, 1e-7])
@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("color", [False, True])
def test_seconds_are_drawn_to_scale_over_the_whole_page(
    factor: float, width: int, color: bool
) -> None:
    picture = draw_timeline(in_seconds(factor), color, width)
    lines = ANSI.sub("", picture).splitlines()
    assert max(map(len, lines)) == width
    assert not any("…" in line for line in lines)
    # A task is parted from the next by a blank, which is not written at the end of a line.
    assert {len(row) for row in rows(picture)} <= {width, width - 1}


def test_outer_work_has_its_name_where_there_is_room() -> None:
    assert rows(draw_timeline(in_seconds(0.01), width=100))[2].endswith(".update=========")
    assert "data=== outside the loop" in draw_timeline(in_seconds(0.01), width=100)


def test_tasks_of_no_length_leave_the_others_where_they_are() -> None:
    spans = (Span(0, parse_action("0F0"), 0.0, 0.0), Span(0, parse_action("0B0"), 0.0, 0.5))
    assert rows(draw_timeline(Timeline(spans, 1, unit="s"), width=18)) == [
        "rank 0  B0------- "[:17]
    ]


def test_doctests() -> None:
    assert doctest.testmod(drawing).failed == 0
