"""What the tests of `nn` share: a block, a model of a few of them, and its loss and gradients."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from stagewright import nn


class Block(nnx.Module):
    """A residual layer of width 8 with two dropouts that share one stream."""

    def __init__(self, rngs, rate=0.0):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nn.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(self.dropout(jax.nn.gelu(self.up(x)))))


class Model(nn.PipelinedModule):
    """An embedding, some blocks, a norm."""

    def __init__(self, rngs, *, count=4, rate=0.0, remat=None, make=Block):
        self.embed = nn.Embed(5, 8, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.blocks = self.layers(lambda r: make(r, rate), count, rngs=rngs, remat=remat)
        self.norm = nn.LayerNorm(8, rngs=rngs)

    def __call__(self, tokens):
        return self.norm(self.blocks(self.embed(tokens)))

    def loss(self, batch):
        return jnp.sum(self(batch) ** 3), jnp.float32(batch.size), {}


def gradients(model, tokens):
    """Return a function from parameters to (loss, gradients), and the parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return nnx.merge(graphdef, params, rest).loss(tokens)[0]

    return jax.value_and_grad(loss), params


@pytest.fixture
def tokens():
    return jnp.arange(10, dtype=jnp.int32).reshape(2, 5) % 5


@pytest.fixture
def block():
    return Block


@pytest.fixture
def model():
    return Model


@pytest.fixture
def value_and_grad():
    return gradients
