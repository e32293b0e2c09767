"""Claim: times are written in a unit that suits them, and axes have few, round marks."""

import doctest
from fractions import Fraction

import pytest

from stagewright.pipelining.pictures import palette, times
from stagewright.pipelining.pictures.times import clock_of, summary, tick_step
from stagewright.pipelining.timeline import OuterSpan, Timeline


def step_of(seconds: float, unit: str = "s") -> Timeline:
    return Timeline((), 1, outer=(OuterSpan(0, "update", 0, seconds),), unit=unit)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(90.0, "90 s"), (1.5, "1.5 s"), (0.25, "250 ms"), (0.001, "1 ms"), (0.00042, "420 µs")],
)
def test_steps_are_told_in_the_largest_unit_that_makes_them_one(seconds: float, text: str) -> None:
    assert clock_of(step_of(seconds)).text(seconds) == text


def test_abstract_units_stay() -> None:
    assert clock_of(step_of(0.25, "")).text(0.25) == "0.25 time units"
    assert clock_of(step_of(7, "ticks")).text(7) == "7 ticks"


@pytest.mark.parametrize("length", [1, 7, 33, 237, 99999, Fraction(1, 7), 0.00031, 1e-9])
@pytest.mark.parametrize("most", [1, 4, 10, 33])
def test_an_axis_has_few_round_marks(length: float, most: int) -> None:
    step = tick_step(length, most)
    assert Fraction(length) / step <= most
    assert str(float(f"{float(step):e}".partition("e")[0])) in ("1.0", "2.0", "5.0")
    assert Fraction(length) / step > Fraction(most) * Fraction(2, 5)  # not half of it wasted


def test_no_length_has_a_step_too() -> None:
    assert tick_step(0, 5) == 1


def test_a_measured_step_is_summed_up_in_its_unit(measured: Timeline) -> None:
    assert summary(measured)[3] == "20 ms"


@pytest.mark.parametrize("module", [times, palette])
def test_doctests(module) -> None:
    assert doctest.testmod(module).failed == 0
