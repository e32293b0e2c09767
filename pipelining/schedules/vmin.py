"""V-Min: about a third of 1F1B's activation memory, the least that a V allows."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Order
from stagewright.pipelining.schedules.schedule import check_sizes
from stagewright.pipelining.schedules.v_shape import fill_weights, repeat_way


@dataclass(frozen=True, slots=True)
class VMin:
    """A V of two stages per rank whose micro-batches never stop on their way.

    Each task of a micro-batch starts one unit after the one before it, all the way down, up, down
    and up. So a micro-batch is in the pipeline for 4 p units, in which a rank starts 2 p / 3 of
    them. With p ranks, m micro-batches, and tasks of one unit each:

    - bubble: 4 p - 5 units on each rank, in a step of 6 m more; none on one rank.
    - activations: every rank holds at most 2 ((p + 4) // 3) micro-batches over one stage, which is
      (p + 4) // 3 over a rank's layers; what a weight gradient still reads is counted as a whole
      one.

    Nothing waits in this order, so tasks that take unequally long make bubbles: the paper finds
    V-Half more robust.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(VMin().order(num_ranks=3, num_microbatches=4)))
        3 ranks, 6 stages, 4 micro-batches, 31 time units, bubble 22.6%, peak activations 4
                0           4           8           12          16          20          24          28
        rank 0  F0 F1 .  .  .  f0 i0 F2 w0 .  .  f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 .  f3 i3 I2 w3 W2 .  I3 W3
        rank 1  .  F0 .  .  f0 F1 .  i0 w0 .  f1 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3 I2 W2 i3 w3 .  I3 W3 .
        rank 2  .  .  F0 f0 .  .  F1 .  i0 f1 I0 w0 F2 W0 i1 f2 I1 w1 F3 W1 i2 f3 I2 w2 W2 .  i3 I3 w3 W3 .
        F forward  I input gradient  W weight gradient  . idle  numbers: micro-batches  lower case: every second stage

    Reference:
        Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv 2405.15362,
        section 3. Its "B" is our ``I``. The authors give the memory as (p + 4) // 3 micro-batches
        over a rank's layers and the bubble as about two thirds of 1F1B's; the exact bubble above is
        this order's, with weight gradients placed by one rule (``v_shape.fill_weights``).
    """

    @property
    def name(self) -> str:
        """``vmin``."""
        return "vmin"

    def num_stages(self, num_ranks: int) -> int:
        """Two stages per rank."""
        return 2 * num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        plan = repeat_way(num_ranks, num_microbatches, (1, 1, 1, 1), _turns(num_ranks))
        return fill_weights(plan, _limit(num_ranks))

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step, F = I = W: (4 p - 5) / (6 m + 4 p - 5). Exact for any m."""
        check_sizes(num_ranks, num_microbatches)
        idle = max(0, 4 * num_ranks - 5)
        return Fraction(idle, 6 * num_microbatches + idle)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds: min(2 ((p + 4) // 3), 2 m)."""
        check_sizes(num_ranks, num_microbatches)
        return (min(_limit(num_ranks), 2 * num_microbatches),) * num_ranks


def _limit(num_ranks: int) -> int:
    return 2 * ((num_ranks + 4) // 3)


def _turns(num_ranks: int) -> tuple[int, int, int]:
    """Waits at the turns, such that no rank has two tasks in the same of the six slots."""
    return (1, 1, 1) if num_ranks % 3 else (3, 1, 3)
