"""From measured steps to what a program's parts cost.

In come timelines of real steps of one program; out go ``ProgramCosts`` for the simulator: medians,
so that a step that the machine disturbed does not count. What cannot be seen in a timeline without
transfers, the links' speed, is left at what the caller says.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from stagewright.pipelining.simulate import ProgramCosts
from stagewright.pipelining.timeline import Time, Timeline

Key = TypeVar("Key", bound=Hashable)


def measured_costs(timelines: Sequence[Timeline], base: ProgramCosts | None = None) -> ProgramCosts:
    """Take the costs of tasks, outer work and overheads from measured steps.

    Args:
        timelines: of steps of one program, in one unit.
        base: gives all that is not measured here; free links by default.

    Returns:
        For each kind and stage the median duration of its tasks, and for each label the median
        duration of its outer runs.

    Raises:
        ValueError: there is no timeline.
    """
    if not timelines:
        raise ValueError("expected at least one measured timeline, got none")
    base = base or ProgramCosts({})
    return ProgramCosts(
        tasks=_medians(
            ((span.action.kind, span.action.stage), span.end - span.start)
            for timeline in timelines
            for span in timeline.spans
        ),
        outer=_medians(
            (span.label, span.end - span.start) for timeline in timelines for span in timeline.outer
        ),
        latency=base.latency,
        bandwidth=base.bandwidth,
        overlap=base.overlap,
        overhead=base.overhead,
        slowdown=base.slowdown,
        unit=timelines[0].unit,
    )


def _medians(durations: Iterable[tuple[Key, Time]]) -> Mapping[Key, Time]:
    by_key: dict[Key, list[Time]] = {}
    for key, duration in durations:
        by_key.setdefault(key, []).append(duration)
    return {key: _median(values) for key, values in by_key.items()}


def _median(values: list[Time]) -> Time:
    """The middle one, or the upper of the two in the middle: always one that was measured."""
    return sorted(values)[len(values) // 2]
