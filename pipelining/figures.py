"""The few numbers by which schedules are compared, read off a timeline.

In comes a ``Timeline``, planned, simulated or measured; out go its order, the values that cross
from rank to rank, how many activations a rank holds at each instant, and ``Figures``: what tables,
headings and limits show. Not here: times (timeline.py), idle time by cause (bubbles.py), pictures
(drawing.py, pictures/).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Kind, Order, dependency_map
from stagewright.pipelining.timeline import Span, Time, Timeline, Transfer, peak_activations

_STORES = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}

Curve = tuple[tuple[Time, int], ...]
"""``(instant, value from then on)``, by instant."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a schedule costs.

    Args:
        bubble: idle share of all ranks' time, from 0 to 1; exact where the costs are.
        holes: the part of it that lies between a rank's own first and last task: what the
            zero-bubble papers count, since the rest can overlap with the next step.
        activations: the most that any rank holds at once, in units of one micro-batch over one
            rank's layers: schedules with one and with several stages per rank compare directly.
        transfers: values sent from rank to rank in a step, all of one task to one rank together.
        makespan: how long the step takes, in the timeline's unit.
    """

    bubble: Fraction
    holes: Fraction
    activations: Fraction
    transfers: int
    makespan: Time


@dataclass(frozen=True, slots=True)
class Link:
    """One task reads what another made on another rank.

    Args:
        source: the task that makes the value.
        to: the task that reads it.
        transfer: the value's way, where the timeline knows it.
    """

    source: Span
    to: Span
    transfer: Transfer | None = None


def figures(timeline: Timeline) -> Figures:
    """Sum a timeline up.

    Args:
        timeline: a whole step.

    Returns:
        Its figures.

    Example:
        >>> from stagewright.pipelining.schedules import Interleaved1F1B
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> got = figures(simulate_order(Interleaved1F1B(2).order(8, 24)))
        >>> print(f"{float(got.bubble):.1%}, {got.activations}, {got.transfers}, {got.makespan}")
        12.7%, 23/2, 720, 165
    """
    order = order_of(timeline)
    peak = max(peak_activations(order), default=0)
    return Figures(
        bubble=timeline.bubble_fraction,
        holes=_holes(timeline),
        activations=Fraction(peak * order.num_ranks, max(1, order.num_stages)),
        transfers=len(timeline.transfers) or len(list(links(timeline))),
        makespan=timeline.makespan,
    )


def _holes(timeline: Timeline) -> Fraction:
    waits = sum((timeline.holes(rank) for rank in range(timeline.num_ranks)), start=Fraction(0))
    total = timeline.num_ranks * Fraction(timeline.makespan)
    return max(Fraction(0), Fraction(waits) / total) if total else Fraction(0)


def order_of(timeline: Timeline) -> Order:
    """The order that a timeline followed: each rank's tasks by start.

    Example:
        >>> from stagewright.pipelining.schedules import ZBH1
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> order_of(simulate_order(ZBH1().order(4, 8))) == ZBH1().order(4, 8)
        True
    """
    spans = sorted(timeline.spans, key=lambda span: span.start)
    actions = tuple(
        tuple(span.action for span in spans if span.rank == rank)
        for rank in range(timeline.num_ranks)
    )
    num_microbatches = 1 + max((span.action.microbatch for span in spans), default=-1)
    return Order(actions, timeline.placement, num_microbatches)


def links(timeline: Timeline) -> Iterator[Link]:
    """Every value that a task reads from another rank's task, by the reading tasks' turn.

    Several tasks of one rank that read the same value are one link: that of the first of them.
    """
    spans = {span.action: span for span in timeline.spans}
    known = {(sent.label, sent.source, sent.to): sent for sent in timeline.transfers}
    seen = set()
    needs = dependency_map(order_of(timeline))
    for to in timeline.spans:
        for needed in needs[to.action]:
            source = spans.get(needed)
            if source is not None and source.rank != to.rank and (needed, to.rank) not in seen:
                seen.add((needed, to.rank))
                yield Link(source, to, known.get((str(needed), source.rank, to.rank)))


def activation_curves(timeline: Timeline) -> tuple[Curve, ...]:
    """Per rank, how many forwards it holds over time, each of one micro-batch over one stage.

    ``F`` stores one from its start, ``B`` or ``W`` frees it at its end, as
    ``timeline.peak_activations`` counts.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> activation_curves(simulate_order(OneFOneB().order(2, 1)))[1]
        ((0, 0), (1, 1), (4, 0))
    """
    curves: list[dict[Time, int]] = [{0: 0} for _ in range(timeline.num_ranks)]
    held = [0] * timeline.num_ranks
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if change := _STORES[span.action.kind]:
            held[span.rank] += change
            curves[span.rank][span.start if change > 0 else span.end] = held[span.rank]
    return tuple(tuple(curve.items()) for curve in curves)
