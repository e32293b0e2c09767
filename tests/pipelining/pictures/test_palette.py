"""Claim: labels can be read on every shade, and kinds told apart, with any colour vision."""

import itertools
import math

import pytest

from stagewright.pipelining.actions import Kind
from stagewright.pipelining.pictures.palette import shades

# How those without one kind of cone see linear light: Viénot, Brettel and Mollon 1999.
SIGHTS = {
    "trichromat": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanope": ((0.112, 0.888, 0.0), (0.112, 0.888, 0.0), (0.004, -0.004, 1.0)),
    "deuteranope": ((0.293, 0.707, 0.0), (0.293, 0.707, 0.0), (-0.022, 0.022, 1.0)),
}
LABEL = "#111111"


def linear(color: str) -> list[float]:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(color: str) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def seen(color: str, sight: str) -> list[float]:
    """CIE L*a*b* of a colour as somebody sees it: distances are about how different it looks."""
    light = [
        max(0.0, sum(a * b for a, b in zip(row, linear(color), strict=True)))
        for row in SIGHTS[sight]
    ]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        math.cbrt(sum(a * b for a, b in zip(row, light, strict=True)) / whitest + 1e-9)
        for row, whitest in zip(rows, white, strict=True)
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("kind", Kind)
def test_labels_have_the_contrast_that_wcag_asks_for(kind: Kind) -> None:
    for shade in shades(kind):
        assert (luminance(shade) + 0.05) / (luminance(LABEL) + 0.05) >= 4.5


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Kind, 2)))
def test_kinds_look_different(sight: str, one: Kind, other: Kind) -> None:
    # A difference of about 2 can just be seen; 20 is plain at a glance.
    assert math.dist(seen(shades(one)[0], sight), seen(shades(other)[0], sight)) > 20


@pytest.mark.parametrize("kind", Kind)
def test_later_stages_are_paler(kind: Kind) -> None:
    levels = [luminance(shade) for shade in shades(kind)]
    assert levels == sorted(set(levels))
