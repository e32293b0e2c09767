"""What a step did, as a timeline: put together after the step from what actors and channels noted.

In: instants of `time.perf_counter` and counts of bytes, as noted on the way.  Out: a `Timeline` in seconds whose
first run starts at 0.  Noting is a clock and a list a time; everything else waits until somebody asks.  What the
simulator says is not used here: the two are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagewright.pipelining.program import Program, Run, Send
from stagewright.pipelining.timeline import OuterSpan, Span, Timeline, Transfer

Held = Sequence[tuple[float, int]]
"""(instant, bytes in the slots from then on)."""


@dataclass(frozen=True, slots=True)
class RunSpan:
    """When one run of a step took place: seconds on the clock of `time.perf_counter`."""

    rank: int
    run: Run
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a step, seconds on the same clock.

    Attributes:
      posted: when its sender began to send.
      num_bytes: of its arrays.
      had: when its receiver had it.
    """

    posted: float
    num_bytes: int
    had: float


def make_timeline(
    program: Program,
    runs: Sequence[RunSpan],
    messages: Mapping[tuple[int, int], Sequence[Message]],
    held: Sequence[Held],
) -> Timeline | None:
    """Put a step's records together.

    Args:
      program: what ran.
      runs: all of its runs.
      messages: by (sender, receiver), in order.
      held: per rank, the bytes held over time; empty where nobody counted.

    Returns:
      The timeline, or None if nothing ran.
    """
    if not runs:
        return None
    zero = min(run.begin for run in runs)
    spans = [Span(r.rank, r.run.action, r.begin - zero, r.end - zero) for r in runs if r.run.action]
    outer = [
        OuterSpan(r.rank, r.run.label, r.begin - zero, r.end - zero)
        for r in runs
        if r.run.action is None
    ]
    return Timeline(
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.rank))),
        num_ranks=len(program.ranks),
        outer=tuple(outer),
        transfers=tuple(sorted(_transfers(program, messages, zero), key=lambda t: t.start)),
        memory=tuple(_curve(of_rank, zero) for of_rank in held) if all(held) else (),
        unit="s",
    )


def _transfers(
    program: Program, messages: Mapping[tuple[int, int], Sequence[Message]], zero: float
) -> Iterator[Transfer]:
    """The n-th message from one rank to another is that of its n-th send there."""
    for (source, to), sent in messages.items():
        tags = [
            i.tag for i in program.ranks[source].instructions if isinstance(i, Send) and i.to == to
        ]
        for tag, message in zip(tags, sent, strict=False):
            start, end = message.posted - zero, message.had - zero
            yield Transfer(source, to, tag, message.num_bytes, start, end)


def _curve(held: Held, zero: float) -> tuple[tuple[float, int], ...]:
    """Its changes; what is there when a rank begins, its arguments and constants, is there at 0."""
    changes = [
        (max(0.0, instant - zero) if i else 0.0, num_bytes)
        for i, (instant, num_bytes) in enumerate(held)
        if i == 0 or num_bytes != held[i - 1][1]
    ]
    return tuple(changes)
