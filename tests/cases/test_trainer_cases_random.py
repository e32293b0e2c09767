"""Cases 22 and 24 of CASES.md, through the Trainer: masks and initial weights know no stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.nn import PipelinedModule
from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.schedules import by_name
from stagewright.trainer.trainer import Trainer

DEPTH, MICROBATCHES, BITS = 4, 4, 20  # a mask's bits make a float32 that is exact

LAYOUTS = [("1f1b", 4), ("zbh1", 2), ("interleaved:2", 2)]


def make_trainer(schedule: str, ranks: int, model) -> Trainer:
    if schedule == "single":
        engine, mesh = SingleProgramEngine(MICROBATCHES), MeshSpec()
    else:
        engine, mesh = MpmdEngine(by_name(schedule), MICROBATCHES), MeshSpec(pipe=ranks)
    return Trainer(model=model, optimizer=optax.sgd(0.0), engine=engine, mesh=mesh, seed=0)


class DropLayer(nnx.Module):
    """Drops ones, and writes down which."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 3)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, carry):
        kept = (self.dropout(jnp.ones(BITS)) > 0).astype(jnp.float32)
        code = jnp.sum(kept * 2.0 ** jnp.arange(BITS))
        x = carry["x"] + jnp.sum(self.kernel[...])
        return {"x": x, "codes": jnp.concatenate([carry["codes"][1:], code[None]])}


class Masks(PipelinedModule):
    """Reports each layer's mask in each micro-batch as a metric."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = self.layers(DropLayer, DEPTH, rngs=rngs)

    def loss(self, batch):
        start = {"x": jnp.sum(batch["slot"].astype(jnp.float32)), "codes": jnp.zeros(DEPTH)}
        out = self.blocks(start)
        codes = {
            f"layer{layer}_slot{slot}": jnp.where(batch["slot"][0] == slot, out["codes"][layer], 0)
            for layer in range(DEPTH)
            for slot in range(MICROBATCHES)
        }
        return out["x"], jnp.float32(1), codes


BATCH = {"slot": np.arange(MICROBATCHES, dtype=np.int32)}


def masks(trainer: Trainer) -> np.ndarray:
    """Masks of one step as integers [layer, micro-batch]."""
    metrics = trainer.fit([BATCH], 1).metrics
    codes = [
        [metrics[f"layer{layer}_slot{slot}"] * MICROBATCHES for slot in range(MICROBATCHES)]
        for layer in range(DEPTH)
    ]
    return np.array(codes).astype(int)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    trainer = make_trainer("single", 1, Masks)
    return np.stack([masks(trainer), masks(trainer)])


def test_case_22_masks_differ_by_step_layer_and_microbatch(reference: np.ndarray) -> None:
    assert reference.shape == (2, DEPTH, MICROBATCHES)
    assert len(np.unique(reference)) == reference.size
    kept = np.mean([bin(code).count("1") / BITS for code in reference.flat])
    assert 0.4 < kept < 0.6


@pytest.mark.parametrize(("schedule", "ranks"), LAYOUTS)
def test_case_22_masks_are_the_same_under_every_schedule(schedule, ranks, reference) -> None:
    trainer = make_trainer(schedule, ranks, Masks)
    np.testing.assert_array_equal(np.stack([masks(trainer), masks(trainer)]), reference)


def test_case_22_nothing_is_dropped_in_evaluation() -> None:
    trainer = make_trainer("single", 1, Masks)
    metrics = trainer.evaluate([{"slot": np.zeros(1, np.int32)}])
    assert metrics["layer2_slot0"] == 2**BITS - 1


def kernels(trainer: Trainer) -> list[np.ndarray]:
    layers = trainer.params["blocks"]["layers"]
    return [np.asarray(layers[i]["kernel"].get_value()) for i in range(DEPTH)]


def test_case_24_initial_weights_differ_among_layers() -> None:
    first = kernels(make_trainer("single", 1, Masks))
    assert len({kernel.tobytes() for kernel in first}) == DEPTH


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("gpipe", 1)])
def test_case_24_initial_weights_know_no_stages(schedule: str, ranks: int) -> None:
    wanted = kernels(make_trainer("single", 1, Masks))
    trainer = make_trainer(schedule, ranks, Masks)
    trainer.fit([BATCH], 1)  # with a learning rate of 0
    for ours, theirs in zip(kernels(trainer), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
