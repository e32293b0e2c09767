"""The claim: dropout zeroes about the given share, keeps the mean, and can be switched off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn


def test_zeroes_a_share_and_scales_the_rest():
    got = np.asarray(nn.Dropout(0.25, rngs=nnx.Rngs(0))(jnp.ones(10_000)))
    assert 0.23 < np.mean(got == 0) < 0.27
    np.testing.assert_allclose(got[got != 0], 1 / 0.75, rtol=1e-6)


def test_two_calls_and_two_layers_differ():
    rngs = nnx.Rngs(0)
    first, second = nn.Dropout(0.5, rngs=rngs), nn.Dropout(0.5, rngs=rngs)
    masks = [layer(jnp.ones(64)) for layer in (first, first, second)]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 3


def test_eval_switches_it_off():
    layer = nn.Dropout(0.5, rngs=nnx.Rngs(0))
    layer.eval()
    np.testing.assert_array_equal(layer(jnp.ones(8)), np.ones(8))
    layer.train()
    assert (layer(jnp.ones(64)) == 0).any()


def test_rate_zero_keeps_no_state_and_draws_alike():
    none, some = nnx.Rngs(0), nnx.Rngs(0)
    layer = nn.Dropout(0.0, rngs=none)
    nn.Dropout(0.5, rngs=some)
    assert jax.tree.leaves(nnx.state(layer)) == []
    np.testing.assert_array_equal(layer(jnp.ones(8)), np.ones(8))
    assert jnp.array_equal(none.params(), some.params())


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_impossible_rate_is_refused(rate):
    with pytest.raises(ValueError, match=f"from 0 to 1, got {rate}"):
        nn.Dropout(rate, rngs=nnx.Rngs(0))
