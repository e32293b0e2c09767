"""Logical axis names: what a dim means, said in the model; where it lives, said elsewhere.

A layer names the dims of its parameters (`axes=("embed", "mlp")`) and, at a few borders, the dims
of its activations (`shard(x, ("batch", "length", "mlp"))`).  Neither speaks of devices.
`AxisRules` binds the names to mesh axes, so the same model under another mesh or rule table is
another parallelisation.

`shard` leaves a mark in the traced program (`shard_p`), which is the identity.  An engine that has
a mesh traces the program within `bind_axes(rules, mesh)`, and then each `shard` is a sharding
constraint instead.

The names are kept on a Variable under the metadata key `axes`.  Flax's own key (`out_sharding`) is
left alone: with a mesh in context Flax would shard the parameter as soon as it is made, by names
that are no mesh axes.

Names used by the layers of this package:

  of parameters     embed, mlp, heads, kv_heads, vocab, positions
  of activations    batch, length, embed, mlp, heads, kv_heads, head_dim, vocab, and norm_length:
                    the length outside attention and MLP, which sequence parallelism splits

Not here: meshes and devices (`stagewright.pipelining`).
"""

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import jax
import numpy as np
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

AxisName: TypeAlias = str | None
AxisNames: TypeAlias = tuple[AxisName, ...]
MeshAxes: TypeAlias = str | tuple[str, ...] | None

_METADATA_KEY = "axes"


@dataclasses.dataclass(frozen=True, slots=True)
class VmappedDim:
    """The place, in a `shard_p` mark's names, of a dim that `jax.vmap` added.

    Attributes:
      mesh_axes: the `spmd_axis_name` of that vmap, as a tuple; empty if it had none, and then the
        dim's sharding is left to the compiler.
    """

    mesh_axes: tuple[str, ...] = ()


# Operand: one array.  Parameter: `names`, a tuple with one entry a dim: a logical name, None, or a
# `VmappedDim`.
shard_p = Primitive("shard")


@overload
def shard(x: jax.Array, names: Sequence[AxisName]) -> jax.Array: ...
@overload
def shard(
    x: Sequence[AxisName], names: None = None
) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]: ...
def shard(x: Any, names: Sequence[AxisName] | None = None) -> Any:
    """Name the dims of an array, or of the one array that a function returns; return it unchanged.

    Its gradient is marked with the same names.

    Args:
      x: an array of any shape and dtype; or, as a decorator (`@shard(names)`), the names.
      names: one logical axis name for each dim of `x`; None where a dim is not to be split.

    Returns:
      `x`; or a decorator for functions that return one array.

    Raises:
      ValueError: if there are not as many names as dims.

    Example:
      >>> import jax.numpy as jnp
      >>> shard(jnp.zeros((2, 3)), ("batch", "embed")).shape
      (2, 3)
      >>> @shard(("batch", "mlp"))
      ... def hidden(x):
      ...     return jnp.tanh(x)
      >>> hidden(jnp.zeros((2, 3))).shape
      (2, 3)

    Reference:
      Xu et al., "GSPMD", arXiv 2105.04663, section 3.1 (sharding annotations); logical names as
      in T5X and MaxText.
    """
    if names is None:
        return functools.partial(_shard_result, names=_as_names(x))
    return _shard_array(x, _as_names(names))


def _as_names(names: Any) -> AxisNames:
    is_sequence = isinstance(names, Sequence) and not isinstance(names, str)
    if is_sequence and all(name is None or isinstance(name, str) for name in names):
        return tuple(names)
    raise ValueError(
        f"shard expects a tuple of axis names (strings or None), got {names!r}; "
        "write shard(x, ('batch', 'embed')) or @shard(('batch', 'embed'))"
    )


def _shard_array(x: jax.Array, names: AxisNames) -> jax.Array:
    if len(names) != np.ndim(x):
        raise ValueError(
            f"shard got {len(names)} axis names {names} for an array with {np.ndim(x)} dims, "
            f"shape {np.shape(x)}; give one name, or None, for each dim"
        )
    bound = _bound.value
    if bound is None:
        return shard_p.bind(x, names=names)
    rules, mesh = bound
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rules.spec(names)))


def _shard_result(function: Callable[..., jax.Array], names: AxisNames) -> Callable[..., jax.Array]:
    @functools.wraps(function)
    def sharded(*args: Any, **kwargs: Any) -> jax.Array:
        return _shard_array(function(*args, **kwargs), names)

    return sharded


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, names: tuple[Any, ...]) -> Any:
    return shard_p.bind(primals[0], names=names), _bind_nonzero(tangents[0], names)


