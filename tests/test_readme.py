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


@pytest.mark.parametrize("decorated", [True, False])
def test_the_step_without_a_trainer_learns_either_way(tmp_path, decorated):
    source = BLOCKS[1] if decorated else re.sub(r"^@sw\.mpmd_jit.*\n", "", BLOCKS[1], flags=re.M)
    assert float(run(source, tmp_path).removeprefix("loss ")) < 0.8
