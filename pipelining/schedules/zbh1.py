"""ZB-H1: weight gradients fill the bubble that 1F1B leaves."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Order
from stagewright.pipelining.schedules.schedule import (
    check_sizes,
    delayed_weights,
    looped_placement,
)


@dataclass(frozen=True, slots=True)
class ZBH1:
    """1F1B with the backward split in two: a third of its bubble, within its peak memory.

    Only the input gradient (``I``) keeps the stage before waiting; the weight gradient (``W``) can
    run whenever there is time. Forwards and input gradients keep 1F1B's order. Rank r puts off its
    weight gradients by r micro-batches, as it warms up with r forwards less than rank 0: so every
    rank holds the same, and has work left for the end, when input gradients arrive slowly. With p
    ranks, m micro-batches, and tasks of one unit each:

    - bubble: (p - 1) (F + I - W) = p - 1 units on each rank if m >= p, in a step of 3 m + p - 1
      (the same with other costs, while W is no longer than F and I); a step takes 2 (m + p) - 1
      units if m < p.
    - activations: every rank holds at most min(p, m) micro-batches, as many as 1F1B's first rank;
      what a weight gradient still reads is counted as a whole one.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(ZBH1().order(num_ranks=4, num_microbatches=6)))
        4 ranks, 4 stages, 6 micro-batches, 21 time units, bubble 14.3%, peak activations 4
                0           4           8           12          16          20
        rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
        F forward  I input gradient  W weight gradient  . idle  numbers: micro-batches

    Reference:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 2.1 and
        figure 3, top. Its "B" is our ``I``. The paper says that each worker delays W by its number
        of warm-up micro-batches and draws one case; here that delay is the whole rule, and gives
        its bubble and memory for every p and m.
    """

    @property
    def name(self) -> str:
        """``zbh1``."""
        return "zbh1"

    def num_stages(self, num_ranks: int) -> int:
        """One stage per rank."""
        return num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        ranks = tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
        return Order(ranks, looped_placement(num_ranks), num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step for F = I = W: (p - 1) / (3 m + p - 1) if m >= p (section 2.3).

        For fewer micro-batches than ranks the longest path counts: p stages forward, 2 (m - 1)
        tasks more on the last rank, p stages back, one weight gradient. Both are exact for any m.
        """
        check_sizes(num_ranks, num_microbatches)
        units = 2 * num_microbatches + num_ranks - 1 + max(num_microbatches, num_ranks)
        return 1 - Fraction(3 * num_microbatches, units)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once: min(p, m)."""
        check_sizes(num_ranks, num_microbatches)
        return (min(num_ranks, num_microbatches),) * num_ranks


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    return delayed_weights(rank, num_microbatches, min(num_ranks - rank, num_microbatches), rank)
