"""From measured steps to what a program's parts cost.

In come timelines of real steps of one program; out go ``ProgramCosts`` for the simulator: medians,
so that a step that the machine disturbed does not count. What a timeline does not show, the
overhead of an instruction or a straggler's share in its tasks, is left at what the caller says.
"""

import dataclasses
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

from stagewright.pipelining.simulate import ProgramCosts
from stagewright.pipelining.timeline import Time, Timeline, Transfer

Key = TypeVar("Key", bound=Hashable)


def measured_costs(timelines: Sequence[Timeline], base: ProgramCosts | None = None) -> ProgramCosts:
    """Take the costs of tasks, outer work and links from measured steps.

    Links: a receiver looks only when it needs what comes, so that only the transfers for which it
    stood idle tell how long the way is; where there are none, all of them count. For each size the
    median is taken, and through those goes a straight line, ``latency + bytes / bandwidth``, closest
    to the sizes that were sent most. Where all sizes are one, or bigger ones take no longer, all of
    it is latency.

    Args:
        timelines: of steps of one program, in one unit.
        base: gives all that is not measured here; free links by default.

    Returns:
        For each kind and stage the median duration of its tasks, for each label the median duration
        of its outer runs, and the links' latency and bandwidth.

    Raises:
        ValueError: there is no timeline, or they have several units.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> from stagewright.pipelining.timeline import Costs, simulate_order
        >>> order = OneFOneB().order(num_ranks=2, num_microbatches=4)
        >>> costs = measured_costs([simulate_order(order, Costs(forward=(2, 3)))])
        >>> [f"{kind} of stage {stage}: {time}" for (kind, stage), time in costs.tasks.items()]
        ['F of stage 0: 2', 'F of stage 1: 3', 'B of stage 1: 2', 'B of stage 0: 2']
    """
    units = sorted({timeline.unit for timeline in timelines})
    if len(units) != 1:
        got = f"several units: {', '.join(map(repr, units))}" if units else "none"
        raise ValueError(f"expected at least one measured timeline, all in one unit, got {got}")
    base = base or ProgramCosts({})
    latency, bandwidth = _links(timelines) or (base.latency, base.bandwidth)
    return dataclasses.replace(
        base,
        tasks=_medians(
            ((span.action.kind, span.action.stage), span.end - span.start)
            for timeline in timelines
            for span in timeline.spans
        ),
        outer=_medians(
            (span.label, span.end - span.start) for timeline in timelines for span in timeline.outer
        ),
        latency=latency,
        bandwidth=bandwidth,
        unit=units[0],
    )


def _links(timelines: Sequence[Timeline]) -> tuple[Time, float | None] | None:
    """Latency and bandwidth, or None where nothing was sent."""
    awaited = [t for timeline in timelines for t in _awaited(timeline)]
    sent = awaited or [t for timeline in timelines for t in timeline.transfers]
    medians = _medians((t.num_bytes, t.end - t.start) for t in sent)
    return _line(medians, Counter(t.num_bytes for t in sent)) if medians else None


def _awaited(timeline: Timeline) -> Iterator[Transfer]:
    """The transfers during which their receiver did nothing."""
    busy: list[list[tuple[Time, Time]]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.work:
        insort(busy[span.rank], (span.start, span.end))
    for transfer in timeline.transfers:
        begun = bisect_left(busy[transfer.to], (transfer.end, 0))
        if begun == 0 or busy[transfer.to][begun - 1][1] <= transfer.start:
            yield transfer


def _line(times: Mapping[int, Time], counts: Mapping[int, int]) -> tuple[Time, float | None]:
    """Least squares through (bytes, time), each size as often as it was seen; nothing is negative."""
    number = sum(counts.values())
    middle_size = Fraction(sum(n * size for size, n in counts.items()), number)
    middle_time = sum(n * times[size] for size, n in counts.items()) / _exact(number, times)
    slope = _slope(times, counts, middle_size, middle_time)
    if slope <= 0:
        return _median([times[size] for size, n in counts.items() for _ in range(n)]), None
    latency = middle_time - slope * _exact(middle_size, times)
    if latency < 0:  # all of it is bandwidth: the line through nothing at all
        latency, slope = 0, _slope(times, counts, Fraction(0), 0)
    return latency, float(1 / slope)


def _slope(
    times: Mapping[int, Time], counts: Mapping[int, int], size_0: Fraction, time_0: Time
) -> Time:
    """Of the best line through one point; 0 where all sizes are that point's."""
    spread = sum(n * (size - size_0) ** 2 for size, n in counts.items())
    together = sum(
        n * _exact(size - size_0, times) * (times[size] - time_0) for size, n in counts.items()
    )
    return together / _exact(spread, times) if spread else 0


def _exact(number: Fraction | int, times: Mapping[int, Time]) -> Time:
    """The number in the times' own arithmetic: a fraction where they are exact."""
    inexact = any(isinstance(time, float) for time in times.values())
    return float(number) if inexact else Fraction(number)


def _medians(durations: Iterable[tuple[Key, Time]]) -> Mapping[Key, Time]:
    by_key: dict[Key, list[Time]] = {}
    for key, duration in durations:
        by_key.setdefault(key, []).append(duration)
    return {key: _median(values) for key, values in by_key.items()}


def _median(values: list[Time]) -> Time:
    """The middle one, or the upper of the two in the middle: always one that was measured."""
    return sorted(values)[len(values) // 2]
