"""What a schedule is, and the few pieces that several schedules share.

In come a number of ranks and of micro-batches, out goes an ``Order``. A schedule decides order and
placement, and nothing else: sends, receives, frees and what is computed where follow from its
order. To write your own, give a class the three members of ``Schedule``; there is nothing to
register or inherit. Not here: the schedules themselves, one file each beside this one, and the
proof that an order is legal (pipelining/orders.py).
"""

import itertools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.errors import ScheduleError


@runtime_checkable
class Schedule(Protocol):
    """Decides in which order each rank runs its tasks, and which rank holds which virtual stage.

    ``order`` must give the same answer whenever it is asked with the same numbers.
    """

    @property
    def name(self) -> str:
        """Short name, as the command line and the logs write it."""
        ...

    def num_stages(self, num_ranks: int) -> int:
        """Virtual stages that the model is cut into for a pipeline of ``num_ranks`` ranks."""
        ...

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """The tasks of each rank, first to last.

        Raises:
            ScheduleError: the schedule does not exist for these numbers; the message says both.
        """
        ...


def check_schedule(schedule: object) -> None:
    """Refuse what is no schedule, and say what it lacks.

    Raises:
        ValueError: it is a class, a name, or lacks a member of the protocol.
    """
    fix = "pass a schedule such as OneFOneB(), or by_name('1f1b')"
    if isinstance(schedule, type):
        raise ValueError(
            f"schedule must be made, got the class {schedule.__name__}; write {schedule.__name__}()"
        )
    if isinstance(schedule, str):
        raise ValueError(f"schedule must be a Schedule, got the text {schedule!r}; {fix}")
    missing = [name for name in ("name", "num_stages", "order") if not hasattr(schedule, name)]
    if missing:
        raise ValueError(
            f"schedule must have name, num_stages(num_ranks) and order(num_ranks, num_microbatches), "
            f"got a {type(schedule).__name__} without {' and '.join(missing)}; {fix}"
        )


def check_sizes(num_ranks: int, num_microbatches: int) -> None:
    """Refuse a pipeline without ranks or a step without micro-batches."""
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            "expected at least 1 rank and 1 micro-batch, "
            f"got {num_ranks} ranks and {num_microbatches} micro-batches"
        )


def check_repeat(repeat: int, unit: str = "stages") -> None:
    """Refuse a schedule without stages."""
    if repeat < 1:
        raise ValueError(f"expected repeat of 1 or more {unit} per rank, got {repeat}")


def looped_placement(num_ranks: int, repeat: int = 1) -> tuple[int, ...]:
    """Stage ``s`` on rank ``s % num_ranks``: the pipeline goes round the ranks ``repeat`` times."""
    return tuple(range(num_ranks)) * repeat


def v_placement(num_ranks: int, waves: int = 1) -> tuple[int, ...]:
    """Down the ranks and up again, ``waves`` times: each wave gives a rank two stages."""
    return (*range(num_ranks), *reversed(range(num_ranks))) * waves


def round_sizes(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Micro-batches in rounds that differ by at most one, none smaller than ``num_ranks`` if m is not."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, num_rounds)
    return (size + 1,) * larger + (size,) * (num_rounds - larger)


def rounds(num_ranks: int, num_microbatches: int) -> tuple[range, ...]:
    """The micro-batches of each round, in order; see ``round_sizes``."""
    ends = itertools.accumulate(round_sizes(num_ranks, num_microbatches), initial=0)
    return tuple(itertools.starmap(range, itertools.pairwise(ends)))


def forwards_and_backwards(
    stages: Sequence[int], rounds: Sequence[range]
) -> tuple[list[Action], list[Action]]:
    """One rank's forwards and its whole backwards: each round through all of its stages, then the next."""
    forwards = [Action(stage, Kind.F, mb) for mbs in rounds for stage in stages for mb in mbs]
    backwards = [
        Action(stage, Kind.B, mb) for mbs in rounds for stage in reversed(stages) for mb in mbs
    ]
    return forwards, backwards


def forwards_first(stages: Sequence[int], rounds: Sequence[range]) -> tuple[Action, ...]:
    """One rank's tasks with no backward before the last forward."""
    forwards, backwards = forwards_and_backwards(stages, rounds)
    return (*forwards, *backwards)


def delayed_weights(
    stage: int, num_microbatches: int, num_warmup: int, delay: int
) -> tuple[Action, ...]:
    """One rank's tasks with the backward split: weight gradients put off by ``delay`` micro-batches."""
    actions = [Action(stage, Kind.F, microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches):
        actions.append(Action(stage, Kind.I, microbatch))
        if microbatch >= delay:
            actions.append(Action(stage, Kind.W, microbatch - delay))
        if microbatch + num_warmup < num_microbatches:
            actions.append(Action(stage, Kind.F, microbatch + num_warmup))
    left = range(max(0, num_microbatches - delay), num_microbatches)
    return (*actions, *(Action(stage, Kind.W, microbatch) for microbatch in left))


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """``num_warmup`` forwards, then forward and backward in turn, then the backwards left over."""
    num_steady = len(forwards) - num_warmup
    steady = zip(forwards[num_warmup:], backwards[:num_steady], strict=True)
    return (
        *forwards[:num_warmup],
        *(action for pair in steady for action in pair),
        *backwards[num_steady:],
    )
