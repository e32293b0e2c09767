"""Claim: the drawing is XML that shows each task once, where and as long as it runs."""

import doctest
import re
import xml.etree.ElementTree as ET

import pytest

from stagewright.pipelining.pictures import svg, to_svg
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.timeline import Costs, Timeline, simulate_order

SVG = "{http://www.w3.org/2000/svg}"
TOOLTIP = re.compile(r"(.+) on rank (\d+), (\S+) to (\S+) (.*)")


def timeline_of(name: str, *size: int, **costs) -> Timeline:
    return simulate_order(by_name(name).order(*size), Costs(**costs))


def tasks(drawing: str) -> list[ET.Element]:
    found = ET.fromstring(drawing).iter(f"{SVG}rect")
    return [rect for rect in found if rect.get("class", "").startswith("task ")]


def told(rect: ET.Element) -> tuple[str, ...]:
    match = TOOLTIP.fullmatch(rect.findtext(f"{SVG}title") or "")
    assert match is not None
    return match.groups()


@pytest.mark.parametrize("size", [(1, 1), (4, 8), (16, 64)])
@pytest.mark.parametrize("name", ["1f1b", "interleaved:2", "zbh1"])
def test_each_task_is_drawn_once_and_to_scale(name: str, size: tuple[int, int]) -> None:
    timeline = timeline_of(name, *size)
    drawn = {told(rect)[0]: rect for rect in tasks(to_svg(timeline))}
    assert sorted(drawn) == sorted(str(span.action) for span in timeline.spans)
    left = min(float(rect.get("x")) for rect in drawn.values())
    pixels = max(float(r.get("x")) + float(r.get("width")) for r in drawn.values()) - left
    pixels /= timeline.makespan
    rows = {span.rank: drawn[str(span.action)].get("y") for span in timeline.spans}
    assert len(set(rows.values())) == size[0]
    for span in timeline.spans:
        rect = drawn[str(span.action)]
        # Coordinates are written with three decimals.
        assert float(rect.get("x")) == pytest.approx(left + span.start * pixels, abs=0.002)
        assert float(rect.get("width")) == pytest.approx(
            (span.end - span.start) * pixels, abs=0.002
        )
        assert rect.get("y") == rows[span.rank]
        assert told(rect)[1:4] == (str(span.rank), str(span.start), str(span.end))


def test_all_lies_on_the_page(measured: Timeline) -> None:
    root = ET.fromstring(to_svg(timeline_of("zbh1", 16, 64), "planned", ("measured", measured)))
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        if element.get("x") is not None:
            right = float(element.get("x")) + float(element.get("width", 0))
            assert 0 <= float(element.get("x")) <= right <= width
            assert 0 <= float(element.get("y")) <= height


def test_labels_lie_within_their_tasks_and_are_alike_for_tasks_alike() -> None:
    root = ET.fromstring(to_svg(timeline_of("1f1b", 4, 8)))
    labels = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "label"]
    assert sorted(labels) == sorted(f"{kind}{m}" for kind in "FB" for m in range(8) for _ in "1234")
    # Two digits do not fit every forward here, so no forward has a label, not even 0 to 9.
    root = ET.fromstring(to_svg(timeline_of("1f1b", 16, 200)))
    labels = {text.text for text in root.iter(f"{SVG}text") if text.get("class") == "label"}
    assert labels <= {str(microbatch) for microbatch in range(200)} | {""}
    assert len(labels) in (0, 200)


def test_kinds_and_stages_have_classes_with_colours_and_a_legend() -> None:
    drawing = to_svg(timeline_of("interleaved:2", 2, 4))
    classes = {rect.get("class").split()[1] for rect in tasks(drawing)}
    assert classes == {"F0", "F1", "B0", "B1"}
    style = ET.fromstring(drawing).findtext(f"{SVG}style")
    for name in classes:
        assert re.search(rf"\.{name} {{ fill: #[0-9a-f]{{6}} }}", style)
    for words in ("F forward", "B backward", "idle", "1st, 2nd stage"):
        assert words in drawing
    assert "weight gradient" not in drawing


def test_dark_pages_get_their_own_colours() -> None:
    assert "@media (prefers-color-scheme: dark)" in to_svg(timeline_of("1f1b", 2, 2))


def test_planned_and_measured_stand_above_each_other_at_the_same_width(measured: Timeline) -> None:
    drawing = to_svg(timeline_of("1f1b", 2, 1), "planned", ("measured", measured))
    rects = tasks(drawing)
    above, below = rects[:4], rects[4:]
    assert len(below) == 4 + 2
    assert max(float(rect.get("y")) for rect in above) < min(float(rect.get("y")) for rect in below)
    ends = [max(float(r.get("x")) + float(r.get("width")) for r in half) for half in (above, below)]
    assert ends[0] == pytest.approx(ends[1], abs=0.002)
    assert told(below[0]) == ("0F0", "0", "1", "3", "ms")
    assert drawing.count('class="link"') == 2  # what tasks send; the norm goes to no task


def test_timelines_of_one_unit_have_one_scale() -> None:
    rects = tasks(to_svg(timeline_of("1f1b", 2, 3), "", ("", timeline_of("gpipe", 2, 9))))
    assert len({rect.get("width") for rect in rects if told(rect)[0][1] == "F"}) == 1


def test_titles_and_labels_are_escaped(measured: Timeline) -> None:
    drawing = to_svg(measured, "a < b & c")
    assert ET.fromstring(drawing).findtext(f"{SVG}title") == "a < b & c"
    assert "update &lt;all&gt; on rank 0, 18 to 20 ms" in drawing


@pytest.mark.parametrize("timeline", [Timeline((), 1), timeline_of("1f1b", 1, 1, forward=0)])
def test_nothing_can_be_drawn(timeline: Timeline) -> None:
    assert len(tasks(to_svg(timeline))) == len(timeline.spans)


def test_no_duration_at_all_can_be_drawn() -> None:
    timeline = timeline_of("1f1b", 2, 2, forward=0, backward_input=0, backward_weight=0)
    assert len(tasks(to_svg(timeline))) == 8


def test_doctests() -> None:
    assert doctest.testmod(svg).failed == 0
