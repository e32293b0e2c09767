"""1F1B: one forward and one backward in turn."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Order
from stagewright.pipelining.schedules.schedule import (
    alternate,
    check_sizes,
    forwards_and_backwards,
    looped_placement,
)


@dataclass(frozen=True, slots=True)
class OneFOneB:
    """Start each backward as soon as can be: GPipe's bubble, memory for p micro-batches, not m.

    Rank r warms up with p - r - 1 forwards, then runs one forward and one backward in turn, then
    the backwards that are left. With p ranks and m micro-batches:

    - bubble: (p - 1) / (m + p - 1) of the step, whatever forward and backward cost.
    - activations: rank r holds min(p - r, m) micro-batches.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(OneFOneB().order(num_ranks=4, num_microbatches=6)))
        4 ranks, 4 stages, 6 micro-batches, 27 time units, bubble 33.3%, peak activations 4
                0           4           8           12          16          20          24
        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---
        rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .
        rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5--- .  .  .  .
        rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .
        F forward  B backward  . idle  numbers: micro-batches

    Reference:
        Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), ICML
        2021, arXiv 2006.09503, section 3.2; also Fan et al., "DAPPLE", PPoPP 2021,
        arXiv 2007.01045.
    """

    @property
    def name(self) -> str:
        """``1f1b``."""
        return "1f1b"

    def num_stages(self, num_ranks: int) -> int:
        """One stage per rank."""
        return num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        ranks = tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
        return Order(ranks, looped_placement(num_ranks), num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step, (p - 1) / (m + p - 1). Exact for any m."""
        check_sizes(num_ranks, num_microbatches)
        return Fraction(num_ranks - 1, num_microbatches + num_ranks - 1)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank r holds at once: min(p - r, m)."""
        check_sizes(num_ranks, num_microbatches)
        return tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    tasks = forwards_and_backwards([rank], [range(num_microbatches)])
    return alternate(*tasks, min(num_ranks - rank - 1, num_microbatches))
