"""The README is true: its Python runs as written and prints what it says, and its pictures are drawn by the project."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.pipelining.drawing import draw_order
from stagewright.pipelining.schedules import ZBH1

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def run(source: str, tmp_path: Path) -> str:
    script = tmp_path / "model.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_picture_is_our_own():
    assert draw_order(ZBH1().order(4, 8)).strip() in README


def test_the_model_prints_what_is_said(tmp_path):
    assert f"`{run(BLOCKS[0], tmp_path)}`" in README


def test_a_schedule_of_ones_own_is_drawn(tmp_path):
    drawn = run(BLOCKS[1], tmp_path)
    assert "bubble 50.0%" in drawn


@pytest.mark.parametrize("decorator", [None, "@jax.jit"])
def test_the_step_without_a_trainer_learns_either_way(tmp_path, decorator):
    source = BLOCKS[2]
    if decorator is not None:
        source = re.sub(r"^@sw\.mpmd_jit.*$", decorator, source, flags=re.MULTILINE)
    assert f"`{run(source, tmp_path)}`" in README
