"""Between what a user calls and flat lists of arrays: pytrees, static arguments, NNX modules.

In: a call's arguments.  Out: a `Call`: flat arrays, and a pure function of them that stands for the user's function on
such arguments.  NNX modules and optimizers among the arguments are split into arrays on the way in, and updated with
what the function did to them on the way out, as `nnx.jit` does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from stagewright.nn.axes import leaf_axes


@dataclass(slots=True)
class Call:
    """One call, taken apart.

    Attributes:
      leaves: the arrays among the arguments.
      key: equal for calls that may share a compiled step.
      arguments: the modules' state and the other arguments, whose leaves are `leaves`.
      owners: for each module, the position of the argument that it came in, or None for a keyword.
      pure: flat arrays -> flat arrays; fills `out` when it is traced.
      out: how results are put together again, after tracing.
    """

    leaves: list[Any]
    key: Any
    arguments: Any
    owners: list[int | None]
    pure: Callable[..., list[Any]]
    out: "Results"

    def positions(self, argnums: Sequence[int]) -> frozenset[int]:
        """Which leaves belong to these positional arguments."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.arguments)]
        return frozenset(i for i, path in enumerate(paths) if self._owner(path) in argnums)

    def describe(self, axes: Mapping[int, Any]) -> list["Argument"]:
        """What each leaf is, with the axis names that its Variable or `axes` (by position) gives it."""
        named = leaf_axes(self.arguments)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.arguments)]
        given = self._given(axes)
        return [
            Argument(path, _path(path), given.get(i, names), tuple(leaf.shape))
            for i, (path, names, leaf) in enumerate(zip(paths, named, self.leaves, strict=True))
        ]

    def _given(self, axes: Mapping[int, Any]) -> dict[int, tuple[Any, ...]]:
        found: dict[int, tuple[Any, ...]] = {}
        for position, names in axes.items():
            numbers = sorted(self.positions([position]))
            argument = self.arguments[1][0][position]
            each = names(argument) if callable(names) else names
            per_leaf = (
                [each] * len(numbers)
                if isinstance(each, tuple) and not callable(names)
                else jax.tree.leaves(each, is_leaf=lambda x: isinstance(x, tuple))
            )
            for number, dims in zip(numbers, per_leaf, strict=True):
                ndim = len(self.leaves[number].shape)
                found[number] = (*dims[:ndim], *([None] * (ndim - len(dims))))
        return found

    def _owner(self, path: Any) -> int | None:
        part, kind, *rest = path
        if part.idx == 0:  # the state of a module
            return self.owners[int(kind.key)]
        return int(rest[0].idx) if kind.idx == 0 else None


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of a call's arguments.

    Attributes:
      path: its key path.
      name: what messages call it.
      axes: a logical name, or None, for each dim.
      shape: its shape.
    """

    path: Any
    name: str
    axes: tuple[Any, ...]
    shape: tuple[int, ...]


@dataclass(slots=True)
class Results:
    """How the flat results of a pure call become the user's."""

    treedef: Any = None
    graphdef: Any = None
    pairs: tuple[tuple[int, int], ...] = field(default=())

    def restore(self, flat: Sequence[Any], modules: Sequence[Any]) -> Any:
        """The user's result; `modules` are updated in place."""
        state, out = jax.tree.unflatten(self.treedef, flat)
        if modules:
            after = nnx.merge(self.graphdef, state)
            for module, new in zip(modules, after, strict=True):
                nnx.update(module, nnx.state(new))
        return out


class Signature:
    """Knows which arguments of a function are static.

    Args:
      function: the user's.
      static_argnums: positions of arguments that are settings, not arrays.
      static_argnames: names of such arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
    ) -> None:
        self._function = function
        self._nums = frozenset(static_argnums)
        self._names = frozenset(static_argnames)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, list[Any]]:
        """Take a call apart; also the NNX modules among its arguments."""
        static = {i: args[i] for i in self._nums if i < len(args)} | {
            k: v for k, v in kwargs.items() if k in self._names
        }
        dynamic = (
            [None if i in self._nums else a for i, a in enumerate(args)],
            {k: v for k, v in kwargs.items() if k not in self._names},
        )
        modules: list[Any] = []
        owners: list[int | None] = []
        bare = jax.tree_util.tree_map_with_path(
            lambda path, x: _take(path, x, modules, owners), dynamic, is_leaf=_is_module
        )
        graphdef, state = nnx.split(tuple(modules))
        leaves, treedef = jax.tree.flatten((state, bare))
        arrays = [_array(leaf) for leaf in leaves]
        if any(array is None for array in arrays):
            raise _not_an_array((state, bare))
        results = Results()
        key = (treedef, graphdef, tuple(sorted(static.items(), key=str)), tuple(map(_aval, arrays)))
        pure = _Pure(self._function, treedef, graphdef, static, results, len(modules))
        return Call(arrays, key, (state, bare), owners, pure, results), modules


class _Pure:
    """The user's function as a function of flat arrays."""

    def __init__(
        self,
        function: Any,
        treedef: Any,
        graphdef: Any,
        static: Mapping[Any, Any],
        results: Results,
        num_modules: int,
    ) -> None:
        self._function = function
        self._treedef = treedef
        self._graphdef = graphdef
        self._static = static
        self._results = results
        self._num_modules = num_modules

    def __call__(self, *flat: Any) -> list[Any]:
        state, (args, kwargs) = jax.tree.unflatten(self._treedef, flat)
        modules = nnx.merge(self._graphdef, state) if self._num_modules else ()
        args, kwargs = jax.tree.map(
            lambda x: modules[x.number] if isinstance(x, _Hole) else x,
            (args, kwargs),
            is_leaf=_is_hole,
        )
        args = [self._static.get(i, a) for i, a in enumerate(args)]
        kwargs = {**kwargs, **{k: v for k, v in self._static.items() if isinstance(k, str)}}
        out = self._function(*args, **kwargs)
        graphdef, after = nnx.split(tuple(modules))
        _check_results(out)
        leaves, treedef = jax.tree.flatten((after, out))
        self._results.treedef, self._results.graphdef = treedef, graphdef
        self._results.pairs = _same_home(state, (args, kwargs), after, out, self._num_modules)
        return [jax.numpy.asarray(leaf) for leaf in leaves]


