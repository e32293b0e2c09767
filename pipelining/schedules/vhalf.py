"""V-Half: half of 1F1B's activation memory, and about half of its bubble."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Order
from stagewright.pipelining.schedules.schedule import check_sizes
from stagewright.pipelining.schedules.v_shape import fill_weights, repeat_way


@dataclass(frozen=True, slots=True)
class VHalf:
    """A V of two stages per rank whose micro-batches hurry: they hold half of what 1F1B's hold.

    Each task of a micro-batch starts one unit after the one before it on the way down the ranks,
    and two units on the way up, for forwards and input gradients alike. So a micro-batch is in the
    pipeline for 6 p units, in which a rank starts p of them. With p ranks, m micro-batches, and
    tasks of one unit each:

    - bubble: 3 p - 5 units on each rank if p is even, 3 p - 4 if it is odd, in a step of 6 m more,
      if m > p / 2 (see ``bubble`` for fewer); none on one rank.
    - activations: every rank holds at most p + 2 micro-batches over one stage (p + 1 if p is odd),
      which is half as many over a rank's layers; what a weight gradient still reads is counted as
      a whole one.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(VHalf().order(num_ranks=4, num_microbatches=4)))
        4 ranks, 8 stages, 4 micro-batches, 31 time units, bubble 22.6%, peak activations 6
                0           4           8           12          16          20          24          28
        rank 0  F0 F1 F2 .  .  .  .  f0 i0 F3 w0 f1 i1 w1 .  f2 i2 I0 w2 W0 .  f3 i3 I1 w3 W1 .  I2 W2 I3 W3
        rank 1  .  F0 F1 .  .  .  f0 F2 .  i0 f1 F3 w0 i1 f2 w1 I0 i2 W0 w2 f3 .  I1 i3 W1 w3 I2 W2 I3 W3 .
        rank 2  .  .  F0 F1 .  f0 .  .  F2 f1 i0 w0 F3 f2 i1 I0 w1 W0 .  f3 i2 I1 w2 W1 i3 I2 w3 I3 W2 W3 .
        rank 3  .  .  .  F0 f0 F1 f1 .  .  F2 .  i0 f2 I0 w0 F3 i1 W0 f3 I1 w1 i2 I2 W1 w2 i3 I3 W2 w3 W3 .
        F forward  I input gradient  W weight gradient  . idle  numbers: micro-batches  lower case: every second stage

    Reference:
        Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv 2405.15362,
        section 3. Its "B" is our ``I``. The paper gives the memory as p / 2 micro-batches over a
        rank's layers, up to a constant, and the bubble as about half of 1F1B's; the exact numbers
        above are this order's, which is not the paper's in every cell: weight gradients are placed
        by one rule (``v_shape.fill_weights``).
    """

    @property
    def name(self) -> str:
        """``vhalf``."""
        return "vhalf"

    def num_stages(self, num_ranks: int) -> int:
        """Two stages per rank."""
        return 2 * num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        plan = repeat_way(num_ranks, num_microbatches, (1, 2, 1, 2), _turns(num_ranks))
        return fill_weights(plan, _limit(num_ranks))

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step, F = I = W. Exact for any m.

        A lone micro-batch takes 4 p + 1 units: forward, back, one weight gradient. While there are
        few, each further one adds 4.
        """
        check_sizes(num_ranks, num_microbatches)
        p, m = num_ranks, num_microbatches
        idle = 0 if p == 1 else 3 * p - 5 + p % 2
        return 1 - Fraction(6 * m, max(6 * m + idle, 4 * m + 4 * p - 3))

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once."""
        check_sizes(num_ranks, num_microbatches)
        return (min(_limit(num_ranks), 2 * num_microbatches),) * num_ranks


def _limit(num_ranks: int) -> int:
    return 2 * (num_ranks // 2 + 1)


def _turns(num_ranks: int) -> tuple[int, int, int]:
    """Waits at the turns, such that no rank has two tasks in the same of the six slots."""
    if num_ranks % 2:
        return (1, 1, 2)
    return (3, 1, 4) if num_ranks > 2 else (3, 3, 4)
