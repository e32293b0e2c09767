"""Claim: the page stands alone, holds all of the timelines as JSON, and a browser draws every task."""

import doctest
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stagewright.pipelining.pictures import html as module
from stagewright.pipelining.pictures import to_html
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.timeline import Timeline, simulate_order

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page(html.parser.HTMLParser):
    """Its elements' attributes and its scripts' texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes += attrs
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag) -> None:
        self.inside = ""

    def handle_data(self, data) -> None:
        if self.inside == "script":
            self.scripts[-1] += data


def planned(name: str, *size: int) -> tuple[str, Timeline]:
    return name, simulate_order(by_name(name).order(*size))


def data_of(page: str) -> dict:
    return json.loads(Page(page).scripts[0])


def test_the_page_asks_the_network_for_nothing(measured: Timeline) -> None:
    page = to_html([planned("1f1b", 4, 8), ("measured", measured)])
    names = {name for name, _ in Page(page).attributes}
    assert names.isdisjoint({"src", "href", "srcset", "action", "data"})
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", page)


def test_the_data_hold_every_task() -> None:
    name, timeline = planned("interleaved:2", 4, 8)
    (got,) = data_of(to_html([(name, timeline)]))["timelines"]
    assert got["title"] == name
    assert got["tasks"] == [
        [s.rank, s.action.stage, s.action.kind.value, s.action.microbatch, s.start, s.end]
        for s in timeline.spans
    ]
    assert (got["ranks"], got["turns"]) == (4, [0] * 4 + [1] * 4)
    assert len(got["curves"]) == 4
    assert not got["bytes"]
    for source, to in got["links"]:
        assert got["tasks"][source][5] <= got["tasks"][to][4]
        assert got["tasks"][source][3] == got["tasks"][to][3]


def test_a_measured_step_brings_its_bytes(measured: Timeline) -> None:
    (got,) = data_of(to_html([("measured", measured)]))["timelines"]
    assert got["bytes"]
    assert (got["unit"], got["factor"]) == ("ms", 1000)
    assert got["curves"] == [[list(point) for point in curve] for curve in measured.memory]
    assert got["links"] == [[0, 1, 4096, 0.003, 0.004], [2, 3, 4096, 0.01, 0.011]]
    assert got["outer"] == [[1, "norm", 0.015, 0.016], [0, "update <all>", 0.018, 0.02]]


def test_times_share_a_scale_only_if_they_share_a_unit(measured: Timeline) -> None:
    short, long = planned("1f1b", 2, 2), planned("1f1b", 2, 9)
    lengths = [t["length"] for t in data_of(to_html([short, long]))["timelines"]]
    assert lengths == [long[1].makespan] * 2
    lengths = [t["length"] for t in data_of(to_html([short, ("", measured)]))["timelines"]]
    assert lengths == [short[1].makespan, measured.makespan]


def test_no_title_can_end_the_script() -> None:
    title = "</script><script>alert(1)</script><!--"
    page = to_html([(title, Timeline((), 1))])
    assert len(Page(page).scripts) == 2
    assert data_of(page)["timelines"][0]["title"] == title
    assert "alert(1)</script>" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_task(tmp_path: Path, measured: Timeline) -> None:
    shown = [planned("zbh1", 4, 8), planned("interleaved:2", 4, 8), ("measured", measured)]
    (tmp_path / "page.html").write_text(to_html(shown), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    address = (tmp_path / "page.html").as_uri()
    done = subprocess.run(
        [CHROMIUM, *flags.split(), profile, "--disable-sync", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    drawn = re.search(r'data-drawn="(\d+)"', done.stdout)
    assert drawn is not None, "the script failed"
    assert int(drawn[1]) == sum(len(timeline.work) for _, timeline in shown)
    assert done.stdout.count("<canvas") == 3


def test_doctests() -> None:
    assert doctest.testmod(module).failed == 0
