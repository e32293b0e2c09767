"""Loggers get Python numbers, write whole lines, and never end a run (case 48 of CASES.md)."""

import io
import json
import math
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from stagewright.pipelining.engines.engine import StageRow, StepSummary
from stagewright.pipelining.mesh import MeshSpec
from stagewright.trainer import loggers
from stagewright.trainer.loggers import ConsoleLogger, JsonlLogger, LoggerGroup
from stagewright.trainer.reports import to_numbers
from stagewright.trainer.run_info import RunInfo
from stagewright.trainer.wandb_logger import WandbLogger


def make_info(last_step: int = 4) -> RunInfo:
    rows = [
        StageRow(stage=i, rank=i, devices=(f"cpu:{i}",), parameters=1234, tasks=(("F", 20),))
        for i in range(2)
    ]
    summary = StepSummary(
        engine="MpmdEngine",
        schedule="1f1b",
        num_ranks=2,
        num_microbatches=8,
        stages=tuple(rows),
        planned_bubble=1 / 9,
        compile_seconds=2.5,
    )
    return RunInfo(
        summary=summary,
        mesh=MeshSpec(pipe=2),
        layers_per_stage=(3, 2),
        num_parameters=2468,
        first_step=1,
        last_step=last_step,
        settings={"recipe": "test"},
    )


VALUES = {
    "loss": 2.5,
    "grad_norm": 0.5,
    "learning_rate": 1e-3,
    "tokens": 4096,
    "skipped": 0,
    "step_seconds": 0.25,
    "tokens_per_second": 16384.0,
    "bubble": 0.14,
    "bubble_planned": 1 / 9,
}


def test_a_pipe_gets_plain_lines() -> None:
    file = io.StringIO()
    logger = ConsoleLogger(every=2, file=file)
    logger.start(make_info())
    for step in range(1, 5):
        logger.log(step, VALUES)
    logger.close()
    text = file.getvalue()
    assert "\x1b" not in text
    for words in ("pipe=2", "MpmdEngine", "1f1b", "8 micro-batches", "11.1% planned", "2,468"):
        assert words in text
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "4/4"]
    assert lines[0] == (
        "step 1/4  loss 2.5000  grad norm 0.500  lr 1.00e-03  16.4k tokens/s  0.250 s  "
        "bubble 14% (planned 11%)"
    )


def test_a_terminal_gets_a_frame_and_a_bar(monkeypatch) -> None:
    file = io.StringIO()
    terminal = rich.console.Console(file=file, force_terminal=True, width=100)
    monkeypatch.setattr(loggers, "Console", lambda **_: terminal)
    logger = ConsoleLogger()
    logger.start(make_info())
    logger.log(1, VALUES)
    logger.close()
    assert "Stagewright" in file.getvalue()
    assert "training" in file.getvalue()
    assert "\x1b[" in file.getvalue()


def test_each_json_line_is_whole_and_valid(tmp_path) -> None:
    logger = JsonlLogger(tmp_path / "deep" / "metrics.jsonl")
    logger.start(make_info())
    logger.log(1, VALUES)
    logger.log(2, {"loss": math.nan, "grad_norm": math.inf})
    lines = logger.path.read_text().splitlines()  # before it is closed
    logger.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first == {"step": 1, **VALUES}
    assert math.isnan(float(second["loss"]))
    assert float(second["grad_norm"]) == math.inf


def test_a_second_fit_appends(tmp_path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        logger.start(make_info())
        logger.log(step, VALUES)
        logger.close()
    assert len(logger.path.read_text().splitlines()) == 2


class Broken:
    def __init__(self, *methods: str):
        self.methods, self.calls = methods, []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.methods:
            raise OSError("disk full")

    def start(self, info) -> None:
        self._call("start")

    def log(self, step, values) -> None:
        self._call("log")

    def close(self) -> None:
        self._call("close")


def test_case_48_a_failing_logger_is_named_once_and_the_others_go_on() -> None:
    broken, healthy = Broken("log"), Broken()
    group = LoggerGroup([broken, healthy])
    group.start(make_info())
    with pytest.warns(RuntimeWarning, match=r"Broken failed at step 1 \(OSError: disk full\)"):
        group.log(1, VALUES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group.log(2, VALUES)
        group.close()
    assert broken.calls == healthy.calls == ["start", "log", "log", "close"]


def test_case_48_a_logger_that_cannot_start_gets_nothing_more() -> None:
    broken = Broken("start")
    group = LoggerGroup([broken])
    with pytest.warns(RuntimeWarning, match="at the start"):
        group.start(make_info())
    group.log(1, VALUES)
    group.close()
    assert broken.calls == ["start"]


def test_case_48_values_arrive_as_python_numbers() -> None:
    numbers = to_numbers(
        {
            "nan": jnp.float32(jnp.nan),
            "narrow": jnp.bfloat16(1.5),
            "count": jnp.int32(3),
            "flag": jnp.bool_(True),
            "host": np.float64(0.25),
        }
    )
    assert {name: type(value) for name, value in numbers.items()} == {
        "nan": float,
        "narrow": float,
        "count": int,
        "flag": int,
        "host": float,
    }
    assert math.isnan(numbers["nan"])
    assert (numbers["narrow"], numbers["count"], numbers["flag"]) == (1.5, 3, 1)


def test_case_48_a_value_that_is_no_scalar_is_named() -> None:
    with pytest.raises(ValueError, match=r"'histogram' must be a scalar, got shape \(3,\)"):
        to_numbers({"histogram": jnp.zeros(3)})


def test_case_48_without_wandb_the_run_goes_on(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    group = LoggerGroup([WandbLogger("project")])
    with pytest.warns(RuntimeWarning, match=r"WandbLogger needs `pip install wandb`.*goes on"):
        group.start(make_info())
    with warnings.catch_warnings(record=True) as later:
        group.log(1, VALUES)
    assert not later  # named once


class FakeWandb:
    """Stands for the package: it notes what it is asked, and has no key."""

    @staticmethod
    def login(*, prompt: bool) -> bool:
        assert not prompt
        return False

    @staticmethod
    def Settings(**options):  # noqa: N802
        return options

    def __init__(self):
        self.asked, self.logged, self.finished = {}, [], 0

    def init(self, **options):
        self.asked = options
        return self

    def log(self, values, step) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_case_48_without_a_key_wandb_is_offline_and_asks_nobody(monkeypatch, tmp_path) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger("project", directory=tmp_path)
    logger.start(make_info())
    logger.log(1, VALUES)
    logger.close()
    assert fake.asked["mode"] == "offline"
    assert fake.asked["config"] == {"recipe": "test"}
    assert fake.logged == [(1, VALUES)]
    assert fake.finished == 1
