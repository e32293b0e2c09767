"""The steps that were asked for are drawn, planned above measured; an engine without tasks says so."""

import json

import optax
import pytest

from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine
from stagewright.pipelining.mesh import MeshSpec
from stagewright.trainer.profiling import StepProfile
from stagewright.trainer.trainer import Trainer


def train(net, batches, folder, engine, mesh, capsys):
    trainer = Trainer(
        model=net,
        optimizer=optax.sgd(0.1),
        mesh=mesh,
        engine=engine,
        profile=StepProfile.parse("2:4", folder),
    )
    trainer.fit(batches(5), 5)
    return capsys.readouterr().out


def test_planned_and_measured_steps_are_drawn(tiny_net, tiny_batches, tmp_path, capsys) -> None:
    engine, mesh = MpmdEngine(microbatches=2), MeshSpec(pipe=2)
    said = train(tiny_net, tiny_batches, tmp_path / "profile", engine, mesh, capsys)
    assert "timeline.html" in said
    assert said.count("profile") == 2  # one line, with the folder's name
    page = (tmp_path / "profile" / "timeline.html").read_text()
    trace = json.loads((tmp_path / "profile" / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    for title in ("planned, with the measured costs", "step 2, measured", "step 3, measured"):
        assert title in page
        assert any(title in name for name in names)
    assert not any("step 4" in name for name in names)
    assert "<svg" in (tmp_path / "profile" / "timeline.svg").read_text()


def test_an_engine_that_measures_nothing_says_so(tiny_net, tiny_batches, tmp_path, capsys) -> None:
    engine = SingleProgramEngine(microbatches=2)
    said = train(tiny_net, tiny_batches, tmp_path / "profile", engine, MeshSpec(), capsys)
    assert "nothing to draw" in said
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("text", ["", "3", "a:b", "3:3", "0:2", "5:2", "1:-1"])
def test_other_texts_are_refused(text: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"first:stop|10:13"):
        StepProfile.parse(text, tmp_path)
