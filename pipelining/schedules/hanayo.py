"""Hanayo's waves: down the ranks and up again, several times over."""

from dataclasses import dataclass
from fractions import Fraction

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.schedules.schedule import (
    check_repeat,
    check_sizes,
    round_sizes,
    v_placement,
)

_STEP = 3
_INTERVAL = 6


@dataclass(frozen=True, slots=True)
class HanayoWaves:
    """1F1B over waves: each goes down the ranks and up again, so it turns without a transfer.

    Stages 0 to p - 1 go down the ranks, p to 2 p - 1 up, and so on, ``waves`` times. Micro-batches
    go in rounds of about p, and a round takes one wave after another, as in ``Interleaved1F1B``.
    Within a wave, each forward starts three units after the one before it, each backward too, and a
    new micro-batch enters every six units, as many as a rank works for it; this gives the sequence
    of a rank's tasks, which then run as soon as they can. With p ranks, m micro-batches, w waves,
    rounds of at most g (and at least p) micro-batches, and a forward of one unit, a backward of
    two:

    - bubble: 4 (p - 1) units on each rank, in a step of 6 m w + 4 (p - 1), if m >= p (see
      ``bubble`` for fewer). A task takes 1 / (2 w) of its time on an uncut rank, so more waves make
      the bubble as many times smaller.
    - activations: every rank holds at most 2 (w - 1) g + 2 p + 1 micro-batches over one stage.

    Args:
        waves: times down and up, 1 or more; a rank holds twice as many stages.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(HanayoWaves(waves=1).order(num_ranks=3, num_microbatches=4)))
        3 ranks, 6 stages, 4 micro-batches, 32 time units, bubble 25.0%, peak activations 7
                0           4           8           12          16          20          24          28          32
        rank 0  F0 F1 F2 .  .  f0 F3 b0--- f1 b1--- f2 b2--- f3 .  .  B0--- b3--- B1--- .  .  B2--- .  .  B3---
        rank 1  .  F0 F1 .  f0 F2 f1 F3 .  b0--- f2 b1--- f3 .  B0--- b2--- B1--- b3--- B2--- .  .  B3--- .  .
        rank 2  .  .  F0 f0 F1 f1 F2 f2 F3 .  .  b0--- f3 B0--- b1--- B1--- b2--- B2--- b3--- B3--- .  .  .  .
        F forward  B backward  . idle  numbers: micro-batches  lower case: every second stage

    Reference:
        Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model
        Training Efficiency", SC 2023, arXiv 2308.15762, section 3. The paper draws steps of p
        micro-batches; placement, waves and their sequence are its, the rule above that orders
        tasks for any m, and the bubble and memory that follow, are ours.
    """

    waves: int = 1

    def __post_init__(self) -> None:
        check_repeat(self.waves, "waves")

    @property
    def name(self) -> str:
        """``hanayo:2`` for two waves."""
        return f"hanayo:{self.waves}"

    def num_stages(self, num_ranks: int) -> int:
        """Two stages per rank and wave."""
        return 2 * num_ranks * self.waves

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        check_sizes(num_ranks, num_microbatches)
        placement = v_placement(num_ranks, self.waves)
        ranks: list[list[tuple[int, bool, Action]]] = [[] for _ in range(num_ranks)]
        for microbatch, slots in enumerate(self._slots(num_ranks, num_microbatches)):
            for stage, rank in enumerate(placement):
                ranks[rank] += self._tasks(stage, microbatch, slots, num_ranks)
        actions = tuple(tuple(action for _, _, action in sorted(rank)) for rank in ranks)
        return Order(actions, placement, num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step, if a backward takes two forwards. Exact for any m.

        For fewer micro-batches than ranks the longest path counts: 2 p w stages forward and back
        for one micro-batch, 4 units more for each further one.
        """
        check_sizes(num_ranks, num_microbatches)
        p, m, w = num_ranks, num_microbatches, self.waves
        units = max(6 * m * w + 4 * (p - 1), 6 * p * w + 4 * (m - 1))
        return 1 - Fraction(6 * m * w, units)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once."""
        check_sizes(num_ranks, num_microbatches)
        largest = max(num_ranks, round_sizes(num_ranks, num_microbatches)[0])
        bound = 2 * (self.waves - 1) * largest + 2 * num_ranks + 1
        return (min(bound, 2 * self.waves * num_microbatches),) * num_ranks

    def _slots(self, num_ranks: int, num_microbatches: int) -> list[tuple[tuple[int, int], ...]]:
        """For each micro-batch and wave, the intervals in which forward and backward enter it."""
        slots = []
        start = 0
        sizes = [max(size, num_ranks) for size in round_sizes(num_ranks, num_microbatches)]
        for size in sizes:
            for place in range(size):
                entries = [start + wave * size + place for wave in range(self.waves)]
                behind = (self.waves - 1) * sizes[0]
                slots.append(
                    tuple(
                        (forward, backward + behind)
                        for forward, backward in zip(entries, reversed(entries), strict=True)
                    )
                )
            start += self.waves * size
        return slots[:num_microbatches]

    def _tasks(
        self, stage: int, microbatch: int, slots: tuple[tuple[int, int], ...], num_ranks: int
    ) -> list[tuple[int, bool, Action]]:
        wave, place = divmod(stage, 2 * num_ranks)
        forward, backward = (_INTERVAL * slot for slot in slots[wave])
        way_back = 4 * num_ranks - 1 - place
        return [
            (forward + _STEP * place, False, Action(stage, Kind.F, microbatch)),
            (backward + _STEP * way_back, True, Action(stage, Kind.B, microbatch)),
        ]
