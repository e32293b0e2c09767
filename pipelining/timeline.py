"""When each task of an order would run, given what the tasks cost.

In comes an ``Order`` and its ``Costs``, out goes a ``Timeline``: one ``Span`` of time for every
task. Times are in whatever unit the costs have (seconds, or plain counts); whole numbers and
fractions give exact results, so that a bubble can be compared with a paper's formula without a
tolerance. A task starts when its rank is free and everything it reads has arrived. Not here: bytes,
links and the compiled programs (the program simulator), measured times (the runtime), pictures
(drawing.py).
"""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Kind, Order, dependency_map, run_order
from stagewright.pipelining.errors import ScheduleError

Time = float | Fraction
"""A duration or an instant; ``int`` and ``Fraction`` stay exact."""


@dataclass(frozen=True, slots=True)
class Costs:
    """How long each kind of task takes: one number for all stages, or a tuple with one for each.

    The default is the unit of the literature: forward, input gradient and weight gradient take 1
    each, and a full backward takes the sum of both gradients.

    Args:
        forward: duration of ``F``.
        backward_input: duration of ``I``.
        backward_weight: duration of ``W``.
        latency: how long a value takes from the end of its task to another rank; no rank is kept
            busy by it.
    """

    forward: Time | tuple[Time, ...] = 1
    backward_input: Time | tuple[Time, ...] = 1
    backward_weight: Time | tuple[Time, ...] = 1
    latency: Time = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "latency"):
            value = getattr(self, name)
            if any(cost < 0 for cost in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"expected {name} of 0 or more, got {value}")

    def table(self, num_stages: int) -> dict[Kind, tuple[Time, ...]]:
        """Durations by kind, then stage.

        Raises:
            ValueError: a tuple of costs has another length than there are stages.
        """
        forward = _per_stage("forward", self.forward, num_stages)
        inputs = _per_stage("backward_input", self.backward_input, num_stages)
        weights = _per_stage("backward_weight", self.backward_weight, num_stages)
        both = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        return {Kind.F: forward, Kind.B: both, Kind.I: inputs, Kind.W: weights}


def _per_stage(name: str, cost: Time | tuple[Time, ...], num_stages: int) -> tuple[Time, ...]:
    if not isinstance(cost, tuple):
        return (cost,) * num_stages
    if len(cost) != num_stages:
        raise ValueError(f"expected {name} costs for {num_stages} stages, got {len(cost)}: {cost}")
    return cost


UNIT_COSTS = Costs()
"""F, I and W take 1 each, and values travel at once: what the literature's formulas assume."""


@dataclass(frozen=True, slots=True)
class Span:
    """One task in time: from ``start`` to ``end`` on ``rank``."""

    rank: int
    action: Action
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class OuterSpan:
    """Work outside the accumulation loop, before it or after: the optimizer, a global norm."""

    rank: int
    label: str
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Transfer:
    """Values on their way from one rank to another, all of one task together.

    Args:
        source: the rank that sends.
        to: the rank that receives.
        label: the task that made the values, as ``2F0``, or the part of the step outside the loop.
        num_bytes: their size.
        start: when the sender posts it.
        end: when the receiver has it.
    """

    source: int
    to: int
    label: str
    num_bytes: int
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Timeline:
    """Every task of a step in time, by start and then by rank: planned, simulated or measured.

    Args:
        spans: one per task.
        num_ranks: pipeline ranks, those without any task included.
        outer: what ran outside the loop, where that is known.
        transfers: what was sent, where that is known.
        memory: per rank, ``(instant, live bytes from then on)`` by instant, where that is known.
        unit: of time: ``s`` for seconds, nothing for the abstract unit of ``Costs``.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    outer: tuple[OuterSpan, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    memory: tuple[tuple[tuple[Time, int], ...], ...] = ()
    unit: str = ""

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each virtual stage, by stage, as its tasks show."""
        ranks = {span.action.stage: span.rank for span in self.spans}
        return tuple(ranks[stage] for stage in sorted(ranks))

    @property
    def work(self) -> tuple[Span | OuterSpan, ...]:
        """Tasks and outer work: all that keeps ranks busy."""
        return (*self.spans, *self.outer)

    @property
    def makespan(self) -> Time:
        """When the last task or outer work ends; the first starts at 0."""
        return max((span.end for span in self.work), default=0)

    def busy(self, rank: int) -> Time:
        """How long one rank computes."""
        return sum((span.end - span.start for span in self.work if span.rank == rank), start=0)

    def holes(self, rank: int) -> Time:
        """How long one rank waits between its own first start and last end, outer work included.

        The bubble of the zero-bubble papers: time before the first task and after the last does not
        count, for it vanishes when steps follow each other without a barrier.
        """
        mine = [span for span in self.work if span.rank == rank]
        first = min((span.start for span in mine), default=0)
        return max((span.end for span in mine), default=0) - first - self.busy(rank)

    @property
    def bubble_fraction(self) -> Fraction:
        """Share of all ranks' time in which they wait, from 0 to 1; exact where the costs are."""
        total = self.num_ranks * Fraction(self.makespan)
        busy = Fraction(sum((self.busy(rank) for rank in range(self.num_ranks)), start=0))
        return max(Fraction(0), 1 - busy / total) if total else Fraction(0)

    def peak_bytes(self, rank: int) -> int:
        """The most live bytes of one rank, 0 where memory is not known."""
        curve = self.memory[rank] if self.memory else ()
        return max((num_bytes for _, num_bytes in curve), default=0)


def simulate_order(order: Order, costs: Costs = UNIT_COSTS) -> Timeline:
    """Run the lists against a clock: each task starts as soon as its rank and its inputs allow.

    Args:
        order: a legal order.
        costs: durations; the unit is the caller's.

    Returns:
        The spans of all tasks.

    Raises:
        ScheduleError: the order cannot run to its end (``orders.validate_order`` says where and
            why).
        ValueError: costs are given for another number of stages.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> timeline = simulate_order(OneFOneB().order(num_ranks=8, num_microbatches=24))
        >>> timeline.makespan, timeline.bubble_fraction
        (93, Fraction(7, 31))
    """
    needs = dependency_map(order)
    durations = costs.table(order.num_stages)
    free: list[Time] = [0] * order.num_ranks
    ends: dict[Action, tuple[int, Time]] = {}
    spans = []
    for rank, action in run_order(order, needs):
        start = free[rank]
        for needed in needs[action]:
            source, end = ends[needed]
            start = max(start, end if source == rank else end + costs.latency)
        free[rank] = start + durations[action.kind][action.stage]
        ends[action] = rank, free[rank]
        spans.append(Span(rank, action, start, free[rank]))
    if len(spans) != (expected := sum(map(len, order.actions))):
        raise ScheduleError(
            f"only {len(spans)} of {expected} tasks can run; "
            "orders.validate_order(order) says which one is stuck"
        )
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start, span.rank))), order.num_ranks)


def peak_activations(order: Order) -> tuple[int, ...]:
    """The most forwards that each rank holds at once, each of one micro-batch over one stage.

    ``F`` stores one. ``B`` or ``W`` frees it; between ``I`` and ``W`` it counts as still one, for
    what the weight gradient reads.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> peak_activations(OneFOneB().order(num_ranks=4, num_microbatches=8))
        (4, 3, 2, 1)
    """
    return tuple(_peak(actions) for actions in order.actions)


def _peak(actions: tuple[Action, ...]) -> int:
    change = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}
    alive = peak = 0
    for action in actions:
        alive += change[action.kind]
        peak = max(peak, alive)
    return peak
