"""Claim: the trace is JSON with one slice per task, arrows that balance, and a counter per rank."""

import collections
import doctest
import json

import pytest

from stagewright.pipelining.pictures import perfetto, to_perfetto
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.timeline import Timeline, peak_activations, simulate_order


def events(*timelines: tuple[str, Timeline]) -> dict[str, list[dict]]:
    by_phase = collections.defaultdict(list)
    for event in json.loads(to_perfetto(timelines))["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


@pytest.mark.parametrize("name", ["1f1b", "interleaved:2", "zbh1"])
def test_tasks_are_slices_on_their_ranks_in_microseconds(name: str) -> None:
    timeline = simulate_order(by_name(name).order(4, 8))
    slices = events((name, timeline))["X"]
    assert {(e["name"], e["tid"], e["ts"], e["dur"]) for e in slices} == {
        (str(span.action), span.rank, span.start * 1000, (span.end - span.start) * 1000)
        for span in timeline.spans
    }
    assert len(slices) == len(timeline.spans)
    assert all(event["args"]["kind"] in "FBIW" for event in slices)


@pytest.mark.parametrize("name", ["1f1b", "interleaved:2", "zbh1"])
def test_each_arrow_leaves_one_slice_and_reaches_another_later(name: str) -> None:
    found = events(("x", simulate_order(by_name(name).order(3, 5))))
    starts = {event["id"]: event for event in found["s"]}
    ends = {event["id"]: event for event in found["f"]}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(found["s"]) == len(found["f"]) > 0
    for ident, start in starts.items():
        end = ends[ident]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        (source,) = (e for e in found["X"] if e["name"] == start["name"])
        assert source["tid"] == start["tid"] != end["tid"]
        assert source["ts"] <= start["ts"] < source["ts"] + source["dur"]
        assert any(e["tid"] == end["tid"] and e["ts"] == end["ts"] for e in found["X"])


def test_timelines_are_processes_with_names() -> None:
    timeline = simulate_order(by_name("1f1b").order(2, 2))
    found = events(("planned", timeline), ("again", timeline))
    names = {e["pid"]: e["args"]["name"] for e in found["M"] if e["name"] == "process_name"}
    assert names == {1: "planned", 2: "again"}
    threads = {(e["pid"], e["tid"]) for e in found["M"] if e["name"] == "thread_name"}
    assert threads == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert {event["pid"] for event in found["X"]} == {1, 2}
    assert len({event["id"] for event in found["s"]}) == len(found["s"])


def test_a_measured_step_shows_bytes_and_outer_work(measured: Timeline) -> None:
    found = events(("measured", measured))
    assert {event["name"] for event in found["X"]} >= {"norm", "update <all>"}
    assert len(found["s"]) == len(found["f"]) == len(measured.transfers)
    sent = {event["name"]: event["args"] for event in found["s"]}
    assert sent["0F0"] == {"bytes": 4096, "posted_us": 3000.0, "arrived_us": 4000.0}
    counted = [(e["tid"], e["ts"], e["args"]["bytes"]) for e in found["C"]]
    assert counted == [(0, 0, 100), (0, 1000, 5000), (0, 15000, 100), (1, 0, 50), (1, 4000, 4000)]


def test_activations_are_counted_where_bytes_are_not_known() -> None:
    order = by_name("zbh1").order(4, 8)
    counters = events(("x", simulate_order(order)))["C"]
    for rank, peak in enumerate(peak_activations(order)):
        mine = [event["args"]["activations"] for event in counters if event["tid"] == rank]
        assert max(mine) == peak
        assert len({event["name"] for event in counters if event["tid"] == rank}) == 1


def test_doctests() -> None:
    assert doctest.testmod(perfetto).failed == 0
