"""The claim: sums and counts, exact under any split into micro-batches and never NaN for none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn import token_cross_entropy, token_mean

LOGITS = jax.random.normal(jax.random.key(0), (4, 3, 7)) * 3
TARGETS = jax.random.randint(jax.random.key(1), (4, 3), 0, 7)
MASK = jnp.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])


def per_token(logits, targets):
    logits = np.asarray(logits, np.float64)
    picked = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - picked


@pytest.mark.parametrize("mask", [None, MASK, MASK.astype(bool), MASK * 0.5])
def test_is_the_textbook_s(mask):
    total, count = token_cross_entropy(LOGITS, TARGETS, mask)
    weight = np.ones((4, 3)) if mask is None else np.asarray(mask, np.float64)
    np.testing.assert_allclose(total, (per_token(LOGITS, TARGETS) * weight).sum(), rtol=1e-6)
    np.testing.assert_allclose(count, weight.sum(), rtol=1e-6)
    assert total.dtype == count.dtype == jnp.float32


def test_gradient_is_softmax_minus_one_hot():
    grads = jax.grad(lambda x: token_cross_entropy(x, TARGETS, MASK)[0])(LOGITS)
    expected = (jax.nn.softmax(LOGITS) - jax.nn.one_hot(TARGETS, 7)) * MASK[..., None]
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_mean_does_not_depend_on_micro_batches(num_parts):
    parts = [jnp.split(array, num_parts) for array in (LOGITS, TARGETS, MASK)]
    sums = [token_cross_entropy(*part) for part in zip(*parts, strict=True)]
    mean = token_mean(sum(total for total, _ in sums), sum(count for _, count in sums))
    np.testing.assert_allclose(
        mean, token_mean(*token_cross_entropy(LOGITS, TARGETS, MASK)), rtol=1e-6
    )


def test_nothing_counted_is_zero_with_gradient_zero():
    def mean(logits):
        return token_mean(*token_cross_entropy(logits, TARGETS, jnp.zeros((4, 3))))

    value, grads = jax.value_and_grad(mean)(LOGITS)
    assert float(value) == 0.0
    np.testing.assert_array_equal(grads, np.zeros_like(LOGITS))


def test_large_logits_do_not_overflow():
    logits = jnp.array([[1e4, 0.0], [-1e4, 0.0]])
    total, _ = token_cross_entropy(logits, jnp.array([0, 0]))
    assert float(total) == 1e4


def test_bfloat16_logits_are_summed_in_float32():
    logits = jnp.zeros((1000, 2), jnp.bfloat16)
    total, count = token_cross_entropy(logits, jnp.zeros(1000, jnp.int32))
    np.testing.assert_allclose([total, count], [1000 * np.log(2), 1000], rtol=1e-5)


@pytest.mark.parametrize("target", [-100, 7])
def test_targets_outside_show_unless_masked(target):
    targets = TARGETS.at[0, 0].set(target)
    assert np.isnan(token_cross_entropy(LOGITS, targets)[0])
    masked = jnp.ones((4, 3)).at[0, 0].set(0.0)
    total, grads = jax.value_and_grad(lambda x: token_cross_entropy(x, targets, masked)[0])(LOGITS)
    assert np.isfinite(total)
    assert np.isfinite(grads).all()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"got \(4, 3, 7\), \(4, 2\)"):
        token_cross_entropy(LOGITS, TARGETS[:, :2])
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(4,\)"):
        token_cross_entropy(LOGITS, TARGETS, jnp.ones(4))
