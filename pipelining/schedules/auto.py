"""The best order that a search finds for given costs, links and memory.

In come the costs of the tasks, the latency of a transfer and how many activations a rank may hold;
out goes an ``Order`` that is never slower than the best named schedule under the same limit. Three
steps: the named schedules that fit; list scheduling by many rules, against a clock; local search
from the best of these. All of it is counted in evaluations and seeded, so that the same question
has the same answer. Not here: where costs come from (calibrate.py), and the laws of an order
(orders.py).
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.schedules.list_scheduling import Rule, schedule_by_rule
from stagewright.pipelining.schedules.names import all_names, by_name
from stagewright.pipelining.schedules.schedule import check_sizes, looped_placement, v_placement
from stagewright.pipelining.timeline import (
    UNIT_COSTS,
    Costs,
    Time,
    peak_activations,
    simulate_order,
)


@dataclass(frozen=True, slots=True)
class Auto:
    """Search for the fastest order.

    With the costs of the literature and the memory of 1F1B it finds what ZB-H1 takes or better;
    with twice that memory, no holes. Each stage takes its micro-batches in order, so that gradients
    add up to the same bits as under any other schedule.

    Args:
        costs: of tasks and transfers.
        memory_limit: most forwards, each of one micro-batch over one stage, that a rank may hold at
            once; None for any number.
        stages_per_rank: virtual stages on each rank.
        shape: ``loop`` (stage s on rank s modulo p) or ``v`` (down the ranks and up again; two
            stages per rank).
        evaluations: orders to try in the local search.
        seed: of the local search.

    Raises:
        ValueError: a number is not positive, or the shape does not exist.

    Example:
        >>> from stagewright.pipelining.timeline import simulate_order
        >>> order = Auto(memory_limit=4).order(num_ranks=4, num_microbatches=8)
        >>> simulate_order(order).makespan
        27

    Reference:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 3.1,
        have a heuristic of this kind for one stage per rank; the rules and the local search here
        are our own.
    """

    costs: Costs = field(default=UNIT_COSTS)
    memory_limit: int | None = None
    stages_per_rank: int = 1
    shape: str = "loop"
    evaluations: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        if self.stages_per_rank < 1 or self.evaluations < 0:
            raise ValueError(
                f"expected stages_per_rank of 1 or more and evaluations of 0 or more, got "
                f"{self.stages_per_rank} and {self.evaluations}"
            )
        if self.shape not in ("loop", "v") or (self.shape == "v" and self.stages_per_rank != 2):
            raise ValueError(
                "expected shape 'loop', or 'v' with stages_per_rank=2, got "
                f"{self.shape!r} with {self.stages_per_rank}"
            )

    @property
    def name(self) -> str:
        """``auto``."""
        return "auto"

    def num_stages(self, num_ranks: int) -> int:
        """So many per rank."""
        return self.stages_per_rank * num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """Search; see ``Schedule.order``.

        Raises:
            ScheduleError: no order keeps within the memory limit; the least that was found is told.
        """
        check_sizes(num_ranks, num_microbatches)
        bound = self.lower_bound(num_ranks, num_microbatches)
        candidates: list[Order] = []
        sources = (
            self._named(num_ranks, num_microbatches),
            self._ruled(num_ranks, num_microbatches),
        )
        for order in itertools.chain(*sources):
            if self._fits(order) and self._makespan(order) <= bound:
                return order
            candidates.append(order)
        fitting = [order for order in candidates if self._fits(order)]
        if not fitting:
            least = min((max(peak_activations(order)) for order in candidates), default=None)
            raise ScheduleError(
                f"no order for {num_ranks} ranks and {num_microbatches} micro-batches holds at most "
                f"{self.memory_limit} activations a rank; the least found is {least}"
            )
        best = min(fitting, key=self._makespan)
        return self._improve(best)

    def lower_bound(self, num_ranks: int, num_microbatches: int) -> Time:
        """A step time that no order with a barrier at its end goes below: each rank's way in and its work."""
        table = self.costs.table(self.num_stages(num_ranks))
        placement = self._placement(num_ranks)
        bounds: list[Time] = []
        for rank in range(num_ranks):
            mine = [stage for stage, home in enumerate(placement) if home == rank]
            way_in = sum(table[Kind.F][: mine[0]], start=0)
            hops = sum(placement[s] != placement[s + 1] for s in range(mine[0]))
            work = sum((table[Kind.F][s] + table[Kind.B][s] for s in mine), start=0)
            bounds.append(way_in + hops * self.costs.latency + num_microbatches * work)
        return max(bounds)

    def _placement(self, num_ranks: int) -> tuple[int, ...]:
        if self.shape == "v":
            return v_placement(num_ranks)
        return looped_placement(num_ranks, self.stages_per_rank)

    def _fits(self, order: Order) -> bool:
        return self.memory_limit is None or max(peak_activations(order)) <= self.memory_limit

    def _makespan(self, order: Order) -> Time:
        return simulate_order(order, self.costs).makespan

    def _named(self, num_ranks: int, num_microbatches: int) -> Iterator[Order]:
        """The named schedules with as many stages."""
        for name in all_names():
            base = name.partition(":")[0]
            schedule = by_name(f"{base}:{self.stages_per_rank}" if ":" in name else name)
            try:
                order = schedule.order(num_ranks, num_microbatches)
            except ScheduleError:
                continue
            if order.placement == self._placement(num_ranks):
                yield order

    def _ruled(self, num_ranks: int, num_microbatches: int) -> Iterator[Order]:
        """List scheduling by every combination of rules."""
        placement = self._placement(num_ranks)
        limits = {self.memory_limit}
        if self.memory_limit is None:
            limits |= {num_ranks * self.stages_per_rank * factor for factor in (1, 2)}
        for limit, patience, deep, eager in itertools.product(
            sorted(limits, key=str), (0, 0.5, 1), (True, False), (True, False)
        ):
            rule = Rule(limit, patience, deep, eager)
            order = schedule_by_rule(placement, num_microbatches, self.costs, rule)
            if order is not None:
                yield order

    def _improve(self, order: Order) -> Order:
        """Swap neighbours as long as it helps: the first improvement is taken."""
        dice = random.Random(self.seed)
        best, shortest = order, self._makespan(order)
        bound = self.lower_bound(order.num_ranks, order.num_microbatches)
        for _ in range(self.evaluations):
            if shortest <= bound:
                break
            changed = _moved(best, dice)
            if changed is None or not self._fits(changed):
                continue
            try:
                length = self._makespan(changed)
            except ScheduleError:
                continue
            if length <= shortest:
                best, shortest = changed, length
        return best


def _moved(order: Order, dice: random.Random) -> Order | None:
    """The order with one task moved along its rank, or None if that breaks the order of micro-batches."""
    rank = dice.randrange(order.num_ranks)
    row = list(order.actions[rank])
    source = dice.randrange(len(row))
    target = min(len(row) - 1, max(0, source + dice.choice((-3, -2, -1, 1, 2, 3))))
    action = row.pop(source)
    row.insert(target, action)
    low, high = sorted((source, target))
    if source == target or not _keeps_turns(row[low : high + 1], action):
        return None
    actions = (*order.actions[:rank], tuple(row), *order.actions[rank + 1 :])
    return Order(actions, order.placement, order.num_microbatches)


def _keeps_turns(crossed: Sequence[Action], moved: Action) -> bool:
    """Whether the moved task passed none of its own stage and kind."""
    same = [a for a in crossed if (a.stage, a.kind) == (moved.stage, moved.kind)]
    return same == [moved]
