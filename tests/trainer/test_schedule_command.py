"""`stagewright schedule`: figures are the timeline's, exit codes and messages, and no JAX."""

import itertools
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from fractions import Fraction
from pathlib import Path

import pytest

from stagewright.pipelining.drawing import draw_order
from stagewright.pipelining.figures import figures
from stagewright.pipelining.schedules.names import all_names, by_name
from stagewright.pipelining.timeline import Costs, simulate_order
from stagewright.trainer.cli import main
from stagewright.trainer.schedule_command import Screen, run_schedule

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


def schedule(*words: str, screen: Screen = Screen()) -> int:  # noqa: B008 - frozen
    return run_schedule(words, screen)


# ---- drawing


def test_the_picture_is_that_of_the_order(capsys) -> None:
    assert main(["schedule", "1f1b"]) == 0
    assert capsys.readouterr().out == draw_order(by_name("1f1b").order(4, 8)) + "\n"


def test_sizes_costs_width_and_color(capsys) -> None:
    words = "zbh1 --ranks 3 --microbatches 5 --costs F=1,I=1.5,W=1/2 --latency 1 --width 60 --color"
    assert schedule(*words.split()) == 0
    costs = Costs(1, Fraction(3, 2), Fraction(1, 2), latency=1)
    wanted = draw_order(by_name("zbh1").order(3, 5), costs, color=True, width=60)
    assert capsys.readouterr().out.startswith(wanted + "\n")


def test_costs_for_each_stage(capsys) -> None:
    assert schedule("1f1b", "--costs", "F=1:1:2:1") == 0
    wanted = draw_order(by_name("1f1b").order(4, 8), Costs(forward=(1, 1, 2, 1)))
    assert capsys.readouterr().out == wanted + "\n"


def test_a_terminal_gets_colours_and_its_own_width(capsys) -> None:
    assert schedule("1f1b", screen=Screen(width=50, color=True)) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out
    picture = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert max(map(len, picture)) <= 50
    assert schedule("1f1b", "--no-color", screen=Screen(width=50, color=True)) == 0
    assert "\x1b[" not in capsys.readouterr().out


def test_a_cut_picture_says_where_the_rest_is(capsys) -> None:
    hint = "--out FILE.svg or FILE.html"
    assert schedule("1f1b", "--width", "20") == 0
    assert hint in capsys.readouterr().out
    assert schedule("1f1b") == 0
    assert hint not in capsys.readouterr().out


def test_two_schedules_share_a_ranks_costs(capsys) -> None:
    assert schedule("1f1b", "--versus", "interleaved:2") == 0
    first, second = capsys.readouterr().out.split("\n\n")[1:]
    assert first.startswith("1f1b\n4 ranks, 4 stages, 8 micro-batches, 33 time units")
    half = Fraction(1, 2)
    finer = draw_order(by_name("interleaved:2").order(4, 8), Costs(half, half, half))
    assert second == f"interleaved:2\n{finer}\n"


