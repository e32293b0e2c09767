"""ZB-H2: no bubble between a rank's first task and its last, for twice 1F1B's memory."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Order
from stagewright.pipelining.schedules.schedule import (
    check_sizes,
    delayed_weights,
    looped_placement,
)


@dataclass(frozen=True, slots=True)
class ZBH2:
    """ZB-H1 with twice the warm-up: once a rank has started, it never waits.

    Rank r warms up with 2 (p - r) - 1 forwards, which last until its first input gradient can run,
    and puts off its weight gradients by 2 r micro-batches, which last until its end. So it starts r
    units late, ends r units late and is busy all the while: its tasks make a parallelogram. The
    step of one rank is without holes (``Timeline.holes``), and steps that follow each other without
    a barrier lose nothing. Up to a barrier (global-norm clipping) the ends are waited for, and the
    step is as long as ZB-H1's. With p ranks, m micro-batches, and tasks of one unit each:

    - bubble: no holes if m >= 2 p - 1; with a barrier p - 1 units on each rank, in a step of
      3 m + p - 1, if m >= p; a step takes 2 (m + p) - 1 units if m < p.
    - activations: every rank holds at most min(2 p - 1, m) micro-batches; what a weight gradient
      still reads is counted as a whole one.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(ZBH2().order(num_ranks=4, num_microbatches=7)))
        4 ranks, 4 stages, 7 micro-batches, 24 time units, bubble 12.5%, peak activations 7
                0           4           8           12          16          20          24
        rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .  .  .
        rank 1  .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .  .
        rank 2  .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .
        rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6
        F forward  I input gradient  W weight gradient  . idle  numbers: micro-batches

    Reference:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 2.2 and
        figure 3, bottom. Its "B" is our ``I``. The paper needs m >= 2 p - 1; here a smaller m puts
        weight gradients off by r, as in ZB-H1, for then nothing is left to fill the ends with.
    """

    @property
    def name(self) -> str:
        """``zbh2``."""
        return "zbh2"

    def num_stages(self, num_ranks: int) -> int:
        """One stage per rank."""
        return num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        ranks = tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
        return Order(ranks, looped_placement(num_ranks), num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of a step that ends in a barrier, F = I = W: (p - 1) / (3 m + p - 1) if m >= p.

        For fewer micro-batches than ranks the longest path counts: p stages forward, 2 (m - 1)
        tasks more on the last rank, p stages back, one weight gradient. Both are exact for any m.
        """
        check_sizes(num_ranks, num_microbatches)
        units = 2 * num_microbatches + num_ranks - 1 + max(num_microbatches, num_ranks)
        return 1 - Fraction(3 * num_microbatches, units)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once: min(2 p - 1, m)."""
        check_sizes(num_ranks, num_microbatches)
        return (min(2 * num_ranks - 1, num_microbatches),) * num_ranks


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    num_warmup = min(2 * (num_ranks - rank) - 1, num_microbatches)
    delay = 2 * rank if num_microbatches >= 2 * num_ranks - 1 else rank
    return delayed_weights(rank, num_microbatches, num_warmup, delay)
