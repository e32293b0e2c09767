"""Claim: short names make schedules; a wrong one is answered with the nearest and the list."""

import pytest

from stagewright.pipelining.schedules import (
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    Eager1F1B,
    GPipe,
    HanayoWaves,
    Interleaved1F1B,
    LoopedBFS,
    LoopedDFS,
    OneFOneB,
    Schedule,
    VHalf,
    VMin,
    by_name,
)
from stagewright.pipelining.schedules.names import all_names


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("gpipe", GPipe()),
        ("1f1b", OneFOneB()),
        ("1F1B", OneFOneB()),
        ("interleaved", Interleaved1F1B(2)),
        ("interleaved:3", Interleaved1F1B(3)),
        ("eager1f1b", Eager1F1B()),
        ("bfs", LoopedBFS(2)),
        ("bfs:3", LoopedBFS(3)),
        ("circular:3", LoopedBFS(3)),
        ("dfs:4", LoopedDFS(4)),
        ("hanayo", HanayoWaves(1)),
        ("hanayo:2", HanayoWaves(2)),
        ("zbh1", ZBH1()),
        ("zbh2", ZBH2()),
        ("zbv", ZBV()),
        ("vhalf", VHalf()),
        ("vmin", VMin()),
        ("dualpipev", DualPipeV()),
    ],
)
def test_by_name(text: str, schedule: Schedule) -> None:
    assert by_name(text) == schedule


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("1f2b", "1f1b"),
        ("zbh3", "zbh2"),
        ("v-half", "vhalf"),
        ("dualpipe", "dualpipev"),
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
        match=f"got '{text}'. Did you mean '{nearest}'.* gpipe, 1f1b, .*, interleaved:N",
    ):
        by_name(text)


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(ValueError, match=r"got 'foo'\. There are: gpipe, 1f1b, .*, interleaved:N"):
        by_name("foo")


def test_a_repeat_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="repeat of 1 or more"):
        by_name("interleaved:0")


def test_each_schedule_is_listed_once_under_a_name_that_makes_it() -> None:
    names = all_names()
    assert len(set(names)) == len(names)
    assert {"gpipe", "1f1b", "interleaved:2", "zbh1"} <= set(names)
    assert [by_name(name).name for name in names] == list(names)