@dataclass(frozen=True, slots=True)
class _Hole:
    """Stands for the module number `number` among the arguments."""

    number: int


jax.tree_util.register_static(_Hole)


def _is_hole(x: Any) -> bool:
    return isinstance(x, _Hole)


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)  # modules, optimizers, random streams, metrics


def _take(path: Any, x: Any, modules: list[Any], owners: list[int | None]) -> Any:
    if not _is_module(x):
        return x
    numbers = {id(module): i for i, module in enumerate(modules)}
    if id(x) not in numbers:
        modules.append(x)
        owners.append(path[1].idx if path[0].idx == 0 else None)
    return _Hole(numbers.get(id(x), len(modules) - 1))


def _path(path: Any) -> str:
    (part, *rest) = path
    if getattr(part, "idx", None) == 0:
        return "module" + jax.tree_util.keystr(tuple(rest))
    kind, *inner = rest
    return ("args", "kwargs")[getattr(kind, "idx", 0)] + jax.tree_util.keystr(tuple(inner))


def _array(leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            "a function under mpmd_jit runs on arrays and starts its ranks itself; call it as it is, not inside "
            "jax.jit, jax.grad or another transformation"
        )
    if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return leaf
    if isinstance(leaf, (bool, int, float, complex, np.generic)):
        return np.asarray(leaf, jax.dtypes.result_type(leaf))
    return None


def _not_an_array(arguments: Any) -> ValueError:
    path, leaf = next(
        (p, x) for p, x in jax.tree_util.tree_leaves_with_path(arguments) if _array(x) is None
    )
    return ValueError(
        f"{_path(path)} of a function under mpmd_jit must be an array or a number, got {type(leaf).__name__} {leaf!r}; "
        "name settings in static_argnames, or close over them"
    )


def _aval(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), str(array.dtype)


def _check_results(out: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise ValueError(
                f"result{jax.tree_util.keystr(path)} of a function under mpmd_jit must be an array, got "
                f"{type(leaf).__name__}"
            )


def _same_home(
    state: Any, arguments: Any, after: Any, out: Any, num_modules: int
) -> tuple[tuple[int, int], ...]:
    """Pairs (result, argument) of a state that comes back: modules, and results with an argument's tree and shapes."""
    num_state, num_after = len(jax.tree.leaves(state)), len(jax.tree.leaves(after))
    pairs = [(i, i) for i in range(num_state)] if num_modules and num_state == num_after else []
    offsets = _offsets(arguments[0], num_state)
    parts = list(out) if isinstance(out, (tuple, list)) and type(out) in (tuple, list) else [out]
    position = num_after
    for part in parts:
        leaves = jax.tree.leaves(part)
        shapes = [_aval(jax.numpy.asarray(leaf)) for leaf in leaves]
        for argument, offset in offsets:
            given = list(map(_aval, jax.tree.leaves(argument)))
            same_tree = _treedef(part) == _treedef(argument)
            if leaves and same_tree and shapes == given:
                pairs += [(position + i, offset + i) for i in range(len(leaves))]
                break
        position += len(leaves)
    return tuple(pairs)


def _treedef(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _offsets(args: Sequence[Any], start: int) -> list[tuple[Any, int]]:
    """The positional arguments without modules, with the flat position of their first leaf."""
    found = []
    for argument in args:
        leaves = jax.tree.leaves(argument, is_leaf=_is_module)
        if any(map(_is_module, leaves)):
            continue
        found.append((argument, start))
        start += len(leaves)
    return found
