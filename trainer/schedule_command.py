"""`stagewright schedule`: draws, compares and checks schedules, without JAX.

In: the words of the command line and what the terminal is like.  Out: text on stdout, files, an
exit code: 0, 1 for an illegal schedule or one beyond a limit, 2 for wrong usage.  Not here: how
words are read (schedule_arguments.py), where orders come from (schedule_orders.py), how pictures
look (stagewright.pipelining.drawing and pictures).
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from stagewright.pipelining.actions import Order
from stagewright.pipelining.drawing import draw_timeline
from stagewright.pipelining.figures import Figures, figures
from stagewright.pipelining.pictures import to_html, to_perfetto, to_svg
from stagewright.pipelining.schedules.grid import write_csv
from stagewright.pipelining.schedules.names import all_names
from stagewright.pipelining.timeline import Costs, Time, Timeline
from stagewright.trainer.schedule_arguments import (
    COST_FIELDS,
    CommandError,
    parse_check,
    parse_drawing,
    to_costs,
)
from stagewright.trainer.schedule_orders import (
    MICROBATCHES,
    RANKS,
    NamedOrder,
    find,
    load,
    make,
    read,
    simulate,
    validate,
)

_TABLE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Screen:
    """Where text goes.

    Attributes:
      width: columns; None for a file or a pipe, which take any.
      color: whether it shows colours.
    """

    width: int | None = None
    color: bool = False


def run_schedule(words: Sequence[str], screen: Screen) -> int:
    """Run `stagewright schedule WORDS`.

    Args:
      words: the words after `schedule`.
      screen: where it prints.

    Returns:
      The exit code.
    """
    try:
        if words and words[0] == "check":
            return _check(parse_check(words[1:]))
        found = parse_drawing(words)
        (_draw if found.compare is None else _compare)(found, screen)
    except CommandError as refused:
        print(f"stagewright: {refused}", file=sys.stderr)
        return refused.code
    return 0


# ---- drawing


def _draw(found: argparse.Namespace, screen: Screen) -> None:
    words = [word for word in (found.schedule, found.versus) if word is not None]
    orders = load(words, found.ranks, found.microbatches)
    costs = to_costs(found)
    timelines = [
        (named.title, simulate(named, costs, per_rank=len(orders) > 1)) for named in orders
    ]
    if len(orders) > 1 and any(named.order.num_stages > named.order.num_ranks for named in orders):
        print("Costs are those of one rank's layers; a stage takes its share of them.\n")
    if found.out:
        for path in found.out:
            _write(path, timelines, orders)
    else:
        _print_pictures(timelines, found, screen)


def _print_pictures(
    timelines: Sequence[tuple[str, Timeline]], found: argparse.Namespace, screen: Screen
) -> None:
    color = screen.color if found.color is None else found.color
    pictures = []
    for title, timeline in timelines:
        picture = draw_timeline(timeline, color=color, width=found.width or screen.width)
        pictures.append(f"{title}\n{picture}" if len(timelines) > 1 else picture)
    print("\n\n".join(pictures))
    if any(line.endswith("…") for picture in pictures for line in picture.splitlines()):
        print("(… the page is too narrow for it all: --out FILE.svg or FILE.html shows the rest)")


def _write(
    path: Path, timelines: Sequence[tuple[str, Timeline]], orders: Sequence[NamedOrder]
) -> None:
    writers: dict[str, Callable[[], str]] = {
        ".svg": lambda: to_svg(timelines[0][1], timelines[0][0], *timelines[1:]),
        ".html": lambda: to_html(timelines),
        ".json": lambda: to_perfetto(timelines),
        ".csv": lambda: write_csv(_only(path, orders)),
        ".txt": lambda: f"{_only(path, orders)}\n",
    }
    try:
        path.write_text(writers[path.suffix](), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}")


def _only(path: Path, orders: Sequence[NamedOrder]) -> Order:
    if len(orders) > 1:
        raise CommandError(f"{path} can hold one schedule: leave --versus out")
    return orders[0].order


# ---- comparing


def _compare(found: argparse.Namespace, screen: Screen) -> None:
    ranks, microbatches = found.ranks or RANKS, found.microbatches or MICROBATCHES
    costs, rows, skipped = to_costs(found), [], []
    for name in _names(found.compare):
        try:
            named = make(name, ranks, microbatches)
            rows.append((named, figures(simulate(named, costs, per_rank=True))))
        except CommandError as refused:
            skipped.append(f"skipped {name}: {refused}")
    if not rows:
        raise CommandError("\n".join(skipped))
    _print_table(rows, f"{ranks} ranks, {microbatches} micro-batches, {_costs_text(costs)}", screen)
    print("\n".join([_UNITS, *skipped]))


_UNITS = """\
holes: the part of the bubble between a rank's own first and last task
activations: the most a rank holds, in micro-batches over one rank's layers
step: in the unit of the costs, which are those of one rank's layers; a stage takes its share"""


def _names(text: str) -> list[str]:
    if text.strip() == "all":
        return list(all_names())
    names = [name.strip() for name in text.split(",")]
    for name in names:
        find(name)
    return names


def _costs_text(costs: Costs) -> str:
    given = [f"{kind}={_text(getattr(costs, field))}" for kind, field in COST_FIELDS.items()]
    return ", ".join([*given, *([f"latency {_text(costs.latency)}"] if costs.latency else [])])


def _text(value: Time | tuple[Time, ...]) -> str:
    return ":".join(
        f"{float(time):g}" for time in (value if isinstance(value, tuple) else (value,))
    )


def _print_table(rows: Sequence[tuple[NamedOrder, Figures]], title: str, screen: Screen) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("schedule", title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("stages/rank", "bubble", "holes", "activations", "transfers", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for named, got in rows:
        order = named.order
        table.add_row(
            named.title,
            f"{order.num_stages / order.num_ranks:g}",
            f"{float(got.bubble):.1%}",
            f"{float(got.holes):.1%}",
            f"{float(got.activations):.4g}",
            str(got.transfers),
            f"{float(got.makespan):g}",
        )
    width = screen.width or _TABLE_WIDTH
    Console(width=width, highlight=False, no_color=not screen.color).print(table)


# ---- checking


def _check(found: argparse.Namespace) -> int:
    named = read(found.file)
    if found.ranks_on is not None:
        named = NamedOrder(named.title, dataclasses.replace(named.order, placement=found.ranks_on))
    validate(named)
    got = figures(simulate(named, to_costs(found), per_rank=False))
    order = named.order
    print(
        f"{named.title} is legal: {order.num_ranks} ranks, {order.num_stages} stages, "
        f"{order.num_microbatches} micro-batches"
    )
    within = [
        _print_figure("bubble", got.bubble, found.max_bubble, "{:.1%}"),
        _print_figure("activations", got.activations, found.max_activations, "{:.4g}"),
        _print_figure("transfers", got.transfers, None, "{:g}"),
        _print_figure("step", got.makespan, None, "{:g}"),
    ]
    return 0 if all(within) else 1


def _print_figure(name: str, value: Time, limit: Time | None, form: str) -> bool:
    """Print a figure and its limit; say whether it is within."""
    within = limit is None or Fraction(value) <= Fraction(limit)
    verdict = "" if limit is None else f"  limit {form.format(float(limit))}"
    print(f"{name:<12}{form.format(float(value)):>8}{verdict}{'' if within else '  EXCEEDED'}")
    return within
