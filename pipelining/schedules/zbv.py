"""ZB-V: no bubble between a rank's first task and its last, within 1F1B's memory."""

from dataclasses import dataclass, replace
from fractions import Fraction

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.schedules.schedule import check_sizes
from stagewright.pipelining.schedules.v_shape import fill_weights, repeat_way


@dataclass(frozen=True, slots=True)
class ZBV:
    """A V of two stages per rank: what ZB-H2 reaches with twice 1F1B's memory, it reaches with 1F1B's.

    Each task of a micro-batch starts three units after the one before it, on the next rank: three
    down, three up, for gradients as for forwards. Rank r warms up with as many forwards as fit
    until its first input gradient, and puts weight gradients where it would wait. It starts r units
    late and never waits from then on (``Timeline.holes``): steps that follow each other without a
    barrier lose nothing. With p ranks, m micro-batches, and tasks of one unit each:

    - bubble: no holes if m >= 2 p - 1; with a barrier p - 1 units on each rank, in a step of
      6 m + p - 1, if m >= p (see ``bubble`` for fewer).
    - activations: every rank holds at most min(2 p, 2 m) micro-batches over one stage, which is
      min(p, m) over a rank's layers, as 1F1B's first rank; what a weight gradient still reads is
      counted as a whole one.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(ZBV().order(num_ranks=3, num_microbatches=5)))
        3 ranks, 6 stages, 5 micro-batches, 32 time units, bubble 6.2%, peak activations 6
                0           4           8           12          16          20          24          28          32
        rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 I0 w2 W0 f3 i3 I1 w3 W1 f4 i4 I2 w4 I3 W2 I4 W3 W4 .  .
        rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 I0 w1 F4 W0 f3 i2 I1 w2 W1 f4 i3 I2 i4 I3 w3 I4 W2 w4 W3 W4 .
        rank 2  .  .  F0 f0 F1 f1 F2 f2 i0 I0 w0 F3 W0 f3 i1 I1 w1 F4 W1 f4 i2 I2 i3 I3 i4 I4 w2 W2 w3 W3 w4 W4
        F forward  I input gradient  W weight gradient  . idle  numbers: micro-batches  lower case: every second stage

    Reference:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 6; as
        "V-ZB" in Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024,
        arXiv 2405.15362. Their "B" is our ``I``. They search for an order by heuristics; here one
        rule gives it for every p and m.
    """

    @property
    def name(self) -> str:
        """``zbv``."""
        return "zbv"

    def num_stages(self, num_ranks: int) -> int:
        """Two stages per rank."""
        return 2 * num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        plan = repeat_way(num_ranks, num_microbatches, steps=(3, 3, 3, 3))
        return fill_weights(_warmed_up(plan), limit=2 * num_ranks)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of a step that ends in a barrier, F = I = W. Exact for any m.

        The longest of three paths counts. The last rank starts p - 1 late and has 6 m units of
        work: m >= p. A lone micro-batch takes 4 p + 1 units (forward, back, one weight gradient)
        and each further one adds 2: m <= p / 2. Between the two, each adds 4.
        """
        check_sizes(num_ranks, num_microbatches)
        p, m = num_ranks, num_microbatches
        units = max(6 * m + p - 1, 4 * m + 3 * p - 1, 2 * m + 4 * p - 1)
        return 1 - Fraction(6 * m, units)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once: min(2 p, 2 m)."""
        check_sizes(num_ranks, num_microbatches)
        return (2 * min(num_ranks, num_microbatches),) * num_ranks


def _warmed_up(plan: Order) -> Order:
    """Start each rank with the forwards that keep it busy until its first input gradient."""
    ranks = []
    for rank, actions in enumerate(plan.actions):
        first = _warmup(rank, plan.num_ranks, plan.num_microbatches)
        ranks.append((*first, *(action for action in actions if action not in first)))
    return replace(plan, actions=tuple(ranks))


def _warmup(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """The first stage alone while nothing comes back up, then the first and the second in turn."""
    alone = 2 * (num_ranks - rank - 1)
    actions = [Action(rank, Kind.F, microbatch) for microbatch in range(alone)]
    for turn in range(rank + 1):
        actions.append(Action(rank, Kind.F, alone + turn))
        actions.append(Action(2 * num_ranks - 1 - rank, Kind.F, turn))
    return tuple(action for action in actions if action.microbatch < num_microbatches)
