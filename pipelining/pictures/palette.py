"""What a kind of task is called and which colour it has, in every picture that is a file.

The hues follow four of Okabe and Ito's set for people of any colour vision, moved so far apart that
orange and yellow differ without green cones too, and light enough that black labels can be read on
them in light and dark mode alike. The stages of a rank take paler and paler shades in turn. Not
here: the terminal's 256 colours (drawing.py).

Reference:
    Okabe and Ito, "Color Universal Design", 2008.
"""

from collections.abc import Iterable

from stagewright.pipelining.actions import Kind

WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}
"""What each kind is called in legends."""

OUTER = "#a9a9b3"
"""Colour of work outside the loop."""

_HUES = {Kind.F: "#56b4e9", Kind.B: "#d98f0a", Kind.I: "#f2e85c", Kind.W: "#3fae8c"}
_TOWARDS_WHITE = (0.0, 0.28, 0.48, 0.62)


def shades(kind: Kind) -> tuple[str, ...]:
    """Colours of a kind, for a rank's first stage, its second, and so on in turn.

    Example:
        >>> shades(Kind.F)
        ('#56b4e9', '#85c9ef', '#a7d8f4', '#bfe2f7')
    """
    channels = [int(_HUES[kind][at : at + 2], 16) for at in (1, 3, 5)]
    return tuple(
        "#" + "".join(f"{round(value + (255 - value) * white):02x}" for value in channels)
        for white in _TOWARDS_WHITE
    )


def stage_turns(placement: Iterable[int]) -> tuple[int, ...]:
    """For each stage, how many earlier stages its rank holds: its shade.

    Example:
        >>> stage_turns((0, 1, 1, 0))
        (0, 0, 1, 1)
    """
    ranks = tuple(placement)
    return tuple(ranks[:stage].count(rank) for stage, rank in enumerate(ranks))
