"""The words after `stagewright schedule`, read into values.

In: words.  Out: an `argparse.Namespace` whose values are checked, or `CommandError` with one message.
Not here: files, schedules and what is done with them (schedule_command.py).
"""

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from stagewright.pipelining.timeline import Costs, Time

DRAW_HELP = """\
examples:
  stagewright schedule 1f1b --ranks 4 --microbatches 8
  stagewright schedule 1f1b --versus zbh1 --out both.html
  stagewright schedule --compare all --ranks 8 --microbatches 24
  stagewright schedule check mine.csv --max-bubble 0.1
"""
_LARGEST = 10**12
# What Fraction reads, but for signs, zero denominators and exponents that would fill the memory.
_NUMBER = re.compile(
    r"(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,2})?|\d{1,30}/0*[1-9]\d{0,30}"
)

COST_FIELDS = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
"""The letter of each kind in `--costs`, and its field of `Costs`."""

SUFFIXES = (".svg", ".html", ".json", ".csv", ".txt")
"""What `--out` writes: pictures, a trace, and the order itself as a grid or as text."""


class CommandError(Exception):
    """The command ends with a message and an exit code: 1 illegal schedule, 2 wrong usage."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def parse_drawing(words: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of `stagewright schedule`.

    Raises:
        CommandError: they cannot be read, or contradict each other.
    """
    parser = _Parser(
        "stagewright schedule", "Draw a pipeline schedule, or compare some.", DRAW_HELP
    )
    parser.add_argument("schedule", nargs="?", help="a name, as 1f1b, or a file (.csv, .txt)")
    parser.add_argument("--ranks", type=_count, metavar="P", help="pipeline ranks (default: 4)")
    parser.add_argument(
        "--microbatches", type=_count, metavar="M", help="micro-batches a step (default: 8)"
    )
    _add_costs(parser)
    parser.add_argument("--versus", metavar="NAME", help="a second schedule, beneath the first")
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        type=_out,
        metavar="FILE",
        help="write FILE: .svg or .html for a picture, .json for a trace that ui.perfetto.dev "
        "opens, .csv or .txt for the order; may be given several times",
    )
    parser.add_argument(
        "--compare",
        nargs="?",
        const="all",
        metavar="NAMES",
        help="print a table instead: `all`, or names with commas between",
    )
    parser.add_argument("--width", type=_count, metavar="N", help="columns of the terminal")
    parser.add_argument("--color", action=argparse.BooleanOptionalAction, help="colours or letters")
    found = parser.read(words)
    if found.compare is None and found.schedule is None:
        raise CommandError(
            "which schedule? `stagewright schedule 1f1b` draws one, --compare all lists them"
        )
    if found.compare is not None and (found.schedule or found.versus or found.out):
        raise CommandError(
            "--compare prints a table; it takes no schedule, --versus or --out beside it"
        )
    return found


def parse_check(words: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of `stagewright schedule check`.

    Raises:
        CommandError: they cannot be read.
    """
    about = "Say whether a file's schedule is legal and within limits; exit code 1 if it is not."
    parser = _Parser("stagewright schedule check", about, "")
    parser.add_argument("file", metavar="FILE", help="an order: .csv, or text")
    parser.add_argument(
        "--max-bubble", type=_share, metavar="X", help="idle share at most, as 0.1 or 10%%"
    )
    parser.add_argument(
        "--max-activations",
        type=_amount,
        metavar="N",
        help="activations a rank at most, in micro-batches over one rank's layers",
    )
    parser.add_argument(
        "--ranks-on",
        type=_placement,
        metavar="0,1,..",
        help="the rank that each stage has to be on (default: where the file has it)",
    )
    _add_costs(parser)
    return parser.read(words)


class _Parser(argparse.ArgumentParser):
    """argparse with our messages: the nearest option, no usage lines before it, `CommandError`."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        found, extra = self.parse_known_args(list(words))
        if not extra:
            return found
        option = extra[0].partition("=")[0]
        if not option.startswith("-"):
            self.error(f"there is one schedule too many: {option!r} (--versus draws a second one)")
        near = difflib.get_close_matches(option, list(self._option_string_actions), n=1, cutoff=0.4)
        self.error(f"there is no option {option}." + (f" Did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}\nTry `{self.prog} --help`.")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs",
        type=_costs,
        default={},
        metavar="F=1,I=1,W=1",
        help="durations of forward, input gradient and weight gradient (a whole backward takes "
        "I + W); for each stage its own: F=1:1:2:1",
    )
    parser.add_argument(
        "--latency", type=_amount, default=0, metavar="X", help="of each transfer (default: 0)"
    )


def to_costs(found: argparse.Namespace) -> Costs:
    """The costs that `--costs` and `--latency` give, 1 for each kind that is not named."""
    return Costs(**found.costs, latency=found.latency)


def _costs(text: str) -> dict[str, Time | tuple[Time, ...]]:
    given: dict[str, Time | tuple[Time, ...]] = {}
    for part in text.split(","):
        kind, equals, value = (piece.strip() for piece in part.partition("="))
        if kind == "B":
            raise argparse.ArgumentTypeError("B takes what I and W take together: give I= and W=")
        if kind not in COST_FIELDS or not equals:
            raise argparse.ArgumentTypeError(f"expected F=, I= and W= as F=1,I=1,W=1, got {part!r}")
        if COST_FIELDS[kind] in given:
            raise argparse.ArgumentTypeError(f"{kind} is given twice")
        costs = tuple(_amount(cost) for cost in value.split(":"))
        given[COST_FIELDS[kind]] = costs if len(costs) > 1 else costs[0]
    return given


def _number(text: str, accept: Callable[[Fraction], bool], wanted: str) -> Fraction:
    known = _NUMBER.fullmatch(text.strip()) is not None
    if not known or not accept(value := Fraction(text.strip())):
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
    return value


def _amount(text: str) -> Time:
    """A number from 0, exact; an int where it is whole."""
    value = _number(text, lambda value: 0 <= value <= _LARGEST, "a number from 0, as 1, 0.5 or 1/3")
    return value.numerator if value.denominator == 1 else value


def _share(text: str) -> Fraction:
    percent = text.strip().endswith("%")
    wanted = "a share from 0 to 1, as 0.1 or 10%"
    most = 100 if percent else 1
    value = _number(text.strip().removesuffix("%"), lambda value: 0 <= value <= most, wanted)
    return value / most


def _count(text: str) -> int:
    value = _number(
        text, lambda value: value >= 1 and value.denominator == 1, "a whole number from 1"
    )
    return int(value)


def _placement(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(rank) for rank in text.split(","))
    except ValueError:
        ranks = (-1,)
    if min(ranks) < 0:
        raise argparse.ArgumentTypeError(f"expected ranks as 0,1,2,3, got {text!r}")
    return ranks


def _out(text: str) -> Path:
    if (suffix := Path(text).suffix) not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise argparse.ArgumentTypeError(
            f"expected a file ending in {known}, got {suffix or text!r}"
        )
    return Path(text)
