"""The picture of an order in fixed-width text: one line per rank, time to the right.

In comes an ``Order`` and what its tasks cost, out goes text for a terminal, a docstring or a
README. A cell is as wide as its task is long, and holds the micro-batch's number; letters say the
kind of work, or background colours do where the reader has a terminal. Not here: other formats, and
times measured in a run.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.timeline import (
    UNIT_COSTS,
    Costs,
    Span,
    Time,
    Timeline,
    peak_activations,
    simulate_order,
)

_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}
# 256-colour backgrounds, light enough for black text; the stages of a rank take shades in turn.
_COLORS = {
    Kind.F: (75, 117, 153),
    Kind.B: (78, 120, 157),
    Kind.I: (79, 122, 158),
    Kind.W: (215, 222, 229),
}
_RESET = "\x1b[0m"
_TICK_COLUMNS = 10

Piece = tuple[str, str]
"""Text and the ANSI code before it ("" for none)."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Columns of text: ``columns`` per ``unit`` of time, and ``shortest`` for the shortest task."""

    unit: Fraction
    columns: int
    shortest: int

    def column(self, time: Time) -> int:
        return math.floor(Fraction(time) / self.unit * self.columns + Fraction(1, 2))


def draw_order(
    order: Order, costs: Costs = UNIT_COSTS, color: bool = False, width: int | None = None
) -> str:
    """Draw when each rank runs which task.

    In plain text a task is its kind's letter and its micro-batch (``F0``), drawn out with dashes
    when it takes longer than the shortest task; dots are idle time. Where a rank holds several
    stages, those at odd places (its second, its fourth) are written in lower case; in colour they
    have another shade.

    Args:
        order: a legal order.
        costs: durations of the tasks, in any unit.
        color: mark the kinds by ANSI background colours and leave the letters out.
        width: columns of the page. A wider picture is first drawn smaller, then cut, with an
            ellipsis.

    Returns:
        Lines of text: a heading with the bubble, a time scale, one line per rank, a legend.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> print(draw_order(OneFOneB().order(num_ranks=2, num_microbatches=3)))
        2 ranks, 2 stages, 3 micro-batches, 12 time units, bubble 25.0%, peak activations 2
                0           4           8           12
        rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
        rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
        F forward  B backward  . idle  numbers: micro-batches
    """
    timeline = simulate_order(order, costs)
    margin = len(f"rank {order.num_ranks - 1}") + 2
    scale = _choose_scale(
        timeline, order.num_microbatches, color, None if width is None else width - margin
    )
    shade = _stage_shades(order)
    lines = _wrap(_heading(order, timeline), ", ", width)
    lines.append([(" " * margin, ""), (_ticks(timeline.makespan, scale), "")])
    for rank in range(order.num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        end = scale.column(timeline.makespan)
        lines.append([(f"rank {rank}".ljust(margin), ""), *_row(spans, end, scale, shade, color)])
    lines += _wrap(_legend(order, color), "  ", width)
    return "\n".join(_render(line, width) for line in lines)


def _choose_scale(
    timeline: Timeline, num_microbatches: int, color: bool, width: int | None
) -> _Scale:
    """Give the shortest task a column more than the longest label, or what fits, at least one.

    The unit is the greatest common divisor of all durations if the shortest is only a few of them,
    so that every task is drawn in proportion; otherwise it is the shortest task, and the ends of
    the others are rounded to a column.
    """
    wanted = len(str(num_microbatches - 1)) + (1 if color else 2)
    durations = {Fraction(span.end) - Fraction(span.start) for span in timeline.spans} - {0}
    unit = shortest = min(durations, default=Fraction(1))
    divisor = functools.reduce(_common_divisor, durations, Fraction(0))
    if durations and shortest <= wanted * divisor:
        unit = divisor
    columns = math.ceil(wanted * unit / shortest)
    units = Fraction(timeline.makespan) / unit
    while width is not None and columns > 1 and units * columns > width:
        columns -= 1
    return _Scale(unit, columns, math.ceil(columns * shortest / unit))


def _common_divisor(a: Fraction, b: Fraction) -> Fraction:
    denominator = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * denominator), int(b * denominator)), denominator)


