"""GPipe: all forwards, then all backwards."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Order
from stagewright.pipelining.schedules.schedule import (
    check_sizes,
    forwards_first,
    looped_placement,
)


@dataclass(frozen=True, slots=True)
class GPipe:
    """Run all forwards, then all backwards: the plainest schedule, and the hungriest for memory.

    With p ranks and m micro-batches:

    - bubble: (p - 1) / (m + p - 1) of the step, whatever forward and backward cost.
    - activations: every rank holds all m micro-batches.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(GPipe().order(num_ranks=4, num_microbatches=4)))
        4 ranks, 4 stages, 4 micro-batches, 21 time units, bubble 42.9%, peak activations 4
                0           4           8           12          16          20
        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
        rank 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
        rank 2  .  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
        rank 3  .  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .
        F forward  B backward  . idle  numbers: micro-batches

    Reference:
        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", NeurIPS 2019, arXiv 1811.06965, section 2.3. There the backwards run last
        micro-batch first; here they run first to last, as the other schedules' do, so that
        gradients add up in the same sequence and to the same bits.
    """

    @property
    def name(self) -> str:
        """``gpipe``."""
        return "gpipe"

    def num_stages(self, num_ranks: int) -> int:
        """One stage per rank."""
        return num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        ranks = tuple(
            forwards_first([rank], [range(num_microbatches)]) for rank in range(num_ranks)
        )
        return Order(ranks, looped_placement(num_ranks), num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step, (p - 1) / (m + p - 1): section 2.3. Exact for any m."""
        check_sizes(num_ranks, num_microbatches)
        return Fraction(num_ranks - 1, num_microbatches + num_ranks - 1)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once: m."""
        check_sizes(num_ranks, num_microbatches)
        return (num_microbatches,) * num_ranks
