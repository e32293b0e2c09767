"""The claim: products of turned queries and keys depend on their distance only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.nn import Rotary

QUERY = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
KEY = jax.random.normal(jax.random.key(1), (1, 1, 1, 8))


def score(query_position, key_position):
    turn = Rotary()
    query = turn(QUERY, jnp.array([[query_position]]))
    return float(jnp.sum(query * turn(KEY, jnp.array([[key_position]]))))


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_only_the_distance_counts(first, second, shift):
    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=2e-3)


def test_distance_counts():
    assert abs(score(0, 0) - score(0, 3)) > 1e-2


def test_turns_pairs_by_the_papers_angles():
    x = np.asarray(jax.random.normal(jax.random.key(2), (2, 5, 3, 4)), np.float64)
    turned = np.empty_like(x)
    for position in range(5):
        for pair in range(2):
            angle = position * 100.0 ** (-2 * pair / 4)
            rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            both = x[:, position, :, [pair, pair + 2]]
            turned[:, position, :, [pair, pair + 2]] = np.einsum("ij,jbn->ibn", rotation, both)
    got = Rotary(base=100.0)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, turned, rtol=1e-5, atol=1e-5)


def test_keeps_lengths_and_the_first_position():
    x = jax.random.normal(jax.random.key(3), (2, 6, 3, 8))
    turned = Rotary()(x)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=3), jnp.linalg.norm(x, axis=3), rtol=1e-5
    )
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])


def test_positions_may_differ_by_row():
    x = jax.random.normal(jax.random.key(4), (2, 3, 1, 8))
    shifted = Rotary()(x, jnp.array([[0, 1, 2], [5, 6, 7]]))
    np.testing.assert_array_equal(shifted[0], Rotary()(x)[0])
    assert not np.allclose(shifted[1], Rotary()(x)[1])


def test_keeps_the_dtype():
    assert Rotary()(jnp.ones((1, 2, 1, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_odd_heads_are_refused():
    with pytest.raises(ValueError, match="head_dim is 3"):
        Rotary()(jnp.ones((1, 2, 1, 3)))
