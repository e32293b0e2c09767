"""The claim: norms follow their formulas in float32 and give back the dtype that came in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn

BOTH = [nn.LayerNorm, nn.RMSNorm]


def reference(kind, x, scale, bias):
    x = np.asarray(x, np.float64)
    if kind is nn.LayerNorm:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * scale + bias


def with_parameters(kind):
    layer = kind(16, rngs=nnx.Rngs(0))
    layer.scale[...] = jnp.linspace(0.5, 2.0, 16)
    bias = np.zeros(16)
    if kind is nn.LayerNorm:
        layer.bias[...] = jnp.linspace(-1.0, 1.0, 16)
        bias = np.linspace(-1.0, 1.0, 16)
    return layer, np.linspace(0.5, 2.0, 16), bias


@pytest.mark.parametrize("kind", BOTH)
def test_follows_its_formula(kind):
    layer, scale, bias = with_parameters(kind)
    x = jax.random.normal(jax.random.key(1), (2, 3, 16)) * 4 + 1
    np.testing.assert_allclose(layer(x), reference(kind, x, scale, bias), rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_drown_the_variance():
    x = jax.random.normal(jax.random.key(1), (4, 64)) + 3000.0
    got = nn.LayerNorm(64, rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(got, reference(nn.LayerNorm, x, 1.0, 0.0), atol=2e-3)


@pytest.mark.parametrize("kind", BOTH)
def test_bfloat16_in_bfloat16_out_float32_between(kind):
    layer, scale, bias = with_parameters(kind)
    x = jax.random.normal(jax.random.key(1), (2, 16)).astype(jnp.bfloat16)
    got = layer(x)
    assert got.dtype == jnp.bfloat16
    expected = reference(kind, x.astype(jnp.float32), scale, bias)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=2**-8, atol=2**-8)
    assert kind(16, dtype=jnp.float32, rngs=nnx.Rngs(0))(x).dtype == jnp.float32


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_are_named(kind):
    layer = kind(16, axes=("mlp",), rngs=nnx.Rngs(0))
    names = [nn.axis_names(variable) for _, variable in nnx.to_flat_state(nnx.state(layer))]
    assert set(names) == {("mlp",)}


def test_the_bias_can_be_left_out():
    leaves = jax.tree.leaves(nnx.state(nn.LayerNorm(16, use_bias=False, rngs=nnx.Rngs(0))))
    assert len(leaves) == 1
