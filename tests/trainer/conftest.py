"""A small model and its batches, for the tests of the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright.nn import PipelinedModule


def wave(key, shape, dtype):
    """Weights that need no random numbers, whose programs take long to compile."""
    del key
    return jnp.sin(jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)


class TinyLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float):
        self.linear = nnx.Linear(4, 4, kernel_init=wave, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x):
        y = jnp.tanh(self.linear(x))
        return x + (self.dropout(y) if self.dropout is not None else y)


class TinyNet(PipelinedModule):
    """Two layers of width 4, and the mean absolute error as a metric of its own."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.blocks = self.layers(lambda r: TinyLayer(r, rate), 2, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x)

    def loss(self, batch):
        difference = self(batch["x"]) - batch["y"]
        total = jnp.sum(jnp.square(difference))
        return total, jnp.float32(len(difference)), {"error": jnp.sum(jnp.abs(difference))}


@pytest.fixture
def tiny_net() -> type[TinyNet]:
    return TinyNet


@pytest.fixture
def dropping_net():
    """The same with dropout."""
    return lambda rngs: TinyNet(rngs, rate=0.25)


@pytest.fixture
def tiny_batches():
    """`tiny_batches(count, size=4, seed=0)` gives a list of batches."""

    def make(count: int, size: int = 4, seed: int = 0) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        return [
            {name: rng.normal(size=(size, 4)).astype(np.float32) for name in ("x", "y")}
            for _ in range(count)
        ]

    return make


@pytest.fixture
def bits():
    """`bits(tree)` gives each leaf's bytes, random keys included."""

    def of_leaf(leaf) -> bytes:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return lambda tree: [of_leaf(leaf) for leaf in jax.tree.leaves(tree)]
