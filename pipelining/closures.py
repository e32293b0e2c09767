"""NNX modules that a function closes over, inside a traced loop.

An NNX module is mutable: a function that is traced at a deeper level than the module's arrays may read it, but not
write to it, and `nnx.value_and_grad` writes.  So the loop of `accumulate_grads` runs on copies: `find_modules` finds
the modules that a function reaches through its closure, its globals, defaults, bound object or `functools.partial`
arguments, and `rebind` gives the same function over other modules.  What the copies may change, and what becomes of
it, is decided in `accumulate.py`.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import nnx

_DEPTH = 12  # functions nested deeper than this are not searched


def find_modules(function: Any) -> tuple[Any, ...]:
    """The NNX modules (optimizers, random streams, metrics) that `function` closes over, each once."""
    found: dict[int, Any] = {}
    for module in _modules_in(function, _DEPTH, set()):
        found.setdefault(id(module), module)
    return tuple(found.values())


def rebind(function: Any, replacement: Mapping[int, Any]) -> Any:
    """The same function, with each captured module of id `i` replaced by `replacement[i]`."""
    return _rebind(function, replacement, _DEPTH, {})


def _modules_in(item: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if isinstance(item, nnx.Pytree):
        yield item
        return
    if depth == 0 or id(item) in seen:
        return
    seen.add(id(item))
    for child in _children(item):
        yield from _modules_in(child, depth - 1, seen)


def _children(item: Any) -> list[Any]:
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, types.FunctionType):
        defaults = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
        return [*_cells(item), *defaults, *_globals(item).values()]
    if isinstance(item, (list, tuple)):
        return list(item)
    return list(item.values()) if isinstance(item, dict) else []


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """The modules, and the functions of the same file, that the function reads as globals."""
    values = {name: function.__globals__.get(name) for name in _names(function.__code__)}
    return {name: value for name, value in values.items() if _may_hold_modules(value, function)}


def _may_hold_modules(value: Any, function: types.FunctionType) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__globals__ is function.__globals__
    return isinstance(value, (nnx.Pytree, functools.partial, types.MethodType))


def _names(code: types.CodeType) -> set[str]:
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, nested))


def _cells(function: types.FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            contents.append(None)
    return contents


def _rebind(item: Any, new: Mapping[int, Any], depth: int, done: dict[int, Any]) -> Any:
    if id(item) in new:
        return new[id(item)]
    if id(item) in done:
        return done[id(item)]
    if depth == 0 or not _holds_modules(item, depth):
        return item
    again = functools.partial(_rebind, new=new, depth=depth - 1, done=done)
    if isinstance(item, types.MethodType):
        return types.MethodType(again(item.__func__), again(item.__self__))
    if isinstance(item, functools.partial):
        keywords = {key: again(value) for key, value in item.keywords.items()}
        return functools.partial(again(item.func), *map(again, item.args), **keywords)
    if isinstance(item, types.FunctionType):
        return _rebind_function(item, again, depth - 1, done)
    if isinstance(item, (list, tuple)) and type(item) in (list, tuple):
        return type(item)(map(again, item))
    return {key: again(value) for key, value in item.items()} if type(item) is dict else item


def _holds_modules(item: Any, depth: int) -> bool:
    return next(_modules_in(item, depth, set()), None) is not None


def _rebind_function(
    function: types.FunctionType, again: Callable[[Any], Any], depth: int, done: dict[int, Any]
) -> types.FunctionType:
    """A copy; what leads to no module is not copied but shared with the original (`nonlocal` goes on working)."""
    read = {k: v for k, v in _globals(function).items() if _holds_modules(v, depth)}
    scope = {**function.__globals__} if read else function.__globals__
    pairs = zip(function.__closure__ or (), _cells(function), strict=True)
    cells = tuple(types.CellType() if _holds_modules(c, depth) else cell for cell, c in pairs)
    copy = types.FunctionType(function.__code__, scope, function.__name__, None, cells or None)
    done[id(function)] = copy  # before what it refers to: that may be the function itself
    scope.update({name: again(value) for name, value in read.items()})
    for cell, old, content in zip(cells, function.__closure__ or (), _cells(function), strict=True):
        if cell is not old:
            cell.cell_contents = again(content)
    if function.__defaults__ is not None:
        copy.__defaults__ = tuple(map(again, function.__defaults__))
    keywords = {key: again(value) for key, value in (function.__kwdefaults__ or {}).items()}
    copy.__kwdefaults__ = keywords or None
    copy.__dict__.update(function.__dict__)
    return copy
