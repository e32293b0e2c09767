"""Eager 1F1B: 1F1B that keeps twice as many forwards in flight, so that sends can hide."""

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
class Eager1F1B:
    """1F1B with twice the warm-up: the same bubble, and between two ranks a send has time.

    In 1F1B's steady state a rank needs a value as soon as its neighbour has made it. Here rank r
    warms up with 2 (p - r - 1) forwards instead of p - r - 1, so what it needs next was made one
    forward and one backward earlier, and the transfer runs beside them. With p ranks and m
    micro-batches:

    - bubble: (p - 1) / (m + p - 1) of the step, whatever forward and backward cost.
    - activations: rank r holds min(2 (p - r) - 1, m) micro-batches.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(Eager1F1B().order(num_ranks=4, num_microbatches=6)))
        4 ranks, 4 stages, 6 micro-batches, 27 time units, bubble 33.3%, peak activations 6
                0           4           8           12          16          20          24
        rank 0  F0 F1 F2 F3 F4 F5 .  .  .  .  B0--- .  B1--- .  B2--- .  B3--- .  B4--- .  B5---
        rank 1  .  F0 F1 F2 F3 F4 .  .  B0--- F5 B1--- .  B2--- .  B3--- .  B4--- .  B5--- .  .
        rank 2  .  .  F0 F1 F2 .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .  .  .
        rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .
        F forward  B backward  . idle  numbers: micro-batches

    Reference:
        Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023,
        arXiv 2211.05322, section 4 ("eager-1F1B").
    """

    @property
    def name(self) -> str:
        """``eager1f1b``."""
        return "eager1f1b"

    def num_stages(self, num_ranks: int) -> int:
        """One stage per rank."""
        return num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        ranks = tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
        return Order(ranks, looped_placement(num_ranks), num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step, (p - 1) / (m + p - 1), as 1F1B's. Exact for any m."""
        check_sizes(num_ranks, num_microbatches)
        return Fraction(num_ranks - 1, num_microbatches + num_ranks - 1)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank r holds: min(2 (p - r) - 1, m)."""
        check_sizes(num_ranks, num_microbatches)
        return tuple(min(2 * (num_ranks - rank) - 1, num_microbatches) for rank in range(num_ranks))


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    tasks = forwards_and_backwards([rank], [range(num_microbatches)])
    return alternate(*tasks, min(2 * (num_ranks - rank - 1), num_microbatches))
