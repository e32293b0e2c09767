"""The claim: tables are looked up and attended over exactly; a tied one is one parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn


def make(**options):
    return nn.Embed(7, 4, rngs=nnx.Rngs(0), **options)


def test_is_that_of_flax():
    ours = make(embedding_init=nnx.initializers.normal(1.0))
    flax = nnx.Embed(7, 4, embedding_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0))
    ids = jnp.array([[0, 6, 3], [3, 3, 1]])
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    np.testing.assert_array_equal(ours(ids), flax(ids))
    np.testing.assert_allclose(ours.attend(x), flax.attend(x), rtol=1e-6)


def test_gradient_sums_over_repeated_tokens_in_the_table_s_dtype():
    embed = make(dtype=jnp.bfloat16)
    graphdef, params = nnx.split(embed)
    ids = jnp.zeros(300, jnp.int32)  # 300 is not a bfloat16 sum of ones: that stops at 256
    grads = jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(ids), dtype=jnp.float32))(params)
    np.testing.assert_array_equal(grads["embedding"][...][0], np.full(4, 300.0))


@pytest.mark.parametrize("token", [-1, 7, 100])
def test_ids_outside_show_as_nan(token):
    assert np.isnan(make()(jnp.array([token]))).all()


def test_ids_must_be_integers():
    with pytest.raises(ValueError, match="integer token ids, got float32"):
        make()(jnp.ones(3))


def test_tied_table_is_one_parameter_with_both_gradients():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = make(embedding_init=nnx.initializers.normal(1.0))
            self.head = self.embed

        def __call__(self, ids):
            return self.head.attend(self.embed(ids))

    model = Tied()
    graphdef, params = nnx.split(model)
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [(7, 4)]
    ids = jnp.array([1, 2])
    (grads,) = jax.tree.leaves(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(ids)))(params))
    table = model.embed.embedding[...]
    expected = jax.grad(lambda t: jnp.sum(t[ids] @ t.T))(table)
    np.testing.assert_allclose(grads, expected, rtol=1e-6)


def test_positions_are_the_first_rows():
    positions = nn.PositionEmbed(5, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    rows = positions(3)
    assert (rows.shape, rows.dtype) == ((1, 3, 4), jnp.bfloat16)
    np.testing.assert_array_equal(rows[0], positions.embedding[...][:3].astype(jnp.bfloat16))


def test_more_positions_than_learned_are_refused():
    with pytest.raises(ValueError, match="6 tokens is longer than the 5"):
        nn.PositionEmbed(5, 4, rngs=nnx.Rngs(0))(6)
