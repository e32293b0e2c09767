"""Schedules written down by hand or by another tool: a grid of tasks, one row per rank.

In comes text, our own (``str(order)``) or the CSV of ``torch.distributed.pipelining``, out goes an
``Order``, and back; ``GridSchedule`` makes a schedule of one. Not here: whether the order is legal
(orders.py), and schedules that are written as functions (generated.py).

The CSV has a line per rank and a cell per step in time: a task as ``2F0`` (stage, letter,
micro-batch; ``B`` is a whole backward, ``I`` and ``W`` its two parts), or nothing where the rank
idles. What PyTorch writes of communication (``SEND_F``, ``RECV_B``, ``UNSHARD`` and so on) is
skipped, for here it is inferred; a pair that it overlaps, as ``(3F4;2B1)OVERLAP_F_B``, is read as
its two tasks in that order.
"""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path

from stagewright.pipelining.actions import Action, Order, parse_action, parse_order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.timeline import simulate_order

_COMMUNICATION = re.compile(
    r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*"
)
_OVERLAPPED = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def read_csv(text: str) -> Order:
    r"""Read a schedule from PyTorch's CSV.

    Which rank holds a stage, and how many stages and micro-batches there are, is read off the
    tasks.

    Args:
        text: one line per rank.

    Returns:
        The order, legal or not.

    Raises:
        ValueError: a cell is something else (its line and column are named), there is no task, or
            two ranks have tasks of one stage.

    Example:
        >>> print(read_csv("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,"))
        2 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    actions = tuple(
        tuple(
            action
            for column, cell in enumerate(row, start=1)
            for action in _parse_cell(cell.strip(), line, column)
        )
        for line, row in enumerate(rows, start=1)
    )
    return Order(actions, _placement(actions), _count(actions))


def write_csv(order: Order) -> str:
    """Write an order as PyTorch's CSV: each task in the column of its start in unit time.

    An order that cannot run is written without idle cells.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> print(write_csv(OneFOneB().order(2, 2)), end="")
        0F0,0F1,,,0B0,,,0B1,
        ,1F0,1B0,,1F1,1B1,,,
    """
    try:
        timeline = simulate_order(order)
    except ScheduleError:
        return _to_text([[str(action) for action in actions] for actions in order.actions])
    length = int(timeline.makespan)
    cells = [[""] * length for _ in range(order.num_ranks)]
    for span in timeline.spans:
        cells[span.rank][int(span.start)] = str(span.action)
    return _to_text(cells)


def _to_text(cells: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(cells)
    return out.getvalue()


def _parse_cell(cell: str, line: int, column: int) -> list[Action]:
    if not cell or _COMMUNICATION.fullmatch(cell):
        return []
    pair = _OVERLAPPED.fullmatch(cell)
    try:
        return [parse_action(part.strip()) for part in (pair.groups() if pair else (cell,))]
    except ValueError as error:
        raise ValueError(f"line {line} (rank {line - 1}), column {column}: {error}") from None


def _placement(actions: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    homes: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if homes.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} has tasks on rank {homes[action.stage]} and, with "
                    f"{action}, on rank {rank}; a stage lives on one rank"
                )
    if not homes:
        raise ValueError("expected tasks as 0F0, one line per rank, got none")
    missing = next((stage for stage in range(len(homes)) if stage not in homes), None)
    if missing is not None:
        raise ValueError(f"there are tasks of stage {max(homes)}, but none of stage {missing}")
    return tuple(homes[stage] for stage in range(len(homes)))


def _count(actions: tuple[tuple[Action, ...], ...]) -> int:
    return 1 + max(action.microbatch for row in actions for action in row)


def read_order(text: str) -> Order:
    """Read an order from either form: ours begins with a line as ``8 micro-batches, ...``.

    Raises:
        ValueError: the text is neither.
    """
    first = next((line for line in text.splitlines() if line.strip()), "")
    return parse_order(text) if "micro-batch" in first else read_csv(text)


@dataclass(frozen=True, slots=True)
class GridSchedule:
    r"""A schedule that is one order: for its own number of ranks and micro-batches only.

    Args:
        grid: the order.
        name: short name for logs.

    Example:
        >>> schedule = GridSchedule(read_csv("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,"))
        >>> schedule.num_stages(2)
        2
    """

    grid: Order
    name: str = "grid"

    @classmethod
    def from_file(cls, path: str | Path) -> "GridSchedule":
        """Read a file in either form; the name is ``csv:`` and the path.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else; the file is named.
        """
        try:
            return cls(read_order(Path(path).read_text(encoding="utf-8")), f"csv:{path}")
        except ValueError as error:
            raise ValueError(f"{path} is no schedule: {error}") from None

    def num_stages(self, num_ranks: int) -> int:
        """The stages of the grid.

        Raises:
            ScheduleError: the grid has another number of ranks.
        """
        self._check(num_ranks, self.grid.num_microbatches)
        return self.grid.num_stages

    def order(self, num_ranks: int, num_microbatches: int) -> Order:
        """The grid itself; see ``Schedule.order``."""
        self._check(num_ranks, num_microbatches)
        return self.grid

    def _check(self, num_ranks: int, num_microbatches: int) -> None:
        own = (self.grid.num_ranks, self.grid.num_microbatches)
        if (num_ranks, num_microbatches) != own:
            raise ScheduleError(
                f"the schedule {self.name!r} is written for {own[0]} ranks and {own[1]} "
                f"micro-batches, got {num_ranks} ranks and {num_microbatches} micro-batches; use "
                "its numbers, or a schedule by name"
            )
