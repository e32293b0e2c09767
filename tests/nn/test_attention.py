"""The claim: attention is the textbook's, sees no future, and shares key/value heads by groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn


def make(num_kv_heads=4, **options):
    return nn.Attention(16, 4, num_kv_heads=num_kv_heads, rngs=nnx.Rngs(0), **options)


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 6, 16))


def textbook(layer, x, allowed):
    """Compute attention head by head, in float64."""
    x, size = np.asarray(x, np.float64), layer.head_dim
    kernels = [linear.kernel[...] for linear in (layer.query, layer.key, layer.value)]
    products = [x @ np.asarray(kernel, np.float64) for kernel in kernels]
    group, heads = layer.num_heads // layer.num_kv_heads, []
    for head in range(layer.num_heads):
        mine, shared = (slice(n * size, (n + 1) * size) for n in (head, head // group))
        q, k, v = products[0][..., mine], products[1][..., shared], products[2][..., shared]
        scores = np.where(allowed, q @ k.swapaxes(1, 2) / np.sqrt(size), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    return np.concatenate(heads, -1) @ np.asarray(layer.out.kernel[...])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_is_the_textbook_s(x, num_kv_heads, causal):
    layer = make(num_kv_heads, causal=causal, use_bias=False)
    allowed = np.tril(np.ones((6, 6), bool)) if causal else np.ones((6, 6), bool)
    np.testing.assert_allclose(layer(x), textbook(layer, x, allowed), rtol=1e-4, atol=1e-5)


def test_grouped_queries_are_repeated_key_value_heads(x):
    grouped, full = make(2), make(4)
    for name in ("query", "out"):
        getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name in ("key", "value"):
        heads = getattr(grouped, name).kernel[...].reshape(16, 2, 4)
        getattr(full, name).kernel[...] = jnp.repeat(heads, 2, axis=1).reshape(16, 16)
    np.testing.assert_allclose(grouped(x), full(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotary", [None, nn.Rotary()])
@pytest.mark.parametrize("position", [1, 3, 5])
def test_future_tokens_do_not_change_the_past(x, position, rotary):
    layer = make(2, rotary=rotary)
    changed = layer(x.at[:, position:].add(1.0))
    np.testing.assert_array_equal(changed[:, :position], layer(x)[:, :position])
    assert not np.allclose(changed[:, position:], layer(x)[:, position:])


def test_rotary_attention_ignores_a_shift_of_all_positions(x):
    layer = make(rotary=nn.Rotary())
    positions = jnp.arange(6)[None]
    shifted = layer(x, positions=positions + 40)
    np.testing.assert_allclose(layer(x, positions=positions), shifted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(layer(x), layer(x, positions=positions))
    assert not np.allclose(layer(x), layer(x, positions=2 * positions), atol=1e-4)


def test_mask_keeps_packed_documents_apart(x):
    document = jnp.array([0, 0, 0, 1, 1, 1])
    mask = (document[:, None] == document[None, :])[None, None]
    layer = make(2)
    apart = jnp.concatenate((layer(x[:, :3]), layer(x[:, 3:])), axis=1)
    np.testing.assert_allclose(layer(x, mask=mask), apart, rtol=1e-5, atol=1e-6)


def test_bfloat16_stays_close_and_keeps_its_dtype(x):
    narrow = make(dtype=jnp.bfloat16)(x)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), make()(x), atol=0.03)


def test_heads_need_not_fill_the_width(x):
    layer = nn.Attention(16, 3, head_dim=8, rngs=nnx.Rngs(0))
    assert layer.query.kernel.shape == (16, 24)
    assert layer(x).shape == x.shape


def test_parameters_are_named_for_megatron_s_split():
    layer = make(2)
    assert nn.axis_names(layer.query.kernel) == ("embed", "heads")
    assert nn.axis_names(layer.key.kernel) == nn.axis_names(layer.value.kernel)
    assert nn.axis_names(layer.key.kernel) == ("embed", "kv_heads")
    assert nn.axis_names(layer.out.kernel) == ("heads", "embed")
    assert nn.axis_names(layer.out.bias) == ("embed",)


def test_output_may_start_otherwise():
    zeros = nnx.initializers.zeros_init()
    assert not make(out_init=zeros).out.kernel[...].any()
    assert make(out_init=zeros).query.kernel[...].any()


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 query heads do not divide into 3"):
        make(3)
    with pytest.raises(ValueError, match="width of 10 does not divide into 4"):
        nn.Attention(10, 4, rngs=nnx.Rngs(0))