@pytest.mark.parametrize("suffix", ["svg", "html", "json", "csv", "txt"])
def test_files_are_written(suffix: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / f"x.{suffix}"
    assert schedule("zbh1", "--ranks", "2", "--out", str(path)) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    text = path.read_text(encoding="utf-8")
    if suffix == "svg":
        ET.fromstring(text)
    elif suffix == "json":
        slices = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
        assert len(slices) == 3 * 2 * 8
    else:
        assert text.startswith(
            {"html": "<!doctype html>", "csv": "0F0,", "txt": "8 micro-batches, stages"}[suffix]
        )


def test_several_files_hold_both_schedules(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("x.svg", "x.html", "x.json")]
    outs = itertools.chain.from_iterable(("--out", str(file)) for file in files)
    assert schedule("1f1b", "--versus", "zbh1", *outs) == 0
    for file in files:
        assert all(name in file.read_text(encoding="utf-8") for name in ("1f1b", "zbh1"))


@pytest.mark.parametrize("suffix", ["csv", "txt"])
def test_a_file_is_drawn_as_the_schedule_it_came_from(suffix, tmp_path: Path, capsys) -> None:
    path = tmp_path / f"mine.{suffix}"
    assert schedule("interleaved:2", "--ranks", "3", "--out", str(path)) == 0
    capsys.readouterr()
    for word in (str(path), f"csv:{path}"):
        assert schedule(word) == 0
        assert capsys.readouterr().out == draw_order(by_name("interleaved:2").order(3, 8)) + "\n"
    assert schedule("interleaved:2", "--versus", str(path)) == 0  # takes the file's sizes
    first, second = capsys.readouterr().out.rstrip().split("\n\n")[1:]
    assert first.splitlines()[1:] == second.splitlines()[1:]


# ---- comparing


def table(out: str) -> dict[str, list[str]]:
    lines = [line.split() for line in out.splitlines()]
    return {words[0]: words[1:] for words in lines if len(words) == 7 and words[2].endswith("%")}


def test_the_table_holds_the_timelines_figures_of_every_schedule(capsys) -> None:
    assert schedule("--compare", "all", "--ranks", "8", "--microbatches", "24") == 0
    rows = table(capsys.readouterr().out)
    assert list(rows) == list(all_names())
    for name, (stages, bubble, holes, activations, transfers, step) in rows.items():
        order = by_name(name).order(8, 24)
        share = Fraction(order.num_ranks, order.num_stages)
        got = figures(simulate_order(order, Costs(share, share, share)))
        assert Fraction(stages) * share == 1
        assert bubble == f"{float(got.bubble):.1%}"
        assert holes == f"{float(got.holes):.1%}"
        assert float(activations) == float(got.activations)
        assert int(transfers) == got.transfers
        assert float(step) == float(got.makespan)
    # Another event-driven simulator's figures.
    assert rows["1f1b"][1:4:2] == ["22.6%", "8"]
    assert rows["interleaved:2"][1:4:2] == ["12.7%", "11.5"]
    assert rows["zbh1"][1:4:2] == ["8.9%", "8"]


def test_the_table_fits_a_terminal_of_80_columns(capsys) -> None:
    assert schedule("--compare", "all", screen=Screen(width=80)) == 0
    shown = capsys.readouterr().out.partition("holes: ")[0]
    assert "…" not in shown
    assert list(table(shown)) == list(all_names())


def test_some_can_be_compared_under_other_costs(capsys) -> None:
    assert schedule("--compare", "1f1b, interleaved:4", "--costs", "I=2", "--latency", "0.5") == 0
    out = capsys.readouterr().out
    assert "4 ranks, 8 micro-batches, F=1, I=2, W=1, latency 0.5" in out
    quarter = Fraction(1, 4)
    costs = Costs(quarter, 2 * quarter, quarter, latency=0.5)
    wanted = simulate_order(by_name("interleaved:4").order(4, 8), costs)
    rows = table(out)
    assert list(rows) == ["1f1b", "interleaved:4"]
    assert rows["interleaved:4"][-1] == f"{float(wanted.makespan):g}"


def test_what_refuses_is_skipped_and_named(capsys) -> None:
    assert schedule("--compare", "1f1b,interleaved:2", "--costs", "F=1:1:2:1") == 0
    out = capsys.readouterr().out
    assert list(table(out)) == ["1f1b"]
    assert "skipped interleaved:2: --costs gives F for 4 stages, but interleaved:2 has 8" in out
    assert schedule("--compare", "interleaved:2", "--costs", "F=1:1:2:1") == 2
    assert "skipped interleaved:2" in capsys.readouterr().err


# ---- checking

TWO = "2 micro-batches, stages on ranks 0 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "two.txt").write_text(TWO)
    return str(tmp_path / "two.txt")


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ("", 0),
        ("--max-bubble 1/3", 0),
        ("--max-bubble 33%", 1),
        ("--max-bubble 0.4 --max-activations 2", 0),
        ("--max-activations 1.5", 1),
        ("--max-bubble 0.4 --costs I=3", 0),
        ("--max-bubble 0.4 --latency 3", 1),
        ("--ranks-on 0,1", 0),
        ("--ranks-on 1,0", 1),
    ],
)
def test_check_ends_with_1_beyond_a_limit(file: str, limits: str, code: int) -> None:
    assert main(["schedule", "check", file, *limits.split()]) == code


