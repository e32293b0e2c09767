"""Timelines as one interactive page that needs no network.

In come timelines, out goes the text of an HTML file: hovering shows a task's times, what it reads
and sends; below lies a memory curve for each rank; several timelines share one time scale, above
one another or side by side. The page's data is JSON within it; page.js draws it and page.css
styles it. Not here: pictures for documents (svg.py), traces for other viewers (perfetto.py).
"""

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from stagewright.pipelining.actions import Kind
from stagewright.pipelining.figures import activation_curves, links
from stagewright.pipelining.pictures.palette import OUTER, WORDS, shades, stage_turns
from stagewright.pipelining.pictures.times import clock_of, summary
from stagewright.pipelining.timeline import Time, Timeline

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<div id="legend"></div>
<p id="help">Drag to move, wheel to zoom; keys <kbd>←</kbd> <kbd>→</kbd> <kbd>+</kbd> <kbd>−</kbd>,
<kbd>0</kbd> shows all. Hover for a task's times and its micro-batch's way.
<button id="layout" type="button" hidden>side by side</button></p>
</header>
<main></main>
<div id="tip" role="tooltip" hidden></div>
<noscript>This page is drawn by JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def to_html(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Make the page.

    Args:
        timelines: titles and timelines, one or more. Their times share one scale if they have the
            same unit; otherwise every step is drawn as wide as the others.

    Returns:
        The text of an HTML file.

    Example:
        >>> from stagewright.pipelining.schedules import ZBH1, OneFOneB
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> both = [(s.name, simulate_order(s.order(4, 8))) for s in (OneFOneB(), ZBH1())]
        >>> to_html(both).startswith("<!doctype html>")
        True
    """
    title = escape(" and ".join(title for title, _ in timelines))
    return _PAGE.format(
        title=title, style=_file("page.css"), script=_file("page.js"), data=_data(timelines)
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(timelines: Sequence[tuple[str, Timeline]]) -> str:
    longest = max((float(timeline.makespan) for _, timeline in timelines), default=0)
    same = len({timeline.unit for _, timeline in timelines}) == 1
    value = {
        "kinds": {kind.value: {"word": WORDS[kind], "colors": shades(kind)} for kind in Kind},
        "outer": OUTER,
        "timelines": [
            _timeline(title, timeline, longest if same else float(timeline.makespan))
            for title, timeline in timelines
        ],
    }
    # "<" could end the script element from within a title.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _timeline(title: str, timeline: Timeline, length: float) -> dict[str, Any]:
    """One timeline as the page reads it; ``length`` is the time that fills the page's width."""
    clock = clock_of(timeline)
    place = {span.action: at for at, span in enumerate(timeline.spans)}
    return {
        "title": title,
        "summary": ", ".join(summary(timeline)),
        "length": length or 1,
        "unit": clock.unit,
        "factor": clock.factor,
        "ranks": timeline.num_ranks,
        "turns": stage_turns(timeline.placement),
        "tasks": [
            [
                span.rank,
                span.action.stage,
                span.action.kind.value,
                span.action.microbatch,
                _number(span.start),
                _number(span.end),
            ]
            for span in timeline.spans
        ],
        "outer": [
            [span.rank, span.label, _number(span.start), _number(span.end)]
            for span in timeline.outer
        ],
        "links": [
            [
                place[link.source.action],
                place[link.to.action],
                *(
                    (
                        link.transfer.num_bytes,
                        *map(_number, (link.transfer.start, link.transfer.end)),
                    )
                    if link.transfer
                    else ()
                ),
            ]
            for link in links(timeline)
        ],
        "bytes": bool(timeline.memory),
        "share": 1
        if timeline.memory
        else len(timeline.placement) / max(1, timeline.num_ranks) or 1,
        "curves": [
            [[_number(time), value] for time, value in curve]
            for curve in timeline.memory or activation_curves(timeline)
        ],
    }


def _number(time: Time) -> float:
    value = float(time)
    return int(value) if value.is_integer() else value
