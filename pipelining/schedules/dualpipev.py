"""DualPipeV: DeepSeek's two-way pipeline cut in half, so that a V runs both ways."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.schedules.schedule import check_sizes, v_placement


@dataclass(frozen=True, slots=True)
class DualPipeV:
    """A V of two stages per rank: a forward on one stage beside a backward on the other.

    In the steady state a rank runs, in turn, a forward of its first stage with a backward of its
    second, and a forward of its second with a backward of its first. The two tasks of a pair have
    nothing to do with each other, so the original overlaps one's communication (of experts) with
    the other's computation, as one task that costs F&B. Here they are two tasks, one after the
    other: an order says nothing about overlap, and what does not wait for its partner is sent
    earlier. Backwards are split into ``I`` and ``W`` only around the steady state, where that helps
    the neighbours. With p ranks, m >= 2 p micro-batches, and F = I = W of one unit each:

    - bubble: p - 1 units on each rank, in a step of 6 m + p - 1: the least that a V can have, for
      the last rank starts p - 1 late.
    - activations: every rank holds at most 2 p + 1 micro-batches over one stage, which is
      p + 1/2 over a rank's layers.

    Example:
        >>> from stagewright.pipelining.drawing import draw_order
        >>> print(draw_order(DualPipeV().order(num_ranks=2, num_microbatches=4), width=92))
        2 ranks, 4 stages, 4 micro-batches, 25 time units, bubble 4.0%, peak activations 5
                0           4           8           12          16          20          24
        rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1--- f2 B0--- b2--- f3 .  B1--- b3--- I2 W2 I3 W3
        rank 1  .  F0 f0 F1 f1 F2 b0--- f2 B0--- F3 b1--- f3 B1--- b2--- B2--- i3 I3 w3 W3
        F forward  B backward  I input gradient  W weight gradient  . idle  numbers: micro-batches
        lower case: every second stage

    Reference:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1 (DualPipe);
        the "cut-in-half" is from github.com/deepseek-ai/DualPipe, whose table gives a bubble of
        (p - 1) (F&B + B - 3 W) for p ranks, B being our I + W: 2 (p - 1) units if F&B = F + B. That
        is with pairs as one task each, whose results leave when both are done; as two tasks, half
        of it goes.
    """

    @property
    def name(self) -> str:
        """``dualpipev``."""
        return "dualpipev"

    def num_stages(self, num_ranks: int) -> int:
        """Two stages per rank."""
        return 2 * num_ranks

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """See ``Schedule.order``."""
        _check_sizes(num_ranks, num_microbatches)
        ranks = tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
        return Order(ranks, v_placement(num_ranks), num_microbatches)

    def bubble(self, num_ranks: int, num_microbatches: int) -> Fraction:
        """Idle share of the step, F = I = W: (p - 1) / (6 m + p - 1). Exact for any m >= 2 p."""
        _check_sizes(num_ranks, num_microbatches)
        return Fraction(num_ranks - 1, 6 * num_microbatches + num_ranks - 1)

    def max_activations(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Most micro-batches, over one stage, that each rank holds at once: 2 p + 1."""
        _check_sizes(num_ranks, num_microbatches)
        return (2 * num_ranks + 1,) * num_ranks


def _check_sizes(num_ranks: int, num_microbatches: int) -> None:
    check_sizes(num_ranks, num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            "dualpipev needs at least 2 micro-batches per rank, "
            f"got {num_ranks} ranks and {num_microbatches} micro-batches; "
            f"use {2 * num_ranks} micro-batches or more, or zbv, which takes any number"
        )


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Warm-up, steady state and cool-down; the rank's first stage is 0, its second is 1."""
    below = num_ranks - rank - 1
    steady = num_microbatches - 2 * num_ranks + rank + 1
    # The later half of these backwards put their weight gradients off.
    turning = [("I" if turn > rank else "B") + "10"[turn % 2] for turn in range(2 * (rank + 1))]
    words = [
        *["F0"] * (2 * below),
        *["F0", "F1"] * (rank + 1),
        *["I1", "W", "F1"] * below,
        *["F0", "B1", "F1", "B0"] * steady,
        *["B1", "F1", "B0"] * below,
        *turning,
        *["W", "I0"] * below,
        *["W"] * (rank + 1),
    ]
    return tuple(_number(words, (rank, 2 * num_ranks - 1 - rank)))


def _number(words: list[str], stages: tuple[int, int]) -> Iterator[Action]:
    """Each stage's forwards and backwards take micro-batches in turn; ``W`` is the longest owed."""
    next_one: Counter[tuple[int, bool]] = Counter()
    owed: deque[Action] = deque()
    for word in words:
        if word == "W":
            yield owed.popleft()
            continue
        kind, stage = Kind(word[0]), stages[int(word[1])]
        key = (stage, kind is Kind.F)
        action = Action(stage, kind, next_one[key])
        next_one[key] += 1
        if kind is Kind.I:
            owed.append(replace(action, kind=Kind.W))
        yield action