def test_check_tells_what_was_measured(file: str, capsys) -> None:
    assert schedule("check", file, "--max-bubble", "0.1", "--max-activations", "2") == 1
    assert capsys.readouterr().out.splitlines() == [
        "two.txt is legal: 2 ranks, 2 stages, 2 micro-batches",
        "bubble         33.3%  limit 10.0%  EXCEEDED",
        "activations        2  limit 2",
        "transfers          4",
        "step               9",
    ]


@pytest.mark.parametrize("before", [["check"], []])
def test_an_illegal_order_is_shown_and_ends_with_1(before, tmp_path: Path, capsys) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(TWO.replace("1F0 1B0", "1B0 1F0"))
    assert schedule(*before, str(path)) == 1
    told = capsys.readouterr().err
    assert "bad.txt is not legal: the order cannot run" in told
    assert "<-- ERROR HERE" in told
    assert len(told.splitlines()) <= 15


def test_a_grid_is_checked_as_its_text_is(tmp_path: Path, capsys) -> None:
    path = tmp_path / "two.csv"
    path.write_text("0F0,0F1,,,0B0,,0B1\n,1F0,1B0,,1F1,1B1\n", encoding="utf-8-sig")
    assert schedule("check", str(path), "--max-bubble", "1/3") == 0
    assert "two.csv is legal: 2 ranks, 2 stages, 2 micro-batches" in capsys.readouterr().out
    path.write_text("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")
    assert schedule("check", str(path)) == 1
    assert "two.csv is not legal: the order cannot run" in capsys.readouterr().err
    path.write_text("0F0,0X1\n")
    assert schedule("check", str(path)) == 1
    assert "two.csv is not an order: line 1 (rank 0), column 2: " in capsys.readouterr().err


def test_a_file_of_one_endless_cell_is_no_order(tmp_path: Path, capsys) -> None:
    (tmp_path / "x.csv").write_text("0" * 200_000)
    assert schedule("check", str(tmp_path / "x.csv")) == 1
    assert "x.csv is not an order: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "rank 0: 0F0", TWO.replace("0F1", "0X1")])
