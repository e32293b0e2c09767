"""Claim: short names make schedules; a wrong one is answered with the nearest and the list."""

import pytest

from stagewright.pipelining.schedules import (
    ZBH1,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    by_name,
)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("gpipe", GPipe()),
        ("1f1b", OneFOneB()),
        ("1F1B", OneFOneB()),
        ("interleaved", Interleaved1F1B(2)),
        ("interleaved:3", Interleaved1F1B(3)),
        ("zbh1", ZBH1()),
    ],
)
def test_by_name(text: str, schedule: Schedule) -> None:
    assert by_name(text) == schedule


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("1f2b", "1f1b"),
        ("zbh2", "zbh1"),
        ("gpip", "gpipe"),
        ("interleave:2", "interleaved:N"),
        ("interleaved:x", "interleaved:N"),
        ("interleaved:", "interleaved:N"),
        ("gpipe:3", "gpipe"),
    ],
)
def test_unknown_names_get_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"got '{text}'. Did you mean '{nearest}'.* gpipe, 1f1b, zbh1, interleaved:N",
    ):
        by_name(text)


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"got 'foo'\. There are: gpipe, 1f1b, zbh1, interleaved:N"
    ):
        by_name("foo")


def test_a_repeat_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="repeat of 1 or more"):
        by_name("interleaved:0")
