"""Cases 1, 3, 4 and 30 of CASES.md, through the Trainer: one mean over tokens, one norm.

Whatever the engine, loss and gradient are sums over all tokens of the batch divided by their number,
accumulated in float32, and clipping sees the whole gradient once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.nn import pipeline_yield
from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.schedules import by_name
from stagewright.trainer.trainer import Trainer

ENGINES = ["single", "gpipe", "1f1b", "zbh1"]


def make_trainer(kind: str, model, optimizer, microbatches: int) -> Trainer:
    if kind == "single":
        engine, mesh = SingleProgramEngine(microbatches), MeshSpec()
    else:
        engine, mesh = MpmdEngine(by_name(kind), microbatches), MeshSpec(pipe=2)
    return Trainer(model=model, optimizer=optimizer, engine=engine, mesh=mesh)


class Weighted(nnx.Module):
    """loss = sum of w * toks over the tokens of the mask; the second stage has no parameter."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.float32(1.0))

    def loss(self, batch):
        scaled = pipeline_yield(self.w[...] * batch["toks"])
        return jnp.sum(scaled * batch["mask"]), jnp.sum(batch["mask"]), {}


def batch_of(toks, mask) -> dict[str, np.ndarray]:
    return {"toks": np.array(toks, np.float32), "mask": np.array(mask, np.float32)}


def weight(trainer: Trainer) -> float:
    return float(trainer.params["w"].get_value())


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_case_01_the_mean_is_over_all_tokens(kind: str, microbatches: int) -> None:
    batch = batch_of([[10, 0, 0, 0], [2, 2, 2, 0]], [[1, 0, 0, 0], [1, 1, 1, 0]])
    trainer = make_trainer(kind, Weighted, optax.sgd(1.0), microbatches)
    result = trainer.fit([batch], 1)
    assert result.losses == [4.0]
    assert weight(trainer) == 1.0 - 4.0
    assert result.metrics["tokens"] == 4


@pytest.mark.parametrize("kind", ENGINES)
def test_case_03_a_microbatch_without_a_token_weighs_nothing(kind: str) -> None:
    batch = batch_of([[9, 9, 9], [2, 2, 2]], [[0, 0, 0], [1, 1, 1]])
    trainer = make_trainer(kind, Weighted, optax.sgd(1.0), 2)
    assert trainer.fit([batch], 1).losses == [2.0]
    assert weight(trainer) == 1.0 - 2.0


@pytest.mark.parametrize("kind", ENGINES)
def test_case_03_a_batch_without_a_token_changes_nothing(kind: str) -> None:
    valid = batch_of([[9, 9, 9], [2, 2, 2]], [[0, 0, 1], [1, 1, 1]])
    masked = batch_of([[9, 9, 9], [2, 2, 2]], [[0, 0, 0], [0, 0, 0]])
    trainer = make_trainer(kind, Weighted, optax.adamw(0.1), 2)
    trainer.fit([valid], 1)
    before = jax.tree.map(np.asarray, (trainer.state.params, trainer.state.opt_state))
    result = trainer.fit([masked], 1)
    after = jax.tree.map(np.asarray, (trainer.state.params, trainer.state.opt_state))
    assert result.losses == [0.0]
    assert (result.metrics["skipped"], result.metrics["grad_norm"]) == (1, 0.0)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert trainer.step == 2


class Scaled(nnx.Module):
    """A bfloat16 parameter whose gradient is the batch's scale."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.bfloat16(1.0))

    def loss(self, batch):
        scaled = pipeline_yield(self.w[...] * batch["scale"])
        return jnp.sum(scaled), jnp.float32(1), {}


@pytest.mark.parametrize("kind", ENGINES)
def test_case_04_bfloat16_gradients_are_added_up_in_float32(kind: str) -> None:
    batch = {"scale": np.array([256, 1, 1, 1]).astype(jnp.bfloat16)}
    result = make_trainer(kind, Scaled, optax.sgd(1.0), 4).fit([batch], 1)
    # 259 becomes 260 in bfloat16, over 4 tokens; adding up in bfloat16 would give 256 / 4 = 64.
    assert result.metrics["grad_norm"] == 65.0


class TwoStages(nnx.Module):
    """Gradient 3 in the first stage and 4 in the second."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Param(jnp.float32(0.0))
        self.b = nnx.Param(jnp.float32(0.0))

    def loss(self, batch):
        x = pipeline_yield(3 * self.a[...] * batch["x"])
        return jnp.sum(x + 4 * self.b[...] * batch["x"]), jnp.sum(batch["x"]), {}


@pytest.mark.parametrize("kind", ENGINES)
def test_case_30_the_norm_is_that_of_all_stages(kind: str) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    trainer = make_trainer(kind, TwoStages, optimizer, 2)
    result = trainer.fit([{"x": np.ones(2, np.float32)}], 1)
    assert result.metrics["grad_norm"] == 5.0
    params = {name: float(trainer.params[name].get_value()) for name in "ab"}
    assert params == pytest.approx({"a": -0.6, "b": -0.8}, rel=1e-6)


class Vector(nnx.Module):
    """Gradient [2, 0] in the first micro-batch and [0, 2] in the second."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros(2))

    def loss(self, batch):
        scaled = pipeline_yield(self.w[...][None] * batch["x"])
        return jnp.sum(scaled), jnp.float32(1), {}


@pytest.mark.parametrize("kind", ENGINES)
def test_case_30_the_sum_is_clipped_not_the_microbatches(kind: str) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    trainer = make_trainer(kind, Vector, optimizer, 2)
    trainer.fit([{"x": np.array([[2, 0], [0, 2]], np.float32)}], 1)
    w = np.asarray(trainer.params["w"].get_value())
    np.testing.assert_allclose(w, [-0.70710677, -0.70710677], rtol=1e-6)
