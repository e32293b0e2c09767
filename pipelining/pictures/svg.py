"""A timeline, or two above each other, as a drawing for documents and browsers (SVG).

In come timelines, out goes one SVG text that stands alone: nothing is fetched, a task's own tooltip
says what it is, and the colours suit light and dark pages. Not here: interaction (html.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from stagewright.pipelining.actions import Kind
from stagewright.pipelining.figures import links
from stagewright.pipelining.pictures.palette import OUTER, WORDS, shades, stage_turns
from stagewright.pipelining.pictures.times import Clock, clock_of, summary, tick_step
from stagewright.pipelining.timeline import OuterSpan, Span, Time, Timeline

_MARGIN = 16
_HEADING = 44
_AXIS = 22
_ROW = 22
_BAR = 19
_BETWEEN = 20
_LEGEND = 30
_LEAST_WIDTH, _MOST_WIDTH = 700, 2800
_LETTER = 5.7  # of labels of 9.5 pixels, about
_THIN = 4  # a frame would hide the colour of what is narrower
_TICK_PIXELS = 70
_TURNS = ("1st", "2nd", "3rd", "4th")

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b1b1f }
.page { fill: #ffffff }
.row { fill: #ededf1 }
.grid { stroke: #c9c9d1 }
.link { stroke: #55555f; stroke-width: .8; opacity: .45 }
.title { font-size: 15px; font-weight: 600 }
.small { fill: #55555f }
.axis { font-size: 10.5px; fill: #55555f }
.label { font-size: 9.5px; fill: #111111; text-anchor: middle; pointer-events: none }
.framed { stroke: #00000059; stroke-width: .5 }
@media (prefers-color-scheme: dark) {
  text { fill: #ececf1 }
  .page { fill: #17171b }
  .row { fill: #2a2a31 }
  .grid { stroke: #45454f }
  .link { stroke: #d0d0da }
  .small, .axis { fill: #b4b4c0 }
}
"""


@dataclass(frozen=True, slots=True)
class _Panel:
    """One timeline and where it lies: ``pixels`` per time, ``left`` of instant 0, ``top`` of all."""

    title: str
    timeline: Timeline
    pixels: float
    left: float
    top: float

    @property
    def width(self) -> float:
        return float(self.timeline.makespan) * self.pixels

    @property
    def rows(self) -> float:
        return self.top + _HEADING + _AXIS

    @property
    def bottom(self) -> float:
        return self.rows + self.timeline.num_ranks * _ROW

    @property
    def clock(self) -> Clock:
        return clock_of(self.timeline)

    def x(self, time: Time) -> float:
        return self.left + float(time) * self.pixels

    def y(self, rank: int) -> float:
        return self.rows + rank * _ROW + (_ROW - _BAR) / 2


def to_svg(timeline: Timeline, title: str = "", below: tuple[str, Timeline] | None = None) -> str:
    """Draw a timeline: ranks from top to bottom, time to the right.

    A task is labelled with its letter and micro-batch where there is room, or the micro-batch
    alone. Where a rank holds several stages, the later ones are paler. What ranks send is drawn as
    lines where the timeline knows it.

    Args:
        timeline: planned, simulated or measured.
        title: its heading.
        below: heading and timeline of a second drawing, as what was measured below what was
            planned. Both have one scale if their times have the same unit, otherwise both are as
            wide.

    Returns:
        The text of an SVG file.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> drawing = to_svg(simulate_order(OneFOneB().order(4, 8)), "1F1B")
        >>> drawing.startswith("<svg "), drawing.count('class="task')
        (True, 64)
    """
    panels = _lay_out([(title, timeline), *([below] if below else [])])
    width = max(panel.left + panel.width for panel in panels) + _MARGIN
    legend = panels[-1].bottom + _LEGEND
    height = legend + _MARGIN
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(', '.join(panel.title or 'a schedule' for panel in panels))}</title>",
        f"<style>{_STYLE}{_kind_styles()}</style>",
        '<rect class="page" width="100%" height="100%"/>',
    ]
    for panel in panels:
        lines += [*_heading(panel), *_rows(panel), *_axis(panel), *_tasks(panel), *_links(panel)]
    return "\n".join([*lines, *_legend([panel.timeline for panel in panels], legend), "</svg>\n"])


def _lay_out(titled: Sequence[tuple[str, Timeline]]) -> list[_Panel]:
    last_rank = max(timeline.num_ranks for _, timeline in titled) - 1
    left = _MARGIN + 6.5 * len(f"rank {last_rank}") + 8
    widths = [_wanted_width(timeline) for _, timeline in titled]
    width = min(max(_LEAST_WIDTH, *widths), _MOST_WIDTH)
    spans = [float(timeline.makespan) for _, timeline in titled]
    if len({timeline.unit for _, timeline in titled}) == 1:
        spans = [max(spans)] * len(spans)
    panels, top = [], float(_MARGIN)
    for (title, timeline), span in zip(titled, spans, strict=True):
        panels.append(_Panel(title, timeline, width / span if span else 1.0, left, top))
        top = panels[-1].bottom + _BETWEEN
    return panels


