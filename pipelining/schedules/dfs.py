"""Depth-first: a round of micro-batches through all of a rank's stages, then the next round."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Order
from stagewright.pipelining.schedules.schedule import (
    check_repeat,
    check_sizes,
    forwards_first,
    looped_placement,
    rounds,
)


@dataclass(frozen=True, slots=True)
class LoopedDFS:
    """GPipe over ``repeat`` stages per rank, round by round: interleaved GPipe.

    Stage s is on rank s % p. Micro-batches go in rounds of about p: a rank runs one round through
    all its stages, then the next; when all forwards are done, backwards likewise, last stage first.
    It costs what ``LoopedBFS`` costs, but the first micro-batches leave the last stage p v ticks
    after the start, however many follow. With p ranks, m micro-batches and v = ``repeat``:

    - bubble: (p - 1) / (m v + p - 1) of the step if m >= p; 1 - m v / (p v + m - 1) if m < p.
    - activations: every rank holds all m micro-batches over v stages.

    Args:
        repeat: stages per rank, 1 or more; 1 is GPipe.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(LoopedDFS(repeat=2).order(num_ranks=2, num_microbatches=4)))
        2 ranks, 4 stages, 4 micro-batches, 27 time units, bubble 11.1%, peak activations 8
                0           4           8           12          16          20          24
        rank 0  F0 F1 f0 f1 F2 F3 f2 f3 .  .  .  b0--- b1--- B0--- B1--- b2--- b3--- B2--- B3---
        rank 1  .  F0 F1 f0 f1 F2 F3 f2 f3 b0--- b1--- B0--- B1--- b2--- b3--- B2--- B3--- .  .
        F forward  B backward  . idle  numbers: micro-batches  lower case: every second stage

    Reference:
        The depth-first order of Narayanan et al. (Megatron-LM), SC 2021, arXiv 2104.04473, section
        2.2.2, so named by Lamy-Poirier, arXiv 2211.05953, section 4. There forwards and backwards
        take turns, which is ``Interleaved1F1B``; here all forwards come first. Any m works: see
        ``Interleaved1F1B`` for the rounds.
    """

    repeat: int = 2

    def __post_init__(self) -> None:
        check_repeat(self.repeat)

    @property
    def name(self) -> str:
        """``dfs:2`` for two stages per rank."""
        return f"dfs:{self.repeat}"

    def num_stages(self, num_ranks: int) -> int:
        """``repeat`` stages per rank."""
        return num_ranks * self.repeat

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        placement = looped_placement(num_ranks, self.repeat)
        in_rounds = rounds(num_ranks, num_microbatches)
        ranks = tuple(
            forwards_first(range(rank, len(placement), num_ranks), in_rounds)
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
