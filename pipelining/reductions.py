"""How the micro-batches' results become the step's: `Sum`, `Mean`, `Max`, `Stack`.

A reduction is data: it names the accumulator's first value, how one micro-batch's result goes in, and what comes out.
The loop of `accumulate_grads` and the pipeline's tasks both do what it says, so they cannot differ.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


@runtime_checkable
class Reduction(Protocol):
    """What every reduction can do.  `aval` has a shape and a dtype; `dtype` is the wish for the accumulator's."""

    def init(self, aval: Any, num_microbatches: int, dtype: Any) -> Array:
        """The accumulator before the first micro-batch."""

    def update(self, accumulator: Array, value: Array, index: Array) -> Array:
        """The accumulator after the micro-batch number `index`, an int32 scalar."""

    def finish(self, accumulator: Array, aval: Any, num_microbatches: int) -> Array:
        """The step's result."""


def accumulator_dtype(dtype: Any, wish: Any) -> Any:
    """The accumulator's dtype for values of `dtype`: a wider floating type is kept, integers stay integers."""
    if wish is None or not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return jnp.promote_types(dtype, wish)


@dataclass(frozen=True, slots=True)
class Sum:
    """Add the micro-batches' values up; same shape and dtype as one of them."""

    def init(self, aval: Any, num_microbatches: int, dtype: Any) -> Array:
        """Zeros, in the accumulator's dtype."""
        del num_microbatches
        return jnp.zeros(aval.shape, accumulator_dtype(_number(aval), dtype))

    def update(self, accumulator: Array, value: Array, index: Array) -> Array:
        """Add one value."""
        del index
        return accumulator + value.astype(accumulator.dtype)

    def finish(self, accumulator: Array, aval: Any, num_microbatches: int) -> Array:
        """Cast back to the values' own dtype."""
        del num_microbatches
        return accumulator.astype(_number(aval))


@dataclass(frozen=True, slots=True)
class Mean:
    """Average the micro-batches' values, each with the same weight; integers become float32."""

    def init(self, aval: Any, num_microbatches: int, dtype: Any) -> Array:
        """Zeros, in the accumulator's dtype."""
        del num_microbatches
        return jnp.zeros(aval.shape, accumulator_dtype(_floating(aval), dtype))

    def update(self, accumulator: Array, value: Array, index: Array) -> Array:
        """Add one value."""
        del index
        return accumulator + value.astype(accumulator.dtype)

    def finish(self, accumulator: Array, aval: Any, num_microbatches: int) -> Array:
        """Divide by the number of micro-batches and cast back."""
        return (accumulator / num_microbatches).astype(_floating(aval))


@dataclass(frozen=True, slots=True)
class Max:
    """Keep the largest value, element by element."""

    def init(self, aval: Any, num_microbatches: int, dtype: Any) -> Array:
        """The smallest value of the dtype."""
        del num_microbatches, dtype
        if aval.dtype == np.bool_:
            return jnp.zeros(aval.shape, np.bool_)
        low = -jnp.inf if jnp.issubdtype(aval.dtype, jnp.inexact) else jnp.iinfo(aval.dtype).min
        return jnp.full(aval.shape, low, aval.dtype)

    def update(self, accumulator: Array, value: Array, index: Array) -> Array:
        """Compare with one value."""
        del index
        return jnp.maximum(accumulator, value)

    def finish(self, accumulator: Array, aval: Any, num_microbatches: int) -> Array:
        """Nothing left to do."""
        del aval, num_microbatches
        return accumulator


@dataclass(frozen=True, slots=True)
class Stack:
    """Keep every micro-batch's value, in the batch's order: shape [num_microbatches, ...]."""

    def init(self, aval: Any, num_microbatches: int, dtype: Any) -> Array:
        """Room for all of them."""
        del dtype
        return _zeros((num_microbatches, *aval.shape), aval.dtype)

    def update(self, accumulator: Array, value: Array, index: Array) -> Array:
        """Write one value at its place."""
        return jax.lax.dynamic_update_index_in_dim(accumulator, value, index, 0)

    def finish(self, accumulator: Array, aval: Any, num_microbatches: int) -> Array:
        """Nothing left to do."""
        del aval, num_microbatches
        return accumulator


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(
            jax.random.key(0, impl=jax.random.key_impl(jnp.empty((), dtype))), shape
        )
    return jnp.zeros(shape, dtype)


def _number(aval: Any) -> Any:
    return jnp.dtype(jnp.int32) if aval.dtype == np.bool_ else aval.dtype


def _floating(aval: Any) -> Any:
    return aval.dtype if jnp.issubdtype(aval.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