def _transpose(cotangent: Any, operand: Any, *, names: tuple[Any, ...]) -> list[Any]:
    del operand
    return [_bind_nonzero(cotangent, names)]


def _bind_nonzero(value: Any, names: tuple[Any, ...]) -> Any:
    return value if isinstance(value, ad.Zero) else shard_p.bind(value, names=names)


def _batch(
    axis_data: Any, values: Sequence[Any], dims: Sequence[Any], *, names: tuple[Any, ...]
) -> tuple[Any, Any]:
    (value,), (dim,) = values, dims
    if dim is None:
        return shard_p.bind(value, names=names), dim
    added = VmappedDim(tuple(axis_data.spmd_name or ()))
    return shard_p.bind(value, names=(*names[:dim], added, *names[dim:])), dim


shard_p.def_impl(lambda x, *, names: x)
shard_p.def_abstract_eval(lambda x, *, names: x)
ad.primitive_jvps[shard_p] = _jvp
ad.primitive_transposes[shard_p] = _transpose
batching.fancy_primitive_batchers[shard_p] = _batch
mlir.register_lowering(shard_p, lambda ctx, x, *, names: [x])


# (rules, mesh), or None.  A context that JAX's caches know of: a function that was traced under one
# binding is traced anew under another.
_bound: Any = jax.make_user_context(None)


@contextlib.contextmanager
def bind_axes(rules: "AxisRules", mesh: Any) -> Iterator[None]:
    """Within, `shard` constrains arrays to `mesh` as `rules` say.  For engines, around tracing.

    Under `jax.vmap(..., spmd_axis_name="data")` the mapped dim is split over that mesh axis.

    Args:
      rules: binds logical names to mesh axes.
      mesh: a `jax.sharding.AbstractMesh` with the mesh axes that the rules name.
    """
    with _bound((rules, mesh)):
        yield


@contextlib.contextmanager
def rebind_axes(**changes: MeshAxes) -> Iterator[None]:
    """Within, some logical names are bound otherwise; nothing where no mesh is bound.

    Under a `jax.vmap` over data-parallel replicas, "batch" is one replica's share and is not split
    once more: `rebind_axes(batch=None)`.
    """
    bound = _bound.value
    if bound is None:
        yield
        return
    with bind_axes(bound[0].replace(**changes), bound[1]):
        yield


def shard_activation(x: jax.Array, feature: str, length: str = "length") -> jax.Array:
    """Name the dims of a layer's activation: "batch", then `length`, then `feature`.

    Args:
      x: array[batch, length, feature]; with another rank the dims between the first and the last
        stay unnamed, and an array[feature] has no batch.
      feature: the logical name of the last dim.
      length: the logical name of the middle dim of a rank-3 array.

    Returns:
      `x`.
    """
    middle = (length,) if x.ndim == 3 else (None,) * (x.ndim - 2)
    names = ("batch", *middle, feature) if x.ndim > 1 else (feature,)
    return shard(x, names)


def axes_metadata(axes: Sequence[AxisName]) -> dict[str, Any]:
    """Return the Variable metadata that records `axes`.

    Example:
      >>> import jax.numpy as jnp
      >>> kernel = nnx.Param(jnp.zeros((2, 3)), **axes_metadata(("embed", "mlp")))
      >>> axis_names(kernel)
      ('embed', 'mlp')
    """
    return {_METADATA_KEY: tuple(axes)}


def axis_names(variable: nnx.Variable) -> AxisNames:
    """Return the logical axis names of a Variable, one for each dim.

    Args:
      variable: any NNX Variable, abstract ones included.  One that was made without names (by a
        layer of plain Flax, say) gets None for each dim.

    Returns:
      A tuple with as many entries as the value has dims.

    Raises:
      ValueError: if the names recorded are not as many as the dims.
    """
    shape = variable.get_value().shape
    names = variable.get_metadata().get(_METADATA_KEY, (None,) * len(shape))
    if len(names) != len(shape):
        raise ValueError(
            f"a {type(variable).__name__} of shape {shape} carries {len(names)} axis names "
            f"{names}; give the layer one name, or None, for each of its {len(shape)} dims"
        )
    return names