def _stage_shades(order: Order) -> tuple[int, ...]:
    """For each stage, how many earlier stages its rank holds."""
    return tuple(order.placement[:stage].count(rank) for stage, rank in enumerate(order.placement))


def _heading(order: Order, timeline: Timeline) -> list[list[Piece]]:
    ranks, stages, microbatches = order.num_ranks, order.num_stages, order.num_microbatches
    items = [
        f"{ranks} rank{'' if ranks == 1 else 's'}",
        f"{stages} stage{'' if stages == 1 else 's'}",
        f"{microbatches} micro-batch{'' if microbatches == 1 else 'es'}",
        f"{float(timeline.makespan):g} time units",
        f"bubble {float(timeline.bubble_fraction):.1%}",
        f"peak activations {max(peak_activations(order))}",
    ]
    return [[(item, "")] for item in items]


def _ticks(makespan: Time, scale: _Scale) -> str:
    step = -(-_TICK_COLUMNS // scale.columns)
    text = ""
    for tick in range(0, math.floor(Fraction(makespan) / scale.unit) + 1, step):
        text = text.ljust(tick * scale.columns) + f"{float(tick * scale.unit):g}"
    return text


def _row(
    spans: Iterable[Span], end: int, scale: _Scale, shade: Sequence[int], color: bool
) -> list[Piece]:
    pieces = []
    at = 0
    for span in spans:
        start, stop = scale.column(span.start), scale.column(span.end)
        pieces.append((_idle(at, start, scale.columns), ""))
        pieces += _cell(span.action, stop - start, scale.shortest, shade[span.action.stage], color)
        at = stop
    return [*pieces, (_idle(at, end, scale.columns), "")]


def _idle(start: int, stop: int, columns: int) -> str:
    return "".join(" " if column % columns else "." for column in range(start, stop))


def _cell(action: Action, columns: int, shortest: int, shade: int, color: bool) -> list[Piece]:
    """The label, with a blank after it where there is room, or its letter where there is none."""
    number = str(action.microbatch)
    if color:
        label = number if len(number) <= columns else ""
        shades = _COLORS[action.kind]
        gap = 1 if len(number) < columns else 0
        return [
            (label.ljust(columns - gap), f"\x1b[30;48;5;{shades[shade % len(shades)]}m"),
            (" " * gap, ""),
        ]
    letter = action.kind.value.lower() if shade % 2 else action.kind.value
    label = f"{letter}{number}" if len(number) < columns else letter[:columns]
    fill = "-" if columns > shortest else " "
    gap = 1 if len(f"{letter}{number}") < columns else 0
    return [(label.ljust(columns - gap, fill) + " " * gap, "")]


def _legend(order: Order, color: bool) -> list[list[Piece]]:
    present = {action.kind for actions in order.actions for action in actions}
    items: list[list[Piece]] = []
    for kind in (kind for kind in Kind if kind in present):
        code = f"\x1b[30;48;5;{_COLORS[kind][0]}m" if color else ""
        items.append([(f" {kind.value} " if color else kind.value, code), (f" {_WORDS[kind]}", "")])
    notes = [". idle", "numbers: micro-batches"]
    if len(set(order.placement)) < order.num_stages:
        notes.append(f"{'other shade' if color else 'lower case'}: every second stage")
    return [*items, *([(note, "")] for note in notes)]


def _wrap(items: Iterable[list[Piece]], separator: str, width: int | None) -> list[list[Piece]]:
    """Items on one line, or on several where the page is too narrow."""
    lines: list[list[Piece]] = [[]]
    for item in items:
        longer = [*lines[-1], (separator, ""), *item] if lines[-1] else item
        if width is None or _length(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(item)
    return lines


def _length(pieces: Iterable[Piece]) -> int:
    return sum(len(text) for text, _ in pieces)


def _render(pieces: Sequence[Piece], width: int | None) -> str:
    if width is None or _length(pieces) <= width:
        return _join(pieces).rstrip()
    left = max(0, width - 1)
    kept = []
    for text, code in pieces:
        kept.append((text[:left], code))
        left -= len(kept[-1][0])
    return _join([*kept, ("…", "")])


def _join(pieces: Iterable[Piece]) -> str:
    return "".join(f"{code}{text}{_RESET}" if code and text else text for text, code in pieces)
