"""Interleaved 1F1B: several stages per rank, so that the pipeline fills in smaller steps."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Order
from stagewright.pipelining.schedules.one_f_one_b import OneFOneB
from stagewright.pipelining.schedules.schedule import (
    alternate,
    check_repeat,
    check_sizes,
    forwards_and_backwards,
    looped_placement,
    round_sizes,
    rounds,
)


@dataclass(frozen=True, slots=True)
class Interleaved1F1B:
    """1F1B over ``repeat`` stages per rank: a bubble as many times smaller, for more transfers.

    Stage s is on rank s % p. Micro-batches go in rounds of about p: a rank runs a whole round
    through its first stage, then through its second, and so on; backwards likewise, last stage
    first. With p ranks, m micro-batches, v = ``repeat`` and rounds of at most g micro-batches:

    - bubble: (p - 1) / (m v + p - 1) of the step if m >= p; 1 - m v / (p v + m - 1) if m < p.
    - activations: rank r holds at most 2 (p - r - 1) + (v - 1) g + 1 micro-batches over one stage;
      1F1B's if v = 1.

    Args:
        repeat: stages per rank, 1 or more; 1 is plain 1F1B.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(Interleaved1F1B(repeat=2).order(num_ranks=3, num_microbatches=3)))
        3 ranks, 6 stages, 3 micro-batches, 24 time units, bubble 25.0%, peak activations 6
                0           4           8           12          16          20          24
        rank 0  F0 F1 F2 f0 f1 f2 .  .  .  .  b0--- .  b1--- .  b2--- B0--- B1--- B2---
        rank 1  .  F0 F1 F2 f0 f1 f2 .  b0--- .  b1--- .  b2--- B0--- B1--- B2--- .  .
        rank 2  .  .  F0 F1 F2 f0 b0--- f1 b1--- f2 b2--- B0--- B1--- B2--- .  .  .  .
        F forward  B backward  . idle  numbers: micro-batches  lower case: every second stage

    Reference:
        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM", SC 2021, arXiv 2104.04473, section 2.2.2. There m must be a multiple of p.
        Here any m works: there are m // p rounds (at least one) whose sizes differ by at most one,
        the larger first, so that no round is smaller than p while m is not. That keeps the bubble
        to the formula for every m; the price is rounds of up to 2p - 1 micro-batches, and as many
        activations, when m lies between p and 2p. (``torch.distributed.pipelining`` makes as many
        rounds, and refuses an m that they do not divide; smaller last rounds, as in Megatron-LM,
        stall the pipeline.)
    """

    repeat: int = 2

    def __post_init__(self) -> None:
        check_repeat(self.repeat)

    @property
    def name(self) -> str:
        """``interleaved:2`` for two stages per rank."""
        return f"interleaved:{self.repeat}"

    def num_stages(self, num_ranks: int) -> int:
        """``repeat`` stages per rank."""
        return num_ranks * self.repeat

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        if self.repeat == 1:
            return OneFOneB().order(num_ranks, num_microbatches)
        ranks = tuple(
            self._rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks)
        )
        return Order(ranks, looped_placement(num_ranks, self.repeat), num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step; section 2.2.2 gives (p - 1) / (m v) of the *ideal* time.

        For fewer micro-batches than ranks the longest path counts: p v stages forward, m - 1 more
        micro-batches on the last one, p v stages back. Exact for any m, and for any costs that are
        equal for all stages.
        """
        check_sizes(num_ranks, num_microbatches)
        few, many = sorted((num_ranks, num_microbatches))
        return 1 - Fraction(num_microbatches * self.repeat, many * self.repeat + few - 1)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once."""
        check_sizes(num_ranks, num_microbatches)
        if self.repeat == 1:
            return OneFOneB().max_activations(num_ranks, num_microbatches)
        total = num_microbatches * self.repeat
        warmups = (self._num_warmup(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
        return tuple(min(num_warmup + 1, total) for num_warmup in warmups)

    def _num_warmup(self, rank: int, num_ranks: int, num_microbatches: int) -> int:
        largest = round_sizes(num_ranks, num_microbatches)[0]
        return min(
            2 * (num_ranks - rank - 1) + (self.repeat - 1) * largest, num_microbatches * self.repeat
        )

    def _rank_actions(self, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
        stages = range(rank, num_ranks * self.repeat, num_ranks)
        tasks = forwards_and_backwards(stages, rounds(num_ranks, num_microbatches))
        return alternate(*tasks, self._num_warmup(rank, num_ranks, num_microbatches))