def _wanted_width(timeline: Timeline) -> float:
    """Wide enough that all but unusually short tasks can hold their labels."""
    lengths = sorted(float(span.end - span.start) for span in timeline.spans)
    middle = lengths[len(lengths) // 2] if lengths else 0
    shortest = lengths[len(lengths) // 10] if lengths else 0
    length = max(shortest, middle / 4)
    label = (_digits(timeline) + 1) * _LETTER + 3
    return float(timeline.makespan) / length * label if length else 0


def _kind_styles() -> str:
    rules = [
        f".{kind.value}{turn} {{ fill: {color} }}"
        for kind in Kind
        for turn, color in enumerate(shades(kind))
    ]
    return "\n".join([*rules, f".outer {{ fill: {OUTER} }}", ""])


def _heading(panel: _Panel) -> Iterator[str]:
    yield f'<text class="title" x="{_MARGIN}" y="{panel.top + 14:g}">{escape(panel.title)}</text>'
    about = escape(", ".join(summary(panel.timeline)))
    yield f'<text class="small" x="{_MARGIN}" y="{panel.top + 34:g}">{about}</text>'


def _rows(panel: _Panel) -> Iterator[str]:
    for rank in range(panel.timeline.num_ranks):
        top = panel.y(rank)
        yield (
            f'<rect class="row" x="{panel.left:g}" y="{top:g}" '
            f'width="{panel.width:.2f}" height="{_BAR}"/>'
        )
        yield f'<text x="{_MARGIN}" y="{top + _BAR - 5:g}">rank {rank}</text>'


def _axis(panel: _Panel) -> Iterator[str]:
    clock, makespan = panel.clock, panel.timeline.makespan
    most = max(1, int(panel.width // _TICK_PIXELS))
    step = tick_step(makespan * clock.factor, most) / clock.factor
    bottom = panel.rows - 4
    for tick in range(int(makespan / step) + 1):
        x = panel.x(tick * step)
        yield f'<path class="grid" d="M{x:.2f} {bottom:g}V{panel.bottom:g}"/>'
        unit = f" {clock.unit}" if clock.unit and not tick else ""
        number = clock.number(tick * step)
        yield f'<text class="axis" x="{x:.2f}" y="{bottom - 3:g}">{number}{unit}</text>'


def _tasks(panel: _Panel) -> Iterator[str]:
    turns, digits = stage_turns(panel.timeline.placement), _digits(panel.timeline)
    for span in panel.timeline.work:
        x, y = panel.x(span.start), panel.y(span.rank)
        width = panel.x(span.end) - x
        classes = f"task {_kind(span, turns)}{' framed' if width >= _THIN else ''}"
        yield (
            f'<rect class="{classes}" x="{x:.3f}" y="{y:g}" width="{width:.3f}" height="{_BAR}">'
            f"<title>{escape(_about(panel.clock, span))}</title></rect>"
        )
        if label := _label(span, width, digits):
            at = f'x="{x + width / 2:.2f}" y="{y + _BAR - 6:g}"'
            yield f'<text class="label" {at}>{escape(label)}</text>'


def _digits(timeline: Timeline) -> int:
    return max((len(str(span.action.microbatch)) for span in timeline.spans), default=0)


def _kind(span: Span | OuterSpan, turns: Sequence[int]) -> str:
    if isinstance(span, OuterSpan):
        return "outer"
    return f"{span.action.kind.value}{turns[span.action.stage] % len(_TURNS)}"


def _label(span: Span | OuterSpan, width: float, digits: int) -> str:
    """What fits; tasks of one length have the same kind of label, short numbers or long."""
    letters = int(width / _LETTER)
    if isinstance(span, OuterSpan):
        return span.label if len(span.label) <= letters else ""
    if digits > letters:
        return ""
    letter = span.action.kind.value if digits < letters else ""
    return f"{letter}{span.action.microbatch}"


def _about(clock: Clock, span: Span | OuterSpan) -> str:
    name = span.label if isinstance(span, OuterSpan) else str(span.action)
    times = f"{clock.number(span.start)} to {clock.text(span.end)}"
    return f"{name} on rank {span.rank}, {times}"


def _links(panel: _Panel) -> Iterator[str]:
    for link in links(panel.timeline):
        if link.transfer is not None:
            start, end = panel.x(link.transfer.start), panel.x(link.transfer.end)
            source, to = (panel.y(rank) + _BAR / 2 for rank in (link.source.rank, link.to.rank))
            yield f'<path class="link" d="M{start:.2f} {source:g}L{end:.2f} {to:g}"/>'


def _legend(timelines: Iterable[Timeline], y: float) -> Iterator[str]:
    x = float(_MARGIN)
    for swatches, word in _legend_items(list(timelines)):
        for swatch in swatches:
            yield f'<rect class="{swatch}" x="{x:g}" y="{y - 11:g}" width="14" height="14"/>'
            x += 16
        yield f'<text x="{x + 4:g}" y="{y:g}">{escape(word)}</text>'
        x += 24 + 6.4 * len(word)


def _legend_items(timelines: Sequence[Timeline]) -> Iterator[tuple[list[str], str]]:
    present = {span.action.kind for timeline in timelines for span in timeline.spans}
    turn = max(max(stage_turns(timeline.placement), default=0) for timeline in timelines)
    for kind in (kind for kind in Kind if kind in present):
        swatches = [f"{kind.value}{shade}" for shade in range(min(turn + 1, len(_TURNS)))]
        yield swatches, f"{kind.value} {WORDS[kind]}"
    if any(timeline.outer for timeline in timelines):
        yield ["outer"], "outside the loop"
    yield ["row"], "idle"
    if turn:
        yield [], f"shades: a rank's {', '.join(_TURNS[: turn + 1])} stage"
