"""Schedules by the short names that the command line, the recipes and the logs use.

In comes a text as ``1f1b`` or ``interleaved:2``, out goes the schedule. A schedule's ``name`` is
the inverse. Not here: schedules that users write, which are passed as objects.
"""

import difflib
from collections.abc import Callable

from stagewright.pipelining.schedules.bfs import LoopedBFS
from stagewright.pipelining.schedules.dfs import LoopedDFS
from stagewright.pipelining.schedules.dualpipev import DualPipeV
from stagewright.pipelining.schedules.eager import Eager1F1B
from stagewright.pipelining.schedules.gpipe import GPipe
from stagewright.pipelining.schedules.grid import GridSchedule
from stagewright.pipelining.schedules.hanayo import HanayoWaves
from stagewright.pipelining.schedules.interleaved import Interleaved1F1B
from stagewright.pipelining.schedules.one_f_one_b import OneFOneB
from stagewright.pipelining.schedules.schedule import Schedule
from stagewright.pipelining.schedules.vhalf import VHalf
from stagewright.pipelining.schedules.vmin import VMin
from stagewright.pipelining.schedules.zbh1 import ZBH1
from stagewright.pipelining.schedules.zbh2 import ZBH2
from stagewright.pipelining.schedules.zbv import ZBV

_PLAIN: dict[str, Callable[[], Schedule]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "eager1f1b": Eager1F1B,
    "zbh1": ZBH1,
    "zbh2": ZBH2,
    "zbv": ZBV,
    "vhalf": VHalf,
    "vmin": VMin,
    "dualpipev": DualPipeV,
}
# "circular" is what Praxis and MaxText call breadth-first.
_REPEATED: dict[str, Callable[[int], Schedule]] = {
    "interleaved": Interleaved1F1B,
    "bfs": LoopedBFS,
    "circular": LoopedBFS,
    "dfs": LoopedDFS,
    "hanayo": HanayoWaves,
}
_DEFAULT_REPEAT = {"hanayo": 1}


def by_name(text: str) -> Schedule:
    """Make the schedule of that name.

    Args:
        text: ``gpipe``, ``1f1b``, ``eager1f1b``, ``zbh1``, ``zbh2``, ``zbv``, ``vhalf``, ``vmin``
            or ``dualpipev``; ``interleaved:N``, ``bfs:N`` (also ``circular:N``) or ``dfs:N`` with N
            stages per rank (without ``:N``: 2); ``hanayo:N`` with N waves of two stages (1); or
            ``csv:PATH``, a file with an order (grid.py).

    Returns:
        The schedule.

    Raises:
        ValueError: there is no such schedule; the message gives the nearest name and all of them.

    Example:
        >>> by_name("interleaved:4")
        Interleaved1F1B(repeat=4)
    """
    if text.strip().startswith("csv:"):
        return GridSchedule.from_file(text.strip().removeprefix("csv:"))
    base, colon, repeat = text.strip().lower().partition(":")
    if base in _PLAIN and not colon:
        return _PLAIN[base]()
    if base in _REPEATED and (not colon or repeat.isdecimal()):
        return _REPEATED[base](int(repeat or _DEFAULT_REPEAT.get(base, 2)))
    raise ValueError(_unknown(text, base))


def all_names() -> tuple[str, ...]:
    """Name every schedule once; one that takes a number of stages, with its usual number.

    Example:
        >>> [name for name in all_names() if "f1b" in name]
        ['1f1b', 'eager1f1b']
    """
    return tuple(dict.fromkeys(by_name(name).name for name in (*_PLAIN, *_REPEATED)))


def _unknown(text: str, base: str) -> str:
    names = [*_PLAIN, *(f"{name}:N" for name in _REPEATED)]
    near = difflib.get_close_matches(base, [*_PLAIN, *_REPEATED], n=1, cutoff=0.5)
    nearest = [name for name in names if near and name.startswith(near[0])]
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    listed = ", ".join(names)
    return f"expected a schedule's name, got {text!r}.{hint} There are: {listed} (N stages per rank; hanayo: N waves)."
