"""The picture of an order or a timeline in fixed-width text: one line per rank, time to the right.

In comes an ``Order`` and what its tasks cost, or a ``Timeline``, planned or measured; out goes text
for a terminal, a docstring or a README. A cell is as wide as its task is long, and holds the
micro-batch's number; letters say the kind of work, or background colours do where the reader has a
terminal. Not here: other formats (pictures/).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.figures import order_of
from stagewright.pipelining.pictures.palette import WORDS, stage_turns
from stagewright.pipelining.pictures.times import Clock, clock_of, summary, tick_step
from stagewright.pipelining.timeline import (
    UNIT_COSTS,
    Costs,
    OuterSpan,
    Span,
    Time,
    Timeline,
    simulate_order,
)

# 256-colour backgrounds, light enough for black text; the stages of a rank take shades in turn.
_COLORS = {
    Kind.F: (75, 117, 153),
    Kind.B: (78, 120, 157),
    Kind.I: (79, 122, 158),
    Kind.W: (215, 222, 229),
}
_OUTER_COLOR = 250
_RESET = "\x1b[0m"
_TICK_COLUMNS = 10
_MEASURED_COLUMNS = 100
_MEASURED_TICK = 8

Piece = tuple[str, str]
"""Text and the ANSI code before it ("" for none)."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Columns of text: ``columns`` per ``unit`` of time, and ``shortest`` for the shortest task.

    ``tick`` is the time from one number of the scale to the next.
    """

    unit: Fraction
    columns: int
    shortest: int
    tick: Fraction

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
    return draw_timeline(simulate_order(order, costs), color, width)


def draw_timeline(timeline: Timeline, color: bool = False, width: int | None = None) -> str:
    """Draw a timeline, planned, simulated or measured, as ``draw_order`` draws an order.

    A timeline in abstract units is drawn in whole columns per unit. One in seconds is drawn to
    scale over the page (100 columns where there is no width). Work outside the loop is drawn with
    its name and equals signs.

    Args:
        timeline: a whole step.
        color: mark the kinds by ANSI background colours and leave the letters out.
        width: columns of the page.

    Returns:
        Lines of text: a heading with the bubble, a time scale, one line per rank, a legend.

    Example:
        >>> from stagewright.pipelining.actions import parse_action
        >>> tasks = [Span(0, parse_action("0F0"), 0, 0.01), Span(0, parse_action("0B0"), 0.01, 0.03)]
        >>> update = OuterSpan(0, "update", 0.035, 0.045)
        >>> print(draw_timeline(Timeline(tuple(tasks), 1, outer=(update,), unit="s"), width=53))
        1 rank, 1 stage, 1 micro-batch, 45 ms, bubble 11.1%
        peak activations 1
                0 ms      10        20        30        40
        rank 0  F0------- B0----------------- .....update===
        F forward  B backward  update=== outside the loop
        . idle  numbers: micro-batches
    """
    order = order_of(timeline)
    margin = len(f"rank {order.num_ranks - 1}") + 2
    room = None if width is None else width - margin
    measured = bool(timeline.unit)
    scale = _real_scale(timeline, room) if measured else _choose_scale(timeline, color, room)
    shade = stage_turns(order.placement)
    lines = _wrap([[(item, "")] for item in summary(timeline)], ", ", width)
    lines.append([(" " * margin, ""), (_ticks(timeline.makespan, scale, clock_of(timeline)), "")])
    for rank in range(order.num_ranks):
        spans = sorted(
            (span for span in timeline.work if span.rank == rank), key=lambda span: span.start
        )
        end = scale.column(timeline.makespan)
        lines.append([(f"rank {rank}".ljust(margin), ""), *_row(spans, end, scale, shade, color)])
    lines += _wrap(_legend(order, timeline.outer, color), "  ", width)
    return "\n".join(_render(line, width) for line in lines)


def _real_scale(timeline: Timeline, width: int | None) -> _Scale:
    """The whole step over the page, in columns of equal time."""
    columns = max(1, _MEASURED_COLUMNS if width is None else width)
    makespan = Fraction(timeline.makespan)
    factor = clock_of(timeline).factor
    tick = tick_step(makespan * factor, max(1, columns // _MEASURED_TICK)) / factor
    return _Scale(makespan / columns or Fraction(1), 1, 1, tick)


def _choose_scale(timeline: Timeline, color: bool, width: int | None) -> _Scale:
    """Give the shortest task a column more than the longest label, or what fits, at least one.

    The unit is the greatest common divisor of all durations if the shortest is only a few of them,
    so that every task is drawn in proportion; otherwise it is the shortest task, and the ends of
    the others are rounded to a column.
    """
    last = max((span.action.microbatch for span in timeline.spans), default=0)
    wanted = len(str(last)) + (1 if color else 2)
    durations = {Fraction(span.end) - Fraction(span.start) for span in timeline.spans} - {0}
    unit = shortest = min(durations, default=Fraction(1))
    divisor = functools.reduce(_common_divisor, durations, Fraction(0))
    if durations and shortest <= wanted * divisor:
        unit = divisor
    columns = math.ceil(wanted * unit / shortest)
    units = Fraction(timeline.makespan) / unit
    while width is not None and columns > 1 and units * columns > width:
        columns -= 1
    tick = -(-_TICK_COLUMNS // columns) * unit
    return _Scale(unit, columns, math.ceil(columns * shortest / unit), tick)


def _common_divisor(a: Fraction, b: Fraction) -> Fraction:
    denominator = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * denominator), int(b * denominator)), denominator)


def _ticks(makespan: Time, scale: _Scale, clock: Clock) -> str:
    text = ""
    for tick in range(math.floor(Fraction(makespan) / scale.tick) + 1):
        number = clock.number(tick * scale.tick)
        column = scale.column(tick * scale.tick)
        if clock.unit and column + len(number) > scale.column(makespan):
            break
        text = text.ljust(column) + number + ("" if tick or not clock.unit else f" {clock.unit}")
    return text


def _row(
    spans: Iterable[Span | OuterSpan],
    end: int,
    scale: _Scale,
    shade: Sequence[int],
    color: bool,
) -> list[Piece]:
    pieces = []
    at = 0
    for span in spans:
        start, stop = scale.column(span.start), scale.column(span.end)
        pieces.append((_idle(at, start, scale.columns), ""))
        if isinstance(span, OuterSpan):
            pieces += _outer_cell(span.label, stop - start, color)
        else:
            turn = shade[span.action.stage]
            pieces += _cell(span.action, stop - start, scale.shortest, turn, color)
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


def _outer_cell(label: str, columns: int, color: bool) -> list[Piece]:
    gap = 1 if columns > 1 else 0
    text = label[: columns - gap].ljust(columns - gap, " " if color else "=")
    return [(text, f"\x1b[30;48;5;{_OUTER_COLOR}m" if color else ""), (" " * gap, "")]


def _legend(order: Order, outer: Sequence[OuterSpan], color: bool) -> list[list[Piece]]:
    present = {action.kind for actions in order.actions for action in actions}
    items: list[list[Piece]] = []
    for kind in (kind for kind in Kind if kind in present):
        code = f"\x1b[30;48;5;{_COLORS[kind][0]}m" if color else ""
        items.append([(f" {kind.value} " if color else kind.value, code), (f" {WORDS[kind]}", "")])
    if outer:
        label = outer[0].label
        items.append([*_outer_cell(label, len(label) + 4, color), ("outside the loop", "")])
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