def leaf_axes(tree: Any) -> tuple[AxisNames, ...]:
    """Return the axis names of each leaf of a pytree of Variables and arrays, in leaf order.

    An optimizer's state that was made from Variables carries their names.  A leaf without names, or
    of another rank than its Variable's names (a factored moment), gets None for each dim.

    Args:
      tree: any pytree; leaves have a shape.
    """
    leaves: list[AxisNames] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        names = node.get_metadata().get(_METADATA_KEY) if isinstance(node, nnx.Variable) else None
        for leaf in jax.tree.leaves(node):
            fits = names is not None and len(names) == np.ndim(leaf)
            leaves.append(tuple(names) if fits and names else (None,) * np.ndim(leaf))
    return tuple(leaves)


def mark_axes(params: nnx.State) -> nnx.State:
    """Mark each parameter with its own axis names, and thereby its gradient; values are unchanged.

    Args:
      params: Variables by path; those without names are left alone.
    """

    def mark(variable: nnx.Variable) -> nnx.Variable:
        names = axis_names(variable)
        if not any(names):
            return variable
        return variable.replace(shard(variable.get_value(), names))

    return jax.tree.map(mark, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRules:
    """A table from logical axis names to mesh axes.

    Attributes:
      rules: a mapping from logical name to a mesh axis name, a tuple of them (split over all, the
        first varying slowest), or None (not split).  Kept as a tuple of pairs, so that tables can
        be compared and hashed.

    Example:
      >>> rules = AxisRules({"batch": "data", "embed": None, "mlp": "tensor"})
      >>> rules.spec(("batch", None, "mlp")) == PartitionSpec("data", None, "tensor")
      True
    """

    rules: Mapping[str, MeshAxes] | tuple[tuple[str, MeshAxes], ...]

    def __post_init__(self) -> None:
        """Freeze the mapping."""
        object.__setattr__(self, "rules", tuple(dict(self.rules).items()))

    def replace(self, **changes: MeshAxes) -> "AxisRules":
        """Return a table with some names bound anew, or added."""
        return AxisRules({**dict(self.rules), **changes})

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that a logical name is bound to; empty if its dim is not split.

        Raises:
          ValueError: if the table does not know the name; the nearest known one is given.
        """
        table = dict(self.rules)
        if name not in table:
            raise ValueError(_unknown_name(name, tuple(table)))
        axes = table[name]
        return (axes,) if isinstance(axes, str) else tuple(axes or ())

    def spec(self, names: Sequence[AxisName | VmappedDim]) -> PartitionSpec:
        """Bind the names of one array to the mesh.

        Args:
          names: one entry a dim: a logical name, None (not split), or a `VmappedDim` out of a
            `shard_p` mark.

        Returns:
          A PartitionSpec with as many entries as there are names.

        Raises:
          ValueError: if the table does not know a name, or if two dims claim one mesh axis.
        """
        claimed: dict[str, Any] = {}
        return PartitionSpec(*(self._entry(name, names, claimed) for name in names))

    def _entry(self, name: Any, names: Sequence[Any], claimed: dict[str, Any]) -> Any:
        if name is None or name == VmappedDim():
            return None if name is None else PartitionSpec.UNCONSTRAINED
        axes = name.mesh_axes if isinstance(name, VmappedDim) else self.mesh_axes(name)
        for axis in axes:
            if axis in claimed:
                raise ValueError(
                    f"mesh axis {axis!r} is claimed twice in {tuple(names)}: by {claimed[axis]!r} "
                    f"and by {name!r}; bind one of them to another mesh axis or to None"
                )
            claimed[axis] = name
        return axes[0] if len(axes) == 1 else (axes or None)


def _unknown_name(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no rule for the logical axis {name!r}; {hint}the table knows "
        f"{', '.join(known) or 'no name'}; add one with rules.replace({name}=None)"
    )


def default_axis_rules() -> AxisRules:
    """Return the rules for mesh axes `data` and `tensor`: data and Megatron's tensor parallelism.

    The batch is split over `data`; heads, the MLP's hidden dim and the vocabulary over `tensor`,
    so that each attention and each MLP is a column-parallel product followed by a row-parallel
    one.  For Megatron's sequence parallelism (arXiv 2205.05198, section 4.2.2) the length outside
    attention and MLP is split too: `default_axis_rules().replace(norm_length="tensor")`.

    Returns:
      A table that knows every name used in `stagewright.nn`.

    Reference:
      Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
    """
    return AxisRules(
        {
            "batch": "data",
            "length": None,
            "norm_length": None,
            "positions": None,
            "embed": None,
            "vocab": "tensor",
            "mlp": "tensor",
            "heads": "tensor",
            "kv_heads": "tensor",
            "head_dim": None,
        }
    )
