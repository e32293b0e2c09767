"""The command line: strict names, exit codes, one clear message, and no JAX before a run starts."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from stagewright.trainer.cli import main

TINY = [
    *("--steps", "3", "--eval-batches", "1", "--sample.length", "8"),
    *("--data.batch", "4", "--data.length", "16", "--data.max-bytes", "100000"),
    *("--model.context", "16", "--model.width", "16", "--model.depth", "2", "--model.heads", "2"),
    *("--engine.microbatches", "2"),
]


def fresh_environment() -> dict[str, str]:
    """The environment of a user, who knows nothing of simulated devices."""
    return {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}


def stagewright(*words: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stagewright.trainer.cli", *words],
        cwd=cwd,
        env=fresh_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_train_runs_from_start_to_end(tmp_path: pathlib.Path) -> None:
    ended = stagewright("train", "gpt3-nano", *TINY, "--run-dir", "out", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "out"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    record = json.loads((folder / "config.json").read_text())
    assert record["recipe"] == "gpt3-nano"
    assert record["changed"]["model.width"] == 16
    assert record["config"]["model"]["width"] == 16
    assert (folder / "checkpoints" / "3").is_dir()
    for words in (
        "changed   steps: ",
        "pipe=2",
        "MpmdEngine, schedule 1f1b, 2 micro-batches",
        "step 3/3  loss 5.",
        "--- sample ---\ndef ",
        str(folder / "metrics.jsonl"),
        str(folder / "checkpoints" / "3"),
    ):
        assert words in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr

    again = stagewright("train", "gpt3-nano", *TINY, "--run-dir", "out", cwd=tmp_path)
    assert again.returncode == 1
    assert "is not empty" in again.stderr
    assert "--overwrite" in again.stderr
    assert "Traceback" not in again.stderr


def test_help_needs_no_jax(tmp_path: pathlib.Path) -> None:
    program = (
        "import sys; from stagewright.trainer.cli import main\n"
        "codes = []\n"
        "for words in (['--help'], ['recipes'], ['train', 'gpt3-nano', '--help']):\n"
        "    codes.append(main(words))\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'wandb', 'tensorflow', 'numpy'}\n"
        "print(codes, sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[0, 0, 0] []"
    for words in ("gpt3-nano", "--engine.schedule", "--optimizer.learning-rate", "(default: "):
        assert words in ended.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "gpt3nano"], "Did you mean 'gpt3-nano'?"),
        (["train", "gpt3-nano", "--engine.shedule", "gpipe"], "--engine.schedule"),
        (["train", "gpt3-nano", "--model.wdth", "3"], "--model.width"),
        (["train", "gpt3-nano", "--step", "3"], "--steps"),
        (["train", "gpt3-nano", "--engine.microbatches", "x"], "invalid literal"),
        (["train", "gpt3-nano", "--engine.kind", "spmx"], "Invalid choice"),
        (["recipes", "all"], "takes no arguments"),
    ],
)
def test_wrong_usage_is_refused_with_the_nearest_name(words, message: str, capsys) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.path", "/no/such/file"], "no file or folder /no/such/file"),
        (["--data.batch", "6", "--engine.microbatches", "4"], "does not divide"),
        (["--data.length", "32"], "--model.context is 16"),
        (["--model.vocab", "100"], "at least 256"),
        (["--engine.schedule", "1f1bb"], "Did you mean '1f1b'"),
        (["--engine.kind", "single"], "has no pipeline, but the mesh has pipe=2"),
        (["--mesh.pipe", "3"], "2 layers"),
        (["--optimizer.b1", "2"], "optimizer.b1 must be 0.0 to 1.0, got 2.0"),
    ],
)
def test_settings_that_do_not_fit_end_with_one_message(words, message, capsys, tmp_path) -> None:
    run_dir = tmp_path / "out"
    assert main(["train", "gpt3-nano", *TINY, "--run-dir", str(run_dir), *words]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("stagewright: ")
    assert len(told.splitlines()) <= 4
    assert not run_dir.exists(), "nothing is left behind"


def test_debug_shows_where(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        main(["train", "gpt3-nano", "--debug", "--data.path", str(tmp_path / "nowhere")])


def test_no_command_prints_the_help_and_the_version_is_told(capsys) -> None:
    assert main([]) == 2
    assert "usage: stagewright COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()
    assert main(["train"]) == 2
    assert "gpt3-nano" in capsys.readouterr().out
