"""Schedules by the short names that the command line, the recipes and the logs use.

In comes a text as ``1f1b`` or ``interleaved:2``, out goes the schedule. A schedule's ``name`` is
the inverse. Not here: schedules that users write, which are passed as objects.
"""

import difflib
from collections.abc import Callable

from stagewright.pipelining.schedules.gpipe import GPipe
from stagewright.pipelining.schedules.interleaved import Interleaved1F1B
from stagewright.pipelining.schedules.one_f_one_b import OneFOneB
from stagewright.pipelining.schedules.schedule import Schedule
from stagewright.pipelining.schedules.zbh1 import ZBH1

_PLAIN: dict[str, Callable[[], Schedule]] = {"gpipe": GPipe, "1f1b": OneFOneB, "zbh1": ZBH1}
_REPEATED: dict[str, Callable[[int], Schedule]] = {"interleaved": Interleaved1F1B}


def by_name(text: str) -> Schedule:
    """Make the schedule of that name.

    Args:
        text: ``gpipe``, ``1f1b``, ``zbh1``, or ``interleaved:N`` with N stages per rank
            (``interleaved`` alone: 2).

    Returns:
        The schedule.

    Raises:
        ValueError: there is no such schedule; the message gives the nearest name and all of them.

    Example:
        >>> by_name("interleaved:4")
        Interleaved1F1B(repeat=4)
    """
    base, colon, repeat = text.strip().lower().partition(":")
    if base in _PLAIN and not colon:
        return _PLAIN[base]()
    if base in _REPEATED and (not colon or repeat.isdecimal()):
        return _REPEATED[base](int(repeat or 2))
    raise ValueError(_unknown(text, base))


def _unknown(text: str, base: str) -> str:
    names = [*_PLAIN, *(f"{name}:N" for name in _REPEATED)]
    near = difflib.get_close_matches(base, [*_PLAIN, *_REPEATED], n=1, cutoff=0.5)
    nearest = [name for name in names if near and name.startswith(near[0])]
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    listed = ", ".join(names)
    return (
        f"expected a schedule's name, got {text!r}.{hint} There are: {listed} (N stages per rank)."
    )
