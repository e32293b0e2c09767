"""50 steps of gpt3-nano give the same losses under every schedule as on one device."""

import dataclasses

import numpy as np
import pytest

from stagewright.recipes import RECIPES
from stagewright.trainer.config import EngineConfig, MeshConfig
from stagewright.trainer.corpus import read_corpus
from stagewright.trainer.data import TextBatches
from stagewright.trainer.optimizers import build_optimizer
from stagewright.trainer.trainer import Trainer

STEPS = 50

pytestmark = pytest.mark.slow


def losses(**engine: object) -> list[float]:
    base = RECIPES["gpt3-nano"]()
    chosen: EngineConfig = dataclasses.replace(base.engine, **engine)
    mesh = MeshConfig() if chosen.kind == "single" else base.mesh
    text = read_corpus(max_bytes=base.data.max_bytes).training
    batches = TextBatches(text, batch=base.data.batch, length=base.data.length, seed=base.seed)
    trainer = Trainer(
        model=base.model.build,
        optimizer=build_optimizer(base.optimizer, base.steps),
        mesh=mesh.build(),
        engine=chosen.build(),
        seed=base.seed,
    )
    return trainer.fit(batches, STEPS).losses


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    return losses(kind="single")


def test_one_device_learns(one_device: list[float]) -> None:
    assert 5.2 < one_device[0] < 5.6
    assert one_device[-1] < 3.1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zbh1"])
def test_every_schedule_gives_the_same_losses(schedule: str, one_device: list[float]) -> None:
    np.testing.assert_allclose(losses(schedule=schedule), one_device, rtol=1e-5)
