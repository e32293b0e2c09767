"""List scheduling: tasks start as soon as a rule lets them, against a clock.

In come a placement, costs and a ``Rule``; out goes an ``Order``, or None where the rule runs into a
dead end. ``Auto`` tries many rules. Not here: the search over rules (auto.py).
"""

from dataclasses import dataclass

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.timeline import Costs, Time


@dataclass(frozen=True, slots=True)
class Rule:
    """How a rank chooses its next task.

    Args:
        limit: most forwards that it may hold at once, or None.
        patience: a weight gradient starts only if the rank would otherwise wait for at least this
            share of its duration; 0 fills every gap.
        deep: of several forwards, take that of the later stage.
        eager: prefer a forward to an input gradient if both can start.
    """

    limit: int | None
    patience: float
    deep: bool
    eager: bool


def schedule_by_rule(
    placement: tuple[int, ...], num_microbatches: int, costs: Costs, rule: Rule
) -> Order | None:
    """Run the rule to its end.

    Args:
        placement: the rank of each stage.
        num_microbatches: micro-batches in the step.
        costs: of tasks and transfers.
        rule: how ranks choose.

    Returns:
        The order, with every backward split; None if ranks end up waiting for each other.
    """
    state = _State(placement, num_microbatches, costs, rule)
    while not state.done:
        if not state.advance():
            return None
    return Order(tuple(map(tuple, state.rows)), placement, num_microbatches)


class _State:
    """Where the schedule stands."""

    def __init__(
        self, placement: tuple[int, ...], num_microbatches: int, costs: Costs, rule: Rule
    ) -> None:
        num_ranks = 1 + max(placement)
        self.placement = placement
        self.count = num_microbatches
        self.costs = costs
        self.table = costs.table(len(placement))
        self.rule = rule
        self.rows: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.free: list[Time] = [0] * num_ranks
        self.held = [0] * num_ranks
        self.stages = [
            [s for s, home in enumerate(placement) if home == r] for r in range(num_ranks)
        ]
        self.next: dict[tuple[int, Kind], int] = {
            (s, kind): 0 for s in range(len(placement)) for kind in (Kind.F, Kind.I, Kind.W)
        }
        self.ends: dict[Action, Time] = {}
        self.left = 3 * len(placement) * num_microbatches

    @property
    def done(self) -> bool:
        return self.left == 0

    def advance(self) -> bool:
        """Start the task that can start first; False if none can."""
        choices = [c for rank in range(len(self.rows)) if (c := self._choose(rank)) is not None]
        if not choices:
            return False
        start, rank, action = min(choices, key=lambda c: (c[0], c[1]))
        end = start + self.table[action.kind][action.stage]
        self.rows[rank].append(action)
        self.free[rank] = end
        self.ends[action] = end
        self.next[action.stage, action.kind] += 1
        self.held[rank] += {Kind.F: 1, Kind.I: 0, Kind.W: -1}[action.kind]
        self.left -= 1
        return True

    def _choose(self, rank: int) -> tuple[Time, int, Action] | None:
        """The rank's next task and its start."""
        useful = self._useful(rank)
        weights = self._of_kind(rank, Kind.W)
        if not useful and not weights:
            return None
        if useful:
            start, action = useful[0]
            wait = start - self.free[rank]
            if weights:
                filler = weights[0]
                needed = self.table[Kind.W][filler[1].stage] * self.rule.patience
                if wait > 0 and wait >= needed:
                    return (filler[0], rank, filler[1])
            return (start, rank, action)
        return (weights[0][0], rank, weights[0][1])

    def _useful(self, rank: int) -> list[tuple[Time, Action]]:
        """Forwards and input gradients, the best first."""
        forwards = [
            (start, action)
            for start, action in self._of_kind(rank, Kind.F)
            if self._has_room(rank, action.stage)
        ]
        gradients = self._of_kind(rank, Kind.I)
        depth = -1 if self.rule.deep else 1

        def key(choice: tuple[Time, Action]) -> tuple[Time, bool, int]:
            start, action = choice
            second = (action.kind is Kind.F) != self.rule.eager
            return (start, second, depth * action.stage)

        return sorted([*forwards, *gradients], key=key)

    def _of_kind(self, rank: int, kind: Kind) -> list[tuple[Time, Action]]:
        """What the rank could do next of a kind, one a stage, with the earliest start; earliest first."""
        found = []
        for stage in self.stages[rank]:
            microbatch = self.next[stage, kind]
            if microbatch < self.count:
                action = Action(stage, kind, microbatch)
                start = self._start(rank, action)
                if start is not None:
                    found.append((start, action))
        return sorted(found, key=lambda choice: (choice[0], -choice[1].stage))

    def _start(self, rank: int, action: Action) -> Time | None:
        start = self.free[rank]
        for needed in self._needs(action):
            if needed not in self.ends:
                return None
            here = self.placement[needed.stage] == rank
            start = max(start, self.ends[needed] + (0 if here else self.costs.latency))
        return start

    def _needs(self, action: Action) -> list[Action]:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is Kind.F:
            return [Action(stage - 1, Kind.F, microbatch)] if stage else []
        if kind is Kind.W:
            return [Action(stage, Kind.I, microbatch)]
        needs = [Action(stage, Kind.F, microbatch)]
        if stage + 1 < len(self.placement):
            needs.append(Action(stage + 1, Kind.I, microbatch))
        return needs

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether a forward fits, with one place left for each later stage of the rank."""
        if self.rule.limit is None:
            return True
        later = sum(s > stage for s in self.stages[rank])
        return self.held[rank] < self.rule.limit - later
