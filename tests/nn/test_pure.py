"""The claim: a layer that would lose something it did to itself is refused by name."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from stagewright import nn


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Averages(Plain):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class Keeps(Plain):
    def __call__(self, x):
        self.kept = nnx.Intermediate(x)
        return x


class Learns(Plain):
    def __call__(self, x):
        self.linear.kernel[...] = self.linear.kernel[...] * 2.0
        return x


class Marks(Plain):
    def __call__(self, x):
        self.called = True
        return x


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Averages, "changed the BatchStat at layers/0/norm/mean"),
        (Keeps, "changed the Intermediate at layers/0/kept"),
        (Learns, "changed the Param at layers/0/linear/kernel"),
        (Marks, r"layers/0 \(Marks\) changed one of its attributes"),
    ],
)
def test_changed_state_is_refused(make, message, count, remat):
    layers = nn.Layers(make, count, rngs=nnx.Rngs(0), remat=remat)
    with pytest.raises(ValueError, match=message):
        layers(jnp.ones((2, 4)))


def test_batch_statistics_that_stay_are_allowed():
    layers = nn.Layers(Averages, 2, rngs=nnx.Rngs(0))
    layers.eval()
    assert layers(jnp.ones((2, 4))).shape == (2, 4)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("change", "returned"),
    [
        (lambda x: x.astype(jnp.bfloat16), r"bf16\[2,4\]"),
        (lambda x: x[:, :3], r"f32\[2,3\]"),
        (lambda x: (x, x), "f32"),
    ],
)
def test_another_carry_is_refused_with_both(change, returned, count):
    class Changes(Plain):
        def __call__(self, x):
            return change(x)

    layers = nn.Layers(Changes, count, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"given f32\[2,4\] and returned .*{returned}"):
        layers(jnp.ones((2, 4)))


def test_split_keys_are_folded_one_by_one():
    class Draws(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs.split({"dropout": 2})

        def __call__(self, x):
            return x + jax.random.normal(self.rngs.dropout.key[...][0], x.shape)

    layers = nn.Layers(Draws, 2, rngs=nnx.Rngs(dropout=0))
    assert layers(jnp.zeros(3)).shape == (3,)
