"""The claim: the feed-forward layers follow their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 3, 4))


def make(activation, **options):
    return nn.MLP(4, 8, activation=activation, rngs=nnx.Rngs(0), **options)


def test_gelu_is_gpt_s(x):
    layer = make("gelu")
    hidden = x @ layer.up.kernel[...]
    inner = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
    expected = (0.5 * hidden * (1 + jnp.tanh(inner))) @ layer.down.kernel[...]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert not hasattr(layer, "gate")


def test_swiglu_is_llama_s(x):
    layer = make("swiglu", use_bias=False)
    gate, up = x @ layer.gate.kernel[...], x @ layer.up.kernel[...]
    expected = (gate / (1 + jnp.exp(-gate)) * up) @ layer.down.kernel[...]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert len(jax.tree.leaves(nnx.state(layer))) == 3


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_parameters_are_named_for_megatron_s_split(activation):
    layer = make(activation)
    assert nn.axis_names(layer.up.kernel) == ("embed", "mlp")
    assert nn.axis_names(layer.down.kernel) == ("mlp", "embed")
    if activation == "swiglu":
        assert nn.axis_names(layer.gate.kernel) == ("embed", "mlp")


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 2, 3, 4)])
def test_takes_any_rank(shape):
    assert make("swiglu", dtype=jnp.bfloat16)(jnp.ones(shape)).shape == shape


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'gelu' and 'swiglu', got 'relu'"):
        make("relu")
