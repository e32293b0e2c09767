"""Calling one layer as a function of its state.

`Layers` runs layers under `jax.lax.scan` and `jax.checkpoint`, where a Module cannot be changed
from within.  So a layer is split into (graphdef, state) and called here: merged anew, given its own
random keys, and thrown away afterwards.  What it did to itself must therefore not matter: the
counts of its random streams are forgotten (whoever owns the step makes new keys for each
micro-batch and step), and any other change is refused, by name.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def call_pure(
    graphdef: Any,
    state: nnx.State,
    index: jax.Array | None,
    carry: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    path: str,
) -> Any:
    """Call a layer on a carry; return the new carry.

    Args:
      graphdef: the layer's structure, from `nnx.split`.
      state: the layer's state, from `nnx.split`.
      index: uint32[], the layer's number in the model, folded into its random keys; None if it has
        none.
      carry: the layer's first argument, a pytree of arrays.
      args: the other positional arguments.
      kwargs: the keyword arguments.
      path: the layer's path, for messages.

    Returns:
      What the layer returned, of the same tree structure, shapes and dtypes as `carry`.

    Raises:
      ValueError: if the layer returned another structure, shape or dtype, or changed its state.
    """
    layer = nnx.merge(graphdef, state, copy=True)
    if index is not None:
        _fold_into_keys(layer, index)
    before = _flat_values(layer)
    result = jax.tree.map(jnp.asarray, layer(carry, *args, **kwargs))
    _refuse_changes(before, graphdef, layer, path)
    _check_carry(carry, result, f"{path} ({type(layer).__name__})")
    return result


def has_random_keys(state: nnx.State) -> bool:
    """Return whether a layer's state holds a random stream."""
    return any(isinstance(leaf, nnx.RngKey) for _, leaf in nnx.to_flat_state(state))


def _fold_into_keys(layer: nnx.Module, index: jax.Array) -> None:
    for _, key in nnx.iter_graph(layer):
        if isinstance(key, nnx.RngKey):
            key.set_value(_fold_in(key.get_value(), index))


def _fold_in(key: jax.Array, index: jax.Array) -> jax.Array:
    if key.ndim:  # a stream split with nnx.split_rngs
        return jax.vmap(_fold_in, in_axes=(0, None))(key, index)
    return jax.random.fold_in(key, index)


def _flat_values(layer: nnx.Module) -> dict[tuple[Any, ...], tuple[str, Any]]:
    """Return, by path, each leaf's type name and the very object it holds."""
    return {
        path: (
            type(leaf).__name__,
            leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf,
        )
        for path, leaf in nnx.to_flat_state(nnx.state(layer))
        if not isinstance(leaf, nnx.RngCount)
    }


def _refuse_changes(
    before: dict[tuple[Any, ...], tuple[str, Any]], graphdef: Any, layer: nnx.Module, path: str
) -> None:
    for place, (kind, value) in _flat_values(layer).items():
        if place not in before or before[place][1] is not value:
            name = "/".join((path, *map(str, place)))
            raise ValueError(
                f"a layer changed the {kind} at {name} while it ran; state carried from one call "
                "to the next (batch statistics, caches, sown values) is not supported inside "
                "`layers`: return the value in the carry instead"
            )
    if nnx.graphdef(layer) != graphdef:
        raise ValueError(
            f"{path} ({type(layer).__name__}) changed one of its attributes while it ran, which "
            "would be lost: return the value in the carry instead"
        )


def _check_carry(carry: Any, result: Any, name: str) -> None:
    expected, got = (jax.tree.map(_describe, tree) for tree in (carry, result))
    if expected != got:
        raise ValueError(
            f"{name} must return what it is given, in structure, shape and dtype, so that layers "
            f"can follow one another; it was given {expected} and returned {got}"
        )


def _describe(leaf: jax.Array) -> str:
    return jax.core.ShapedArray(leaf.shape, leaf.dtype).str_short(short_dtypes=True)
