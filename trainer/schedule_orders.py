"""Orders for `stagewright schedule`: by a schedule's name or out of a file.

In: what the command line calls a schedule.  Out: its order, checked, with a title; its timeline; or
`CommandError` with the message to print and the exit code.
"""

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from stagewright.pipelining.actions import Order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.schedules.grid import read_order
from stagewright.pipelining.schedules.names import by_name
from stagewright.pipelining.schedules.schedule import Schedule
from stagewright.pipelining.timeline import Costs, Timeline, simulate_order
from stagewright.trainer.schedule_arguments import COST_FIELDS, CommandError

RANKS, MICROBATCHES = 4, 8
"""Sizes where the command line gives none."""

_FILE = "csv:"  # how a recipe writes that a file holds its schedule
_SUFFIXES = (".csv", ".txt")


@dataclass(frozen=True, slots=True)
class NamedOrder:
    """An order and what to call it."""

    title: str
    order: Order


def load(words: Sequence[str], ranks: int | None, microbatches: int | None) -> list[NamedOrder]:
    """The orders of one step size that words mean: names of schedules, or files.

    Args:
      words: one or more.
      ranks: of named schedules; None where not given.
      microbatches: likewise.

    Raises:
      CommandError: a word means nothing, a file is illegal, or sizes contradict each other.
    """
    files = {word: read(word) for word in words if _is_file(word)}
    for named in files.values():
        validate(named)
    sizes = {(named.order.num_ranks, named.order.num_microbatches) for named in files.values()}
    if files and (ranks or microbatches):
        raise CommandError(
            f"{next(iter(files))} says how many ranks and micro-batches there are: "
            "leave --ranks and --microbatches out"
        )
    if len(sizes) > 1:
        raise CommandError(f"the files differ in ranks or micro-batches: {sorted(sizes)}")
    size = next(iter(sizes), (ranks or RANKS, microbatches or MICROBATCHES))
    return [files.get(word) or make(word, *size) for word in words]


def _is_file(word: str) -> bool:
    """Whether a word means a file: names of schedules come first."""
    if word.startswith(_FILE):
        return True
    try:
        by_name(word)
    except ValueError:
        return Path(word).suffix in _SUFFIXES or Path(word).is_file() or "/" in word
    return False


def make(name: str, ranks: int, microbatches: int) -> NamedOrder:
    """The order of a named schedule.

    Raises:
      CommandError: there is no such schedule, or not for these sizes.
    """
    schedule = find(name)
    try:
        return NamedOrder(schedule.name, schedule.order(ranks, microbatches))
    except ScheduleError as error:
        raise CommandError(str(error)) from None


def find(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
      CommandError: there is none; the message gives the nearest.
    """
    try:
        return by_name(name)
    except (OSError, ValueError) as error:  # `csv:PATH` reads a file
        raise CommandError(str(error)) from None


def read(path: str) -> NamedOrder:
    """The order in a file, legal or not.

    Args:
      path: of a CSV grid, or of text as orders print; `csv:` may stand before it.

    Raises:
      CommandError: the file cannot be read, or holds something else (exit code 1).
    """
    path = path.removeprefix(_FILE)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # spreadsheets write a mark first
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"cannot read {path}: it is not UTF-8 text") from None
    try:
        return NamedOrder(Path(path).name, read_order(text))
    except (ValueError, csv.Error) as error:
        raise CommandError(f"{path} is not an order: {error}", code=1) from None


def validate(named: NamedOrder) -> None:
    """Prove an order legal.

    Raises:
      CommandError: it is not (exit code 1).
    """
    try:
        validate_order(named.order)
    except ScheduleError as error:
        raise CommandError(f"{named.title} is not legal: {error}", code=1) from None


def simulate(named: NamedOrder, costs: Costs, *, per_rank: bool) -> Timeline:
    """The order against a clock.

    Args:
      named: a legal order.
      costs: durations of each stage's tasks.
      per_rank: the costs are those of all of a rank's layers, and each of its stages takes its
        share, so that schedules with one and with several stages per rank compare.

    Raises:
      CommandError: costs are given for another number of stages.
    """
    order = named.order
    share = Fraction(order.num_ranks, order.num_stages) if per_rank else 1
    shared: dict[str, Any] = {}
    for kind, field in COST_FIELDS.items():
        cost = getattr(costs, field)
        if isinstance(cost, tuple) and len(cost) != order.num_stages:
            raise CommandError(
                f"--costs gives {kind} for {len(cost)} stages, "
                f"but {named.title} has {order.num_stages}"
            )
        shared[field] = cost if isinstance(cost, tuple) else cost * share
    return simulate_order(order, dataclasses.replace(costs, **shared))
