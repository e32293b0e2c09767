"""Why ranks wait: the idle time of a step, split by cause.

In comes a ``Timeline``, planned, simulated or measured; out goes a ``Bubble`` for each rank, whose
parts add up to the rank's idle time, exactly where the timeline is exact. Not here: how long a step
takes (timeline.py, the program simulator), and what to do about it.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Kind, dependencies
from stagewright.pipelining.timeline import OuterSpan, Span, Time, Timeline

_BACKWARD = (Kind.B, Kind.I)


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle time by cause, in the timeline's unit.

    Args:
        fill: waiting for other ranks' tasks before the rank's first backward task.
        drain: waiting for other ranks' tasks after its last forward task.
        stall: waiting for other ranks' tasks in between.
        imbalance: what the rank has less to do than the busiest one. No schedule can fill it; it is
            taken out of fill, drain and stall in proportion.
        receive: a value was made but not there yet: the link's time.
        barrier: waiting after the last task of all ranks has ended, as for a global norm.
    """

    fill: Time = 0
    drain: Time = 0
    stall: Time = 0
    imbalance: Time = 0
    receive: Time = 0
    barrier: Time = 0

    @property
    def total(self) -> Time:
        """All of the idle time."""
        parts = (self.fill, self.drain, self.stall, self.imbalance, self.receive, self.barrier)
        return sum(parts, start=0)


CAUSES = tuple(field.name for field in dataclasses.fields(Bubble))
"""The names of the parts, in a fixed order."""


def attribute_bubble(timeline: Timeline) -> tuple[Bubble, ...]:
    """Split each rank's idle time by cause.

    A gap before a task ends with the arrival of what the task reads. As long as the latest of the
    tasks that make it still ran elsewhere, the rank waited for that task (fill, stall or drain, by
    where the gap lies); from then on it waited for the link (receive). A gap before a task that reads
    nothing from other ranks counts by where it lies, too. A link that another rank
    waited for counts there, and is part of its task's lateness here.

    Args:
        timeline: tasks with times; work outside the loop where it is known.

    Returns:
        One bubble per rank; ``total`` is ``timeline.makespan - timeline.busy(rank)``.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> timeline = simulate_order(OneFOneB().order(num_ranks=4, num_microbatches=8))
        >>> for bubble in attribute_bubble(timeline)[1:3]:
        ...     print(bubble.fill, bubble.drain, bubble.total)
        5 4 9
        4 5 9
    """
    ends = {span.action: span.end for span in timeline.spans}
    loop_end = max(ends.values(), default=0)
    busiest = max((timeline.busy(rank) for rank in range(timeline.num_ranks)), default=0)
    return tuple(
        _spread_imbalance(
            _Rank(timeline, rank, ends, loop_end).bubble(), busiest - timeline.busy(rank)
        )
        for rank in range(timeline.num_ranks)
    )


def add_bubbles(bubbles: Sequence[Bubble]) -> Bubble:
    """The causes summed up over ranks."""
    return Bubble(*(sum((getattr(b, cause) for b in bubbles), start=0) for cause in CAUSES))


def bubble_shares(timeline: Timeline) -> dict[str, float]:
    """Each cause's share of all ranks' time, from 0 to 1; together, the bubble fraction."""
    total = timeline.num_ranks * timeline.makespan
    whole = add_bubbles(attribute_bubble(timeline))
    return {cause: float(getattr(whole, cause) / total) if total else 0.0 for cause in CAUSES}


class _Rank:
    """The gaps of one rank."""

    def __init__(
        self, timeline: Timeline, rank: int, ends: dict[Action, Time], loop_end: Time
    ) -> None:
        self.timeline = timeline
        self.ends = ends
        self.loop_end = loop_end
        self.num_stages = 1 + max((action.stage for action in ends), default=-1)
        self.spans = [span for span in timeline.spans if span.rank == rank]
        self.outer = [span for span in timeline.outer if span.rank == rank]
        self.stages = {span.action.stage for span in self.spans}
        forwards = [s.end for s in self.spans if s.action.kind is Kind.F]
        backwards = [s.start for s in self.spans if s.action.kind in _BACKWARD]
        self.last_forward = max(forwards, default=0)
        self.first_backward = min(backwards, default=loop_end)

    def bubble(self) -> Bubble:
        parts: dict[str, Time] = dict.fromkeys(CAUSES, 0)
        at: Time = 0
        work: list[Span | OuterSpan] = [*self.spans, *self.outer]
        for span in sorted(work, key=lambda span: (span.start, span.end)):
            self._gap(at, span.start, span, parts)
            at = max(at, span.end)
        self._gap(at, self.timeline.makespan, None, parts)
        return Bubble(**parts)

    def _gap(
        self, start: Time, end: Time, before: Span | OuterSpan | None, parts: dict[str, Time]
    ) -> None:
        """Share out one gap, which ends with ``before`` or with the step."""
        if end <= start:
            return
        if isinstance(before, Span):
            made = self._made(before.action)
            made = end if made is None else min(max(made, start), end)
            parts["receive"] += end - made
            parts[self._phase(start)] += made - start
            return
        loop = min(max(self.loop_end, start), end)
        parts["barrier"] += end - loop
        parts[self._phase(start)] += loop - start

    def _phase(self, instant: Time) -> str:
        if instant < self.first_backward:
            return "fill"
        return "drain" if instant >= self.last_forward else "stall"

    def _made(self, action: Action) -> Time | None:
        """When the last of the values that a task reads from other ranks was made."""
        after = Action(action.stage + 1, Kind.I, action.microbatch)
        needs = dependencies(action, self.num_stages, after in self.ends)
        return max(
            (self.ends[n] for n in needs if n in self.ends and n.stage not in self.stages),
            default=None,
        )


def _spread_imbalance(bubble: Bubble, missing: Time) -> Bubble:
    waits = ("fill", "drain", "stall")
    waited = sum((getattr(bubble, cause) for cause in waits), start=0)
    imbalance = min(missing, waited)
    if not imbalance:
        return bubble
    exact = not isinstance(waited, float) and not isinstance(imbalance, float)
    kept: Time = 1 - (Fraction(imbalance) / Fraction(waited) if exact else imbalance / waited)
    parts = {cause: getattr(bubble, cause) * kept for cause in waits}
    return dataclasses.replace(bubble, imbalance=imbalance, **parts)
