"""Breadth-first: all micro-batches through a rank's first stage, then all through its second."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Order
from stagewright.pipelining.schedules.schedule import (
    check_repeat,
    check_sizes,
    forwards_first,
    looped_placement,
)


@dataclass(frozen=True, slots=True)
class LoopedBFS:
    """GPipe over ``repeat`` stages per rank, one stage at a time: its parameters are needed once.

    Stage s is on rank s % p. A rank runs all micro-batches through its first stage, then all
    through its second; backwards likewise, last stage first. So each stage's parameters are read
    in one stretch forward and one back, and its gradients are complete early: good for parameters
    that are sharded over replicas. With p ranks, m micro-batches and v = ``repeat``:

    - bubble: (p - 1) / (m v + p - 1) of the step if m >= p; 1 - m v / (p v + m - 1) if m < p.
    - activations: every rank holds all m micro-batches over v stages.

    Args:
        repeat: stages per rank, 1 or more; 1 is GPipe.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(LoopedBFS(repeat=2).order(num_ranks=3, num_microbatches=4)))
        3 ranks, 6 stages, 4 micro-batches, 30 time units, bubble 20.0%, peak activations 8
                0           4           8           12          16          20          24          28
        rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3---
        rank 1  .  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .  .
        rank 2  .  .  F0 F1 F2 F3 f0 f1 f2 f3 b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .  .  .  .
        F forward  B backward  . idle  numbers: micro-batches  lower case: every second stage

    Reference:
        Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, arXiv 2211.05953, section 4.
        It is also the circular pipeline of Praxis and MaxText, whence the other name
        ``circular:N``: a stage takes micro-batch (t - stage) % m at tick t, so all of them go round
        once before the first goes round again. There the backward pass is the forward's transpose
        and takes micro-batches last to first; here first to last, which costs the same and keeps
        gradients to the same bits.
    """

    repeat: int = 2

    def __post_init__(self) -> None:
        check_repeat(self.repeat)

    @property
    def name(self) -> str:
        """``bfs:2`` for two stages per rank."""
        return f"bfs:{self.repeat}"

    def num_stages(self, num_ranks: int) -> int:
        """``repeat`` stages per rank."""
        return num_ranks * self.repeat

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        placement = looped_placement(num_ranks, self.repeat)
        ranks = tuple(
            forwards_first(range(rank, len(placement), num_ranks), [range(num_microbatches)])
            for rank in range(num_ranks)
        )
        return Order(ranks, placement, num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step; exact for any m, and for any costs equal for all stages.

        For fewer micro-batches than ranks the longest path counts: p v stages forward, m - 1 more
        micro-batches on the last one, p v stages back.
        """
        check_sizes(num_ranks, num_microbatches)
        few, many = sorted((num_ranks, num_microbatches))
        return 1 - Fraction(num_microbatches * self.repeat, many * self.repeat + few - 1)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once: m v."""
        check_sizes(num_ranks, num_microbatches)
        return (num_microbatches * self.repeat,) * num_ranks
