"""The GPT: causal, tied, of the stated size, and as unsure at first as it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright.recipes.gpt_config import GPTConfig

CONFIG = GPTConfig(vocab=256, context=16, width=32, depth=2, heads=2)


@pytest.fixture(scope="module")
def model():
    return CONFIG.build(nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.int32)


def test_its_size_is_that_of_the_formula(model) -> None:
    width, depth = CONFIG.width, CONFIG.depth
    block = 12 * width**2 + 13 * width
    wanted = (CONFIG.vocab + CONFIG.context) * width + depth * block + 2 * width
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == wanted


def test_logits_do_not_see_the_future(model, tokens: np.ndarray) -> None:
    changed = tokens[:, :16].copy()
    changed[:, 9:] = 7
    before, after = model(tokens[:, :16]), model(changed)
    assert before.shape == (4, 16, 256)
    np.testing.assert_allclose(before[:, :9], after[:, :9], rtol=1e-5, atol=1e-6)
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 1e-3


def test_the_first_loss_is_that_of_a_guess(model, tokens: np.ndarray) -> None:
    total, count, metrics = model.loss({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    assert count == 64
    assert float(total / count) == pytest.approx(np.log(256), abs=0.1)
    assert 0 <= metrics["accuracy"] <= count


def test_a_mask_leaves_targets_out(model, tokens: np.ndarray) -> None:
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    mask = np.zeros((4, 16), bool)
    mask[1] = True
    total, count, metrics = model.loss({**batch, "mask": mask})
    alone = model.loss({name: leaf[1:2] for name, leaf in batch.items()})
    assert count == 16
    np.testing.assert_allclose(total, alone[0], rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], alone[2]["accuracy"])


def test_remat_changes_no_gradient(tokens: np.ndarray) -> None:
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def gradients(config: GPTConfig):
        graphdef, params, rest = nnx.split(config.build(nnx.Rngs(0)), nnx.Param, ...)
        loss = lambda p: nnx.merge(graphdef, p, rest).loss(batch)[0]  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

    plain = gradients(CONFIG)
    rematerialised = gradients(GPTConfig(context=16, width=32, depth=2, heads=2, remat="full"))
    for ours, theirs in zip(rematerialised, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width of 30 .*4 heads"):
        GPTConfig(width=30, heads=4).build(nnx.Rngs(0))


def test_dropout_is_off_in_evaluation(tokens: np.ndarray) -> None:
    config = GPTConfig(context=16, width=32, depth=2, heads=2, dropout=0.5)
    model = config.build(nnx.Rngs(0))
    training = model(tokens[:, :16])
    model.eval()
    evaluated = model(tokens[:, :16])
    np.testing.assert_array_equal(evaluated, model(tokens[:, :16]))
    assert not jnp.array_equal(training, evaluated)
