"""How instants and durations are written: in which unit, and where an axis has its marks.

In comes a timeline, out go factors, numbers and short texts. Abstract units stay as they are;
seconds become milli- or microseconds where a step is short.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.figures import order_of
from stagewright.pipelining.timeline import Time, Timeline, peak_activations

_SECONDS = ((1, "s"), (1_000, "ms"), (1_000_000, "µs"))


@dataclass(frozen=True, slots=True)
class Clock:
    """Writes a timeline's times: ``factor`` of them make one ``unit``."""

    factor: int
    unit: str

    def number(self, time: Time) -> str:
        """A time without its unit.

        Example:
            >>> Clock(1000, "ms").number(0.01234567), Clock(1, "").number(Fraction(1, 3))
            ('12.346', '0.333333')
        """
        value = float(time * self.factor)
        return f"{round(value, 3):g}" if self.unit else f"{value:g}"

    def text(self, time: Time) -> str:
        """A time with its unit.

        Example:
            >>> Clock(1000, "ms").text(0.0125), Clock(1, "").text(12), Clock(1, "").text(1)
            ('12.5 ms', '12 time units', '1 time unit')
        """
        number = self.number(time)
        return f"{number} {self.unit or ('time unit' if number == '1' else 'time units')}"


def clock_of(timeline: Timeline) -> Clock:
    """The clock that suits a timeline: its step is at least 1 in the unit, where one is so small.

    Example:
        >>> clock_of(Timeline((), 1, unit="s"))
        Clock(factor=1000000, unit='µs')
    """
    if timeline.unit != "s":
        return Clock(1, timeline.unit)
    fitting = (unit for unit in _SECONDS if timeline.makespan * unit[0] >= 1)
    return Clock(*next(fitting, _SECONDS[-1]))


def tick_step(length: Time, most: int) -> Fraction:
    """The least of 1, 2, 5, 10, 20, ... (or 0.5, 0.2, ...) that cuts a length in few pieces.

    Args:
        length: of the axis, 0 or more.
        most: pieces at most, from 1.

    Returns:
        The time between two marks.

    Example:
        >>> tick_step(33, 10), tick_step(Fraction(1, 3), 4)
        (Fraction(5, 1), Fraction(1, 10))
    """
    least = Fraction(length) / most
    if not least:
        return Fraction(1)
    power = Fraction(10) ** (math.floor(math.log10(least)) - 1)
    steps = (digit * power * scale for scale in (1, 10, 100) for digit in (1, 2, 5))
    return next(step for step in steps if step >= least)


def summary(timeline: Timeline) -> tuple[str, ...]:
    """What stands over every picture: sizes, step time, bubble, activations.

    Example:
        >>> from stagewright.pipelining.schedules import ZBH1
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> print(*summary(simulate_order(ZBH1().order(3, 4))), sep=", ")
        3 ranks, 3 stages, 4 micro-batches, 14 time units, bubble 14.3%, peak activations 3
    """
    order = order_of(timeline)
    ranks, stages, microbatches = order.num_ranks, order.num_stages, order.num_microbatches
    clock = clock_of(timeline)
    time = (
        clock.text(timeline.makespan)
        if clock.unit
        else f"{clock.number(timeline.makespan)} time units"
    )
    return (
        f"{ranks} rank{'' if ranks == 1 else 's'}",
        f"{stages} stage{'' if stages == 1 else 's'}",
        f"{microbatches} micro-batch{'' if microbatches == 1 else 'es'}",
        time,
        f"bubble {float(timeline.bubble_fraction):.1%}",
        f"peak activations {max(peak_activations(order), default=0)}",
    )
