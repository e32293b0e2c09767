"""What a schedule says: tasks, and the order in which each rank runs its own.

An ``Action`` is one task: a kind of work, on one virtual stage, for one micro-batch. An ``Order``
is a list of actions for every rank. It is data: it prints as text that parses back to the same
value, as ``torch.distributed.pipelining`` does for its ``_Action`` ("2F0": stage 2, forward,
micro-batch 0).

In come the lists that a schedule or a user wrote, out go these values and the data dependencies
between them. An order holds no times, no sends and no receives: those follow from it, in later
passes. Not here: whether an order is legal (orders.py), how long it takes (timeline.py), how it
looks (drawing.py), how one is made (schedules/).
"""

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

_ACTION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_HEADER = re.compile(r"([0-9]+) micro-batch(?:es)?, stages on ranks((?: [0-9]+)*)")
_RANK = re.compile(r"rank ([0-9]+):(.*)")
_EMPTY_CELL = "."


class Kind(enum.StrEnum):
    """Kind of work, in PyTorch's letters. The zero-bubble paper says "B" for our ``I``."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: input and weight gradients together."""
    I = "I"  # noqa: E741
    """Input gradient: what the stage before waits for."""
    W = "W"
    """Weight gradient: what only the optimizer waits for."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One task: ``kind`` of work on virtual stage ``stage`` for micro-batch ``microbatch``.

    Actions sort by stage, letter and micro-batch: a stable order for printing sets, with no meaning
    in time.

    Example:
        >>> print(Action(2, Kind.F, 0))
        2F0
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(
                f"expected stage and micro-batch from 0, got {self.stage} and {self.microbatch}"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Read what ``str(action)`` wrote.

    Args:
        text: stage, kind letter and micro-batch, as "2F0".

    Returns:
        The action.

    Raises:
        ValueError: the text is something else.

    Example:
        >>> parse_action("2F0") == Action(2, Kind.F, 0)
        True
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"expected an action as '2F0' (stage, one of F B I W, micro-batch), got {text!r:.60}"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), Kind(kind), int(microbatch))


@dataclass(frozen=True, slots=True)
class Order:
    """The tasks of one step: for each rank, the list of actions that it runs, first to last.

    Nothing is promised about legality: ``orders.validate_order`` proves it.

    Args:
        actions: one tuple of actions per rank.
        placement: ``placement[stage]`` is the rank that runs the virtual stage.
        num_microbatches: micro-batches in the step.

    Example:
        >>> print(parse_order('''
        ...     2 micro-batches, stages on ranks 0 1
        ...     rank 0: 0F0 0F1 0B0 0B1
        ...     rank 1: 1F0 1B0 1F1 1B1
        ... '''))
        2 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """

    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks: one actor each."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Virtual stages: several per rank where a schedule interleaves."""
        return len(self.placement)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into an input-gradient and a weight-gradient task."""
        return any(action.kind is Kind.W for actions in self.actions for action in actions)

    def __str__(self) -> str:
        plural = "" if self.num_microbatches == 1 else "es"
        stages = "".join(f" {rank}" for rank in self.placement)
        header = f"{self.num_microbatches} micro-batch{plural}, stages on ranks{stages}"
        cells = [[str(action) for action in actions] for actions in self.actions]
        width = max((len(cell) for row in cells for cell in row), default=0)
        lines = [
            f"rank {rank}: {' '.join(cell.ljust(width) for cell in row)}".rstrip()
            for rank, row in enumerate(cells)
        ]
        return "\n".join([header, *lines])


def parse_order(text: str) -> Order:
    """Read what ``str(order)`` wrote; blank lines, indentation and empty cells (``.``) are ignored.

    Args:
        text: a header line, then one line per rank (see ``Order``).

    Returns:
        The order, legal or not.

    Raises:
        ValueError: a line or a cell is something else, or a rank is missing or out of turn.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None:
        got = lines[0] if lines else ""
        raise ValueError(
            f"expected a first line as '8 micro-batches, stages on ranks 0 1 2 3', got {got!r:.60}"
        )
    placement = tuple(int(rank) for rank in header.group(2).split())
    actions = tuple(_parse_rank(line, rank) for rank, line in enumerate(lines[1:]))
    return Order(actions, placement, int(header.group(1)))


def _parse_rank(line: str, rank: int) -> tuple[Action, ...]:
    match = _RANK.fullmatch(line)
    if match is None or int(match.group(1)) != rank:
        raise ValueError(f"expected a line as 'rank {rank}: 0F0 0F1 0B0', got {line!r}")
    try:
        return tuple(parse_action(cell) for cell in match.group(2).split() if cell != _EMPTY_CELL)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None


def dependencies(action: Action, num_stages: int, splits: bool) -> tuple[Action, ...]:
    """The tasks whose results ``action`` reads, and that must therefore have run before it.

    Forward reads the stage before, backward reads its own forward and the stage after, and a weight
    gradient reads its own input gradient.

    Args:
        action: the task that reads.
        num_stages: virtual stages in the pipeline.
        splits: whether the stage *after* splits its backward for this micro-batch, so that its
            cotangent comes from an ``I`` and not from a ``B``. An order may mix both:
            ``dependency_map`` looks it up for every task.

    Returns:
        None, one or two actions.

    Example:
        >>> print(*dependencies(parse_action("1B0"), num_stages=4, splits=False))
        1F0 2B0
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.F:
        return (Action(stage - 1, Kind.F, microbatch),) if stage else ()
    if kind is Kind.W:
        return (Action(stage, Kind.I, microbatch),)
    forward = Action(stage, Kind.F, microbatch)
    if stage + 1 >= num_stages:
        return (forward,)
    return (forward, Action(stage + 1, Kind.I if splits else Kind.B, microbatch))


def dependency_map(order: Order) -> dict[Action, tuple[Action, ...]]:
    """``dependencies`` of every action, each by how the stage after it splits its own backward."""
    split = {
        (a.stage, a.microbatch) for actions in order.actions for a in actions if a.kind is Kind.I
    }
    return {
        action: dependencies(
            action, order.num_stages, (action.stage + 1, action.microbatch) in split
        )
        for actions in order.actions
        for action in actions
    }


def run_order(
    order: Order, needs: dict[Action, tuple[Action, ...]]
) -> Iterator[tuple[int, Action]]:
    """Walk every rank's list as far as it goes, each task after those it needs; takes linear time.

    Args:
        order: the lists, legal or not.
        needs: their ``dependency_map``.

    Yields:
        ``(rank, action)`` in one order that respects lists and dependencies. Stops early where all
        ranks are stuck: an order is free of cycles exactly if every action comes out.
    """
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    position = [0] * order.num_ranks
    ready = list(reversed(range(order.num_ranks)))
    while ready:
        rank = ready.pop()
        actions = order.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((needed for needed in needs[action] if needed not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action
            position[rank] += 1
            done.add(action)
            ready += waiting.pop(action, ())
