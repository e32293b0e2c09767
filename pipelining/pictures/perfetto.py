"""Timelines as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

In come timelines, out goes JSON in the Trace Event Format: a process for each timeline, a thread
for each rank, a complete event for each task, arrows for what ranks send each other, a counter of
live bytes (or of activations, where bytes are not known). Not here: pictures without a viewer
(svg.py, html.py).

Reference:
    "Trace Event Format", the document that chrome://tracing's catapult project links to: sections
    complete events, flow events, counter events, metadata events.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from stagewright.pipelining.figures import Link, activation_curves, links
from stagewright.pipelining.pictures.palette import WORDS
from stagewright.pipelining.timeline import OuterSpan, Span, Time, Timeline, Transfer

_MICROSECONDS = {"s": 1_000_000}
_MICROSECONDS_PER_UNIT = 1_000

Event = dict[str, Any]


def to_perfetto(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Write timelines as a Chrome trace.

    Args:
        timelines: titles and timelines; each becomes a process. Seconds become microseconds; a unit
            of abstract time becomes a millisecond.

    Returns:
        JSON text.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> trace = json.loads(to_perfetto([("1f1b", simulate_order(OneFOneB().order(2, 3)))]))
        >>> sum(event["ph"] == "X" for event in trace["traceEvents"])
        12
    """
    events = [
        event
        for pid, (title, timeline) in enumerate(timelines, start=1)
        for event in _Process(pid, title, timeline).events()
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


class _Process:
    """The events of one timeline."""

    def __init__(self, pid: int, title: str, timeline: Timeline) -> None:
        self.pid, self.title, self.timeline = pid, title, timeline
        self.scale = _MICROSECONDS.get(timeline.unit, _MICROSECONDS_PER_UNIT)

    def events(self) -> Iterator[Event]:
        """All of them, names first."""
        yield from self._names()
        yield from (self._span(span) for span in self.timeline.spans)
        yield from (self._outer(span) for span in self.timeline.outer)
        yield from self._flows()
        yield from self._counters()

    def _at(self, time: Time) -> float:
        return float(time * self.scale)

    def _names(self) -> Iterator[Event]:
        yield self._event("M", 0, name="process_name", args={"name": self.title})
        for rank in range(self.timeline.num_ranks):
            yield self._event("M", rank, name="thread_name", args={"name": f"rank {rank}"})
            yield self._event("M", rank, name="thread_sort_index", args={"sort_index": rank})

    def _event(self, phase: str, rank: int, **fields: Any) -> Event:
        return {"ph": phase, "pid": self.pid, "tid": rank, **fields}

    def _span(self, span: Span) -> Event:
        action = span.action
        args = {
            "stage": action.stage,
            "kind": action.kind.value,
            "microbatch": action.microbatch,
        }
        return self._complete(span, str(action), WORDS[action.kind], args)

    def _outer(self, span: OuterSpan) -> Event:
        return self._complete(span, span.label, "outside the loop", {})

    def _complete(
        self, span: Span | OuterSpan, name: str, category: str, args: dict[str, Any]
    ) -> Event:
        start = self._at(span.start)
        fields = {"name": name, "cat": category, "args": args}
        return self._event("X", span.rank, ts=start, dur=self._at(span.end) - start, **fields)

    def _flows(self) -> Iterator[Event]:
        """Arrows between tasks, and from the sender's to the receiver's time for all else sent."""
        ident, drawn = 0, set()
        for link in links(self.timeline):
            ident += 1
            drawn.add(link.transfer)
            yield from self._arrow(ident, *_ends(link), str(link.source.action), link.transfer)
        for sent in self.timeline.transfers:
            if sent not in drawn:
                ident += 1
                ends = (sent.source, sent.start, sent.to, sent.end)
                yield from self._arrow(ident, *ends, sent.label, sent)

    def _arrow(
        self,
        ident: int,
        source: int,
        start: Time,
        to: int,
        end: Time,
        name: str,
        sent: Transfer | None,
    ) -> Iterator[Event]:
        fields = {"name": name, "cat": "transfer", "id": f"{self.pid}.{ident}"}
        args = {} if sent is None else self._transfer(sent)
        yield self._event("s", source, ts=self._at(start), args=args, **fields)
        yield self._event("f", to, ts=self._at(end), bp="e", **fields)

    def _transfer(self, sent: Transfer) -> dict[str, Any]:
        posted, arrived = self._at(sent.start), self._at(sent.end)
        return {"bytes": sent.num_bytes, "posted_us": posted, "arrived_us": arrived}

    def _counters(self) -> Iterator[Event]:
        what, curves = "bytes", self.timeline.memory
        if not curves:
            what, curves = "activations", activation_curves(self.timeline)
        for rank, curve in enumerate(curves):
            for time, value in curve:
                name = f"rank {rank:>2} {what}"
                yield self._event("C", rank, name=name, ts=self._at(time), args={what: value})


def _ends(link: Link) -> tuple[int, Time, int, Time]:
    """An arrow leaves from within the task that makes the value: viewers hang it on the slice."""
    source, to = link.source, link.to
    within = source.end - (source.end - source.start) / 1000
    return source.rank, within, to.rank, to.start
