"""From a global batch to micro-batches: which axis of which leaf is cut, and whether it can be.

In: a batch (a pytree, usually a dict, of arrays) and the batch axis of each leaf.  Out: the same
tree with a leading micro-batch dim on every leaf that is cut; leaves without a batch axis are
shared by all micro-batches and stay as they are.  What does not divide is refused here, by name,
before anything runs: nothing is dropped, padded or repeated.
"""

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Batch = Any  # a pytree of arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchSplit:
    """How a global batch becomes micro-batches.

    Micro-batch number i gets the examples [i * size, (i + 1) * size) along the batch axis, in
    order.

    Attributes:
      microbatches: how many, at least 1.
      axes: batch axis of the leaves whose batch axis is not 0, by dotted name ("inputs",
        "image.mask", "0" for the first of a tuple); None for a leaf that every micro-batch reads
        whole.
      data_size: replicas over which each micro-batch is then spread; its size must divide by it.

    Example:
      >>> split = MicrobatchSplit(microbatches=2, axes={"positions": None})
      >>> batch = {"x": np.zeros((6, 4)), "positions": np.zeros((1, 4))}
      >>> {name: leaf.shape for name, leaf in split(batch).items()}
      {'positions': (1, 4), 'x': (2, 3, 4)}
    """

    microbatches: int
    axes: Mapping[str, int | None] = field(default_factory=dict)
    data_size: int = 1

    def __call__(self, batch: Batch) -> Batch:
        """Cut a batch.

        Returns:
          The same tree; a leaf of shape [..., batch, ...] becomes [microbatches, ..., batch /
          microbatches, ...].

        Raises:
          ValueError: if a leaf has no such axis, the leaves disagree on the batch size, it does not
            divide by `microbatches` and `data_size`, or `axes` names a leaf that does not exist.
        """
        self.validate(batch)
        named, treedef = _flatten(batch)
        return jax.tree.unflatten(treedef, [self._cut(name, leaf) for name, leaf in named])

    def in_axes(self, batch: Batch) -> Any:
        """Tell `accumulate_grads` what was cut: 0 for each leaf that was, None for a shared one."""
        named, treedef = _flatten(batch)
        return jax.tree.unflatten(
            treedef, [None if self._axis(name) is None else 0 for name, _ in named]
        )

    def axis_names(self, cut: Batch) -> Any:
        """Name the dims of a batch that was cut: "batch" for the batch axis, None for all others."""
        named, treedef = _flatten(cut)
        return jax.tree.unflatten(treedef, [self._names(name, leaf) for name, leaf in named])

    def shares(self, microbatch: Batch) -> tuple[Batch, Any]:
        """Cut one micro-batch into the replicas' shares.

        Returns:
          The same tree with a leading dim of `data_size` on every leaf that has a batch axis, share
          i with the i-th part of the examples; and for each leaf the axis to map over: 0, or None
          for a leaf that all share.
        """
        named, treedef = _flatten(microbatch)
        leaves = [self._share(name, leaf) for name, leaf in named]
        axes = [None if self._axis(name) is None else 0 for name, _ in named]
        return jax.tree.unflatten(treedef, leaves), jax.tree.unflatten(treedef, axes)

    def validate(self, batch: Batch) -> int:
        """Check a batch, or shapes like it; return its number of examples; raise as a call does."""
        named, _ = _flatten(batch)
        names = [name for name, _ in named]
        if unknown := sorted(set(self.axes) - set(names)):
            raise ValueError(
                f"batch_axes names {unknown}, which the batch does not have; it has {names}"
            )
        sizes = {
            name: self._size(name, leaf) for name, leaf in named if self._axis(name) is not None
        }
        if not sizes:
            raise ValueError(
                f"no leaf of the batch has a batch axis (leaves {names}): nothing can be cut"
            )
        first, size = _most_common(sizes)
        for name, leaf in named:
            if sizes.get(name, size) != size:
                raise ValueError(self._disagreement(first, size, name, leaf))
        self._check_division(first, size)
        return size

    def _axis(self, name: str) -> int | None:
        return self.axes.get(name, 0)

    def _size(self, name: str, leaf: Any) -> int:
        axis = self._axis(name)
        assert axis is not None, name
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"batch leaf {name!r} of shape {tuple(leaf.shape)} has no axis {axis} to cut into "
                f"micro-batches; {_hint(name)}"
            )
        return int(leaf.shape[axis])

    def _cut(self, name: str, leaf: Any) -> Any:
        axis = self._axis(name)
        if axis is None:
            return leaf
        axis %= leaf.ndim
        size = leaf.shape[axis] // self.microbatches
        cut = leaf.reshape((*leaf.shape[:axis], self.microbatches, size, *leaf.shape[axis + 1 :]))
        others = [i for i in range(cut.ndim) if i != axis]
        return cut.transpose((axis, *others)) if axis else cut

    def _names(self, name: str, leaf: Any) -> tuple[str | None, ...]:
        axis = self._axis(name)
        if axis is None:
            return (None,) * leaf.ndim
        place = 1 + axis % (leaf.ndim - 1)
        return tuple("batch" if dim == place else None for dim in range(leaf.ndim))

    def _share(self, name: str, leaf: Any) -> Any:
        axis = self._axis(name)
        if axis is None:
            return leaf
        axis %= leaf.ndim
        size = leaf.shape[axis] // self.data_size
        cut = leaf.reshape((*leaf.shape[:axis], self.data_size, size, *leaf.shape[axis + 1 :]))
        return jnp.moveaxis(cut, axis, 0)

    def _check_division(self, name: str, size: int) -> None:
        pieces = self.microbatches * self.data_size
        if size and size % pieces == 0:
            return
        data = f" on each of data={self.data_size} replicas" if self.data_size > 1 else ""
        raise ValueError(
            f"batch leaf {name!r} holds {size} examples, which do not divide into "
            f"{self.microbatches} micro-batches{data}; use a batch size that is a multiple of "
            f"{pieces}, or another number of micro-batches"
        )

    def _disagreement(self, first: str, size: int, name: str, leaf: Any) -> str:
        return (
            f"batch leaves disagree on the batch size: {first!r} has {size} examples, but {name!r} "
            f"of shape {tuple(leaf.shape)} has {self._size(name, leaf)} on its axis "
            f"{self._axis(name)}; {_hint(name)}"
        )


def leaf_names(tree: Any) -> list[str]:
    """Dotted names of a tree's leaves, in order: "x", "image.mask", "0.x"."""
    return [name for name, _ in _flatten(tree)[0]]


def _most_common(sizes: Mapping[str, int]) -> tuple[str, int]:
    """The size that most leaves have, the larger one in a tie, and the first leaf that has it."""
    counts = collections.Counter(sizes.values())
    size = max(counts, key=lambda size: (counts[size], size))
    return next(name for name in sizes if sizes[name] == size), size


def _flatten(batch: Batch) -> tuple[list[tuple[str, Any]], Any]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), _array(leaf))
        for path, leaf in paths
    ], treedef


def _array(leaf: Any) -> Any:
    """Make arrays of numbers, in the dtype that JAX would give them."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "biufc" and not jax.dtypes.issubdtype(leaf.dtype, np.generic):
        raise ValueError(f"a batch holds arrays of numbers, got {leaf.dtype} {leaf!r:.60}")
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)


def _hint(name: str) -> str:
    return (
        "name its batch axis, or None if all micro-batches share it, as in "
        f"batch_axes={{{name!r}: None}}"
    )
