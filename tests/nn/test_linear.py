"""The claim: `Linear` is `nnx.Linear` with names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_is_that_of_flax(use_bias, dtype):
    ours = nn.Linear(4, 6, axes=("embed", "mlp"), use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0))
    flax = nnx.Linear(4, 6, use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    np.testing.assert_array_equal(ours(x), flax(x))
    assert ours(x).dtype == (dtype or jnp.float32)


def test_initialisers_and_dtypes_are_the_caller_s():
    layer = nn.Linear(
        4,
        6,
        axes=("embed", None),
        kernel_init=nnx.initializers.constant(2.0),
        bias_init=nnx.initializers.constant(3.0),
        param_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    assert layer.kernel.get_value().dtype == layer.bias.get_value().dtype == jnp.bfloat16
    np.testing.assert_array_equal(layer(jnp.ones((1, 4), jnp.bfloat16)), np.full((1, 6), 11.0))
    assert nn.axis_names(layer.bias) == (None,)


def test_other_axes_are_refused():
    with pytest.raises(ValueError, match=r"axes for \(in_dim, out_dim\), got \('embed',\)"):
        nn.Linear(4, 6, axes=("embed",), rngs=nnx.Rngs(0))
