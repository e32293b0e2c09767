"""Schedules written as a function: for each rank, a generator of its tasks.

In comes a user's generator, out goes a ``Schedule``. Placement and stages are read off the tasks.
Not here: orders written down as text (grid.py), and whether the order is legal (orders.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stagewright.pipelining.actions import Action, Order, parse_action
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.schedules.schedule import check_sizes, looped_placement

Rank = Callable[[int, int, int], Iterable[Action | str]]
"""(rank, num_ranks, num_microbatches) -> its tasks, first to last."""


def schedule(
    stages_per_rank: int = 1, *, placement: Callable[[int], tuple[int, ...]] | None = None
) -> Callable[[Rank], "GeneratedSchedule"]:
    """Make a schedule of a generator: a decorator.

    Args:
        stages_per_rank: how many stages each rank holds.
        placement: number of ranks -> the rank of each stage; by default stage s is on rank s modulo
            the number of ranks.

    Returns:
        A decorator for a function of ``(rank, num_ranks, num_microbatches)`` that yields the rank's
        tasks, each an ``Action`` or text as ``"2F0"``; what it decorates becomes a ``Schedule`` of
        the function's name.

    Example:
        >>> @schedule()
        ... def one_at_a_time(rank, num_ranks, num_microbatches):
        ...     for microbatch in range(num_microbatches):
        ...         yield f"{rank}F{microbatch}"
        ...         yield f"{rank}B{microbatch}"
        >>> print(one_at_a_time.order(2, 2))
        2 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0B0 0F1 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """
    if stages_per_rank < 1:
        raise ValueError(f"expected stages_per_rank of 1 or more, got {stages_per_rank}")

    def decorate(generate: Rank) -> GeneratedSchedule:
        name = getattr(generate, "__name__", "generated")
        return GeneratedSchedule(generate, name, stages_per_rank, placement)

    return decorate


@dataclass(frozen=True, slots=True)
class GeneratedSchedule:
    """What the decorator ``schedule`` makes.

    Args:
        generate: the user's function.
        name: its name.
        stages_per_rank: how many stages each rank holds.
        placement: number of ranks -> the rank of each stage, or None for looped.
    """

    generate: Rank
    name: str
    stages_per_rank: int = 1
    placement: Callable[[int], tuple[int, ...]] | None = None

    def num_stages(self, num_ranks: int) -> int:
        """So many per rank."""
        return self.stages_per_rank * num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """Run the generator for every rank; see ``Schedule.order``.

        Raises:
            ScheduleError: it yields something that is no task, or fails; rank and position are
                named.
        """
        check_sizes(num_ranks, num_microbatches)
        place = self.placement or (lambda ranks: looped_placement(ranks, self.stages_per_rank))
        ranks = tuple(
            tuple(self._rank(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)
        )
        return Order(ranks, tuple(place(num_ranks)), num_microbatches)

    def _rank(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
        actions: list[Action] = []
        try:
            for item in self.generate(rank, num_ranks, num_microbatches):
                actions.append(item if isinstance(item, Action) else parse_action(item))
        except Exception as error:
            raise ScheduleError(
                f"the schedule {self.name!r} failed for {num_ranks} ranks and {num_microbatches} "
                f"micro-batches, on rank {rank} after {len(actions)} tasks: "
                f"{type(error).__name__}: {error}"
            ) from error
        return actions
