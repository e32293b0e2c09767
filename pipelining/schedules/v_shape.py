"""What the V-shaped schedules share: a micro-batch's way, repeated, then filled with weight gradients.

A V gives rank r the stages r and 2 p - 1 - r: micro-batches go down the ranks and up again, so that
the first stage and the loss are on one rank, and the ranks need equal memory. In come the steps of
one micro-batch's way and a limit of activations, out goes an ``Order``. The way is repeated every
six units, as many as a rank's six tasks for a micro-batch take (F, I and W of two stages); this
gives the sequence of forwards and input gradients. Weight gradients then run wherever a rank would
wait, or would hold too much. Not here: which steps and limits make which schedule (zbv.py,
vhalf.py, vmin.py).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from stagewright.pipelining.actions import Action, Kind, Order, dependency_map
from stagewright.pipelining.schedules.schedule import v_placement

_INTERVAL = 6


def repeat_way(
    num_ranks: int,
    num_microbatches: int,
    steps: tuple[int, int, int, int],
    turns: tuple[int, int, int] = (1, 1, 1),
) -> Order:
    """Forwards and input gradients of all micro-batches, in the sequence of one repeated way.

    Args:
        num_ranks: ranks of the V.
        num_microbatches: micro-batches in the step.
        steps: units from a task's start to the next one's on the next rank: forward down the ranks,
            forward up, input gradient down, input gradient up. Larger ones let more weight
            gradients in between, and hold activations for longer.
        turns: the same where the way turns and stays on its rank: forward at the bottom, from
            forward to gradient at the top, gradient at the bottom.

    Returns:
        An order without its weight gradients: for ``fill_weights``.

    Example:
        >>> print(repeat_way(num_ranks=2, num_microbatches=2, steps=(1, 1, 1, 1)))
        2 micro-batches, stages on ranks 0 1 1 0
        rank 0: 0F0 3F0 3I0 0F1 0I0 3F1 3I1 0I1
        rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2I1 1I1
    """
    placement = v_placement(num_ranks)
    stages = range(len(placement))
    way = [(Kind.F, stage) for stage in stages] + [(Kind.I, stage) for stage in reversed(stages)]
    starts = accumulate(_distances(num_ranks, steps, turns), initial=0)
    ranks: list[list[tuple[int, Kind, Action]]] = [[] for _ in range(num_ranks)]
    for start, (kind, stage) in zip(starts, way, strict=True):
        for microbatch in range(num_microbatches):
            time = start + _INTERVAL * microbatch
            ranks[placement[stage]].append((time, kind, Action(stage, kind, microbatch)))
    actions = tuple(tuple(action for _, _, action in sorted(rank)) for rank in ranks)
    return Order(actions, placement, num_microbatches)


def _distances(
    num_ranks: int, steps: tuple[int, int, int, int], turns: tuple[int, int, int]
) -> Iterable[int]:
    for step, turn in zip(steps, (*turns, None), strict=True):
        yield from [step] * (num_ranks - 1)
        if turn is not None:
            yield turn


def fill_weights(plan: Order, limit: int) -> Order:
    """Add the weight gradients: wherever a rank would wait, or would hold more than it may.

    It runs the plan against a clock in which each task takes one unit. A rank takes its next
    planned task if that can run now and keeps within the limit, else the weight gradient that it
    has owed for longest, else it waits.

    Args:
        plan: forwards and input gradients, as ``repeat_way`` gives them.
        limit: most activations that a rank may hold, each of one micro-batch over one stage.

    Returns:
        The whole order.

    Example:
        >>> plan = repeat_way(num_ranks=2, num_microbatches=2, steps=(1, 1, 1, 1))
        >>> print(fill_weights(plan, limit=4))
        2 micro-batches, stages on ranks 0 1 1 0
        rank 0: 0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 3W1 0I1 0W1
        rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
    """
    needs = dependency_map(plan)
    ranks = [_Rank(deque(actions)) for actions in plan.actions]
    done: set[Action] = set()
    while any(rank.planned or rank.owed for rank in ranks):
        ran = {action for rank in ranks if (action := rank.run_one(needs, done, limit))}
        assert ran, f"the plan cannot go on within {limit} activations"
        done |= ran
    return replace(plan, actions=tuple(tuple(rank.ran) for rank in ranks))


@dataclass(slots=True)
class _Rank:
    planned: deque[Action]
    owed: deque[Action] = field(default_factory=deque)
    ran: list[Action] = field(default_factory=list)
    held: int = 0

    def run_one(
        self, needs: dict[Action, tuple[Action, ...]], done: set[Action], limit: int
    ) -> Action | None:
        if (
            self.planned
            and self._may_run(self.planned[0], limit)
            and done.issuperset(needs[self.planned[0]])
        ):
            action = self.planned.popleft()
        elif self.owed:
            action = self.owed.popleft()
        else:
            return None
        self._account(action)
        return action

    def _may_run(self, action: Action, limit: int) -> bool:
        return action.kind is Kind.I or self.held < limit

    def _account(self, action: Action) -> None:
        self.ran.append(action)
        if action.kind is Kind.I:
            self.owed.append(replace(action, kind=Kind.W))
        else:
            self.held += 1 if action.kind is Kind.F else -1