def test_a_file_with_something_else_ends_with_1(text: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    assert schedule("check", str(path)) == 1
    assert "is not an order: " in capsys.readouterr().err


# ---- wrong usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "which schedule?"),
        ("1f1", "Did you mean '1f1b'?"),
        ("interleaved:0", "repeat of 1 or more"),
        ("1f1b zbh1", "one schedule too many: 'zbh1'"),
        ("1f1b --rank 4", "there is no option --rank. Did you mean --ranks?"),
        ("1f1b --ranks 0", "--ranks: expected a whole number from 1, got '0'"),
        ("1f1b --ranks 2.5", "--ranks: expected a whole number from 1, got '2.5'"),
        ("1f1b --microbatches x", "--microbatches: expected a whole number from 1, got 'x'"),
        ("1f1b --costs G=1", "expected F=, I= and W= as F=1,I=1,W=1, got 'G=1'"),
        ("1f1b --costs B=2", "B takes what I and W take together"),
        ("1f1b --costs F=1,F=2", "F is given twice"),
        ("1f1b --costs F=-1", "expected a number from 0, as 1, 0.5 or 1/3, got '-1'"),
        ("1f1b --costs F=1/0", "expected a number from 0, as 1, 0.5 or 1/3, got '1/0'"),
        ("1f1b --costs F=1e999999", "expected a number from 0"),
        ("1f1b --costs F=1:2", "--costs gives F for 2 stages, but 1f1b has 4"),
        ("1f1b --latency inf", "--latency: expected a number from 0"),
        ("1f1b --latency 1_000e-999999999", "--latency: expected a number from 0"),
        ("1f1b --out x.png", "expected a file ending in .svg, .html, .json, "),
        ("1f1b --out x", "got 'x'"),
        ("1f1b --out /no/such/folder/x.svg", "cannot write /no/such/folder/x.svg: No such file"),
        ("1f1b --versus zbh1 --out x.txt", "x.txt can hold one schedule"),
        ("1f1b --versus zbh1 --out x.csv", "x.csv can hold one schedule"),
        ("1f1b --versus gpip", "Did you mean 'gpipe'?"),
        ("--compare 1f1b,gpip", "Did you mean 'gpipe'?"),
        ("--compare 1f1b,csv:mine.csv", "No such file or directory: 'mine.csv'"),
        ("csv:mine.csv", "cannot read mine.csv: No such file"),
        ("--compare 1f1b,,zbh1", "expected a schedule's name, got ''"),
        ("1f1b --compare all", "it takes no schedule"),
        ("mine.txt", "cannot read mine.txt: No such file"),
        ("no/such/file", "cannot read no/such/file: No such file"),
        ("check", "arguments are required: FILE"),
        ("check mine.txt", "cannot read mine.txt: No such file"),
        ("check .", "cannot read .: "),
        ("check mine.txt --max-bubble 11", "expected a share from 0 to 1, as 0.1 or 10%, got '11'"),
        ("check mine.txt --max-activation 1", "Did you mean --max-activations?"),
        ("check mine.txt --ranks-on 0,x", "expected ranks as 0,1,2,3, got '0,x'"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_message(
    words: str, message: str, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", *words.split()]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.startswith("stagewright: ")
    assert len(told.err.splitlines()) <= 4
    assert told.out == ""
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_sizes_beside_a_file_are_refused(file: str, capsys) -> None:
    assert schedule(file, "--ranks", "4") == 2
    assert "leave --ranks and --microbatches out" in capsys.readouterr().err


def test_files_of_different_sizes_are_refused(file: str, tmp_path: Path, capsys) -> None:
    other = tmp_path / "one.txt"
    other.write_text("1 micro-batch, stages on ranks 0\nrank 0: 0F0 0B0\n")
    assert schedule(file, "--versus", str(other)) == 2
    assert "the files differ in ranks or micro-batches" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    assert schedule("check", str(tmp_path / "x.txt")) == 2
    assert "it is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["check", "--help"]])
def test_help_tells_every_option(words, capsys) -> None:
    assert main(["schedule", *words]) == 0
    assert "--costs F=1,I=1,W=1" in capsys.readouterr().out


# ---- what it is not


def test_no_command_here_imports_jax(tmp_path: Path) -> None:
    program = (
        "import sys; from stagewright.trainer.cli import main\n"
        "codes = [main(['schedule', *words.split()]) for words in (\n"
        "    '1f1b', 'zbh1 --out x.svg --out x.html --out x.json --out x.txt',\n"
        "    '--compare all', 'check x.txt', '--help')]\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'numpy', 'wandb', 'tensorflow'}\n"
        "print(codes, sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []"


# ---- the guide


BLOCK = re.compile(r"^```\n(stagewright .*?)```(?:\n\n```text\n(.*?)```)?", re.M | re.S)


def test_the_guide_runs_as_written_and_prints_what_it_shows(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    guide = GUIDE.read_text(encoding="utf-8")
    blocks = BLOCK.findall(guide)
    assert len(blocks) >= 4
    assert sum(bool(shown) for _, shown in blocks) == guide.count("```text")
    for lines, shown in blocks:
        for line in lines.splitlines():
            command, _, code = line.partition("  # exit code ")
            assert main(shlex.split(command)[1:]) == int(code or 0), line
        told = [text.rstrip() for text in capsys.readouterr().out.splitlines()]
        assert not shown or [text.rstrip() for text in shown.splitlines()] == told


def test_the_guides_pictures_are_there_and_small() -> None:
    files = re.findall(r"!\[.+?\]\((.+?)\)", GUIDE.read_text(encoding="utf-8"))
    assert len(files) == 2
    for file in files:
        data = (GUIDE.parent / file).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 150_000
