"""`accumulate_grads`: the loop over micro-batches, and the primitive that stands for it in a traced step.

In: a function of one micro-batch, and a batch of them.  Out: its results, reduced.  Under plain JAX the loop is a
`lax.scan`, one micro-batch after another: the oracle of every test.  `mpmd_jit` finds the same primitive in the traced
step and pipelines it instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from stagewright.pipelining import closures, jax_seams
from stagewright.pipelining.reductions import Reduction, Stack, Sum

source_info_util.register_exclusion(__file__)  # messages name the user's line, not ours

# Operands: what the micro-batch function closes over, then the batch's leaves [num_microbatches, ...].  Parameters:
# `jaxpr`, of (captured values, one micro-batch's leaves) -> results; `num_consts`; `num_microbatches`; `reductions`,
# one for each result; `num_values`, how many of the results are losses and aux (the rest are gradients);
# `accum_dtype`.
accumulate_p = Primitive("accumulate_grads")
accumulate_p.multiple_results = True


def accumulate_grads(
    f: Callable[[Any], tuple[Any, Any]],
    batch: Any,
    ops: Any = None,
    *,
    in_axes: Any = 0,
    accum_dtype: Any = jnp.float32,
) -> tuple[Any, Any]:
    """Run `f` on every micro-batch and reduce its results: the gradient-accumulation loop.

    Inside `mpmd_jit` the loop is the pipelined part of the step; elsewhere it is a `lax.scan` over the micro-batches
    in order.

    Args:
      f: a function of one micro-batch to a pair `(value, grads)`, as `jax.value_and_grad(loss)` gives.  `value` may
        hold aux.  It may close over arrays and over NNX modules; random streams of such a module are folded with the
        micro-batch's index, so that masks differ by micro-batch.
      batch: pytree of arrays.  Leaves are [num_microbatches, microbatch, ...]; see `in_axes`.
      ops: reductions, as a prefix of the tree `(value, grads)`; by default `(Stack(), Sum())`: losses and aux in the
        batch's order, shape [num_microbatches, ...], gradients summed.
      in_axes: prefix of `batch`: which axis counts the micro-batches, or None for a leaf that every micro-batch
        reads whole.
      accum_dtype: gradients of a narrower floating type are added up in this one and cast back at the end; None adds
        them up in their own.

    Returns:
      The pair `(value, grads)`, reduced.

    Raises:
      ValueError: if `f` does not return a pair, a leaf of the batch is not an array, leaves disagree on the number of
        micro-batches, or `ops` does not match.

    Reference:
      Xhebraj et al., arXiv 2412.14374, section 3.2.
    """
    leaves, treedef = jax.tree.flatten(batch)
    axes = _broadcast_prefix(in_axes, batch, "in_axes")
    num_microbatches = _count(batch, axes)
    scanned = [
        _leading(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None
    ]
    whole = [jnp.asarray(leaf) for leaf, axis in zip(leaves, axes, strict=True) if axis is None]

    def call(function: Callable[..., Any], microbatch: Sequence[Any]) -> Any:
        own, shared = iter(microbatch), iter(whole)
        picked = [next(shared) if axis is None else next(own) for axis in axes]
        return function(jax.tree.unflatten(treedef, picked))

    return _loop(f, call, scanned, num_microbatches, ops, accum_dtype)


def _loop(
    f: Any,
    call: Callable[..., Any],
    scanned: list[Any],
    num_microbatches: int,
    ops: Any,
    accum_dtype: Any,
) -> tuple[Any, Any]:
    modules = closures.find_modules(f)
    graphdef, state = nnx.split(modules)
    counts = _variables(state, nnx.RngCount)
    returned: list[Any] = []

    def body(microbatch: list[Any], index: Any) -> list[Any]:
        copies = nnx.merge(graphdef, _fold_keys(state, index), copy=True) if modules else ()
        replacement = {id(old): new for old, new in zip(modules, copies, strict=True)}
        out = call(closures.rebind(f, replacement) if modules else f, microbatch)
        _check_pair(out)
        returned[:] = [jax.tree.structure(out), len(jax.tree.leaves(out[0]))]
        advanced = _changed_counts(state, copies) if modules else []
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(out)] + advanced

    indices = jnp.arange(num_microbatches, dtype=jnp.int32)
    structs = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in scanned]
    closed = jax.make_jaxpr(body)(structs, jax.ShapeDtypeStruct((), jnp.int32))
    treedef, num_values = returned
    reductions = _reductions(ops, treedef, num_values)
    results = accumulate_p.bind(
        *jax_seams.jaxpr_parts(closed).consts,
        *scanned,
        indices,
        jaxpr=closed,
        num_consts=len(jax_seams.jaxpr_parts(closed).consts),
        num_microbatches=num_microbatches,
        reductions=(*reductions, *([_LAST] * len(counts))),
        num_values=num_values,
        accum_dtype=accum_dtype,
    )
    for variable, count in zip(counts, results[treedef.num_leaves :], strict=True):
        _advance(_original(modules, variable), count)
    pair: tuple[Any, Any] = jax.tree.unflatten(treedef, results[: treedef.num_leaves])
    return pair


# ---- arguments ------------------------------------------------------------------------------------------------------


def _broadcast_prefix(prefix: Any, tree: Any, name: str) -> list[Any]:
    """The leaves of `prefix` (None is a leaf), one for each leaf of `tree`."""
    try:
        parts = jax.tree.map(
            lambda p, t: [p] * len(jax.tree.leaves(t)), prefix, tree, is_leaf=lambda p: p is None
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{name} of accumulate_grads must be a prefix of {jax.tree.structure(tree)}, got {prefix}"
        ) from error
    return [
        leaf
        for part in jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, list))
        for leaf in part
    ]


def _count(batch: Any, axes: Sequence[Any]) -> int:
    """The number of micro-batches, on which all leaves must agree."""
    paths = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    ]
    counts: dict[int, str] = {}
    for (path, leaf), axis in zip(paths, axes, strict=True):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            raise ValueError(
                f"batch{path} of accumulate_grads must be an array, got {type(leaf).__name__} {leaf!r}"
            )
        if axis is None:
            continue
        if np.ndim(leaf) <= axis:
            raise ValueError(
                f"batch{path} of accumulate_grads has shape {np.shape(leaf)}, so axis {axis} cannot count its "
                "micro-batches; name another axis, or None for a leaf that all micro-batches share, in in_axes"
            )
        counts.setdefault(np.shape(leaf)[axis], path)
    if not counts:
        raise ValueError(
            "accumulate_grads needs at least one batch leaf with a micro-batch axis, got none"
        )
    if len(counts) > 1:
        told = " and ".join(f"{count} (batch{path})" for count, path in counts.items())
        raise ValueError(
            f"the batch leaves of accumulate_grads disagree on the number of micro-batches: {told}; every leaf is "
            "[num_microbatches, microbatch, ...] unless in_axes says otherwise"
        )
    if 0 in counts:
        raise ValueError(
            f"accumulate_grads needs at least one micro-batch, but batch{counts[0]} has none"
        )
    return next(iter(counts))


def _leading(leaf: Any, axis: int) -> Any:
    return jnp.moveaxis(jnp.asarray(leaf), axis, 0)


def _check_pair(out: Any) -> None:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            "the function given to accumulate_grads must return a pair (value, grads), as jax.value_and_grad does; "
            f"got {jax.tree.structure(out)}; for gradients alone return (None, grads)"
        )


def _reductions(ops: Any, treedef: Any, num_values: int) -> list[Reduction]:
    if ops is None:
        return [Stack()] * num_values + [Sum()] * (treedef.num_leaves - num_values)
    skeleton = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    given = _broadcast_prefix(ops, skeleton, "ops")
    for op in given:
        if isinstance(op, type) or not isinstance(op, Reduction):
            raise ValueError(
                f"ops of accumulate_grads must hold Sum(), Mean(), Max() or Stack(), got {op!r}"
            )
    return given


# ---- NNX state ------------------------------------------------------------------------------------------------------


class _Last:
    """Keeps the last micro-batch's value: for counters that every micro-batch advances alike."""

    def init(self, aval: Any, num_microbatches: int, dtype: Any) -> Any:
        del num_microbatches, dtype
        return jnp.zeros(aval.shape, aval.dtype)

    def update(self, accumulator: Any, value: Any, index: Any) -> Any:
        del accumulator, index
        return value

    def finish(self, accumulator: Any, aval: Any, num_microbatches: int) -> Any:
        del aval, num_microbatches
        return accumulator


_LAST = _Last()


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _variables(state: Any, kind: type) -> list[tuple[Any, Any]]:
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variable)
    return [(path, variable) for path, variable in flat if isinstance(variable, kind)]


def _fold_keys(state: Any, index: Any) -> Any:
    """The state with every random stream's key folded with the micro-batch's index."""

    def fold(variable: Any) -> Any:
        if isinstance(variable, nnx.RngKey):
            return variable.replace(jax.random.fold_in(variable.get_value(), index))
        return variable

    return jax.tree.map(fold, state, is_leaf=_is_variable)


def _changed_counts(state: Any, copies: Any) -> list[Any]:
    """The random streams' new counts; any other change of a module's state is refused."""
    after = nnx.state(copies)
    counts = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variable),
        jax.tree_util.tree_leaves_with_path(after, is_leaf=_is_variable),
        strict=True,
    )
    for (path, old), (_, new) in pairs:
        if isinstance(old, nnx.RngCount):
            counts.append(new.get_value())
        elif not isinstance(old, nnx.RngKey) and new.get_value() is not old.get_value():
            raise ValueError(
                f"the micro-batch function changed {type(old).__name__} {jax.tree_util.keystr(path)}; state that is "
                "carried from one micro-batch to the next is not supported: return it as aux instead"
            )
    return counts


def _advance(variable: Any, count: Any) -> None:
    """Let a random stream of the outer module go on behind the loop, or the next step would draw the same again."""
    try:
        variable.set_value(count)
    except errors.TraceContextError as error:
        raise ValueError(
            "the micro-batch function draws random numbers from an NNX module that the step under mpmd_jit closes "
            "over, so the next step would draw the same ones again; pass the module to the step as an argument"
        ) from error


def _original(modules: Any, found: tuple[Any, Any]) -> Any:
    """The outer module's own Variable at the place of `found`."""
    path, _ = found
    live = jax.tree_util.tree_leaves_with_path(nnx.state(modules), is_leaf=_is_variable)
    return next(variable for other, variable in live if other == path)


# ---- the primitive under plain JAX -----------------------------------------------------------------------------------


def _scan(
    *operands: Any,
    jaxpr: Any,
    num_consts: int,
    num_microbatches: int,
    reductions: Sequence[Reduction],
    num_values: int,
    accum_dtype: Any,
) -> list[Any]:
    """The loop as a `lax.scan`."""
    del num_values
    consts, batch = operands[:num_consts], operands[num_consts:]
    avals = [var.aval for var in jax_seams.jaxpr_parts(jaxpr).outvars]
    start = [
        op.init(aval, num_microbatches, accum_dtype)
        for op, aval in zip(reductions, avals, strict=True)
    ]

    def step(accumulators: Any, microbatch: Any) -> Any:
        results = jax_seams.evaluate_jaxpr(jaxpr, consts, microbatch)
        index = microbatch[-1]
        return [
            op.update(a, v, index)
            for op, a, v in zip(reductions, accumulators, results, strict=True)
        ], None

    last, _ = jax.lax.scan(step, start, list(batch))
    return [
        op.finish(a, aval, num_microbatches)
        for op, a, aval in zip(reductions, last, avals, strict=True)
    ]


def _abstract(*operands: Any, **params: Any) -> list[Any]:
    structs = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    out = jax.eval_shape(lambda *args: _scan(*args, **params), *structs)
    return [jax_seams.shaped_array(struct) for struct in out]


def _impl(*operands: Any, **params: Any) -> list[Any]:
    out: list[Any] = jax.jit(lambda *args: _scan(*args, **params))(*operands)
    return out


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    filled = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(lambda *args: _scan(*args, **params), tuple(primals), tuple(filled))


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    in_axes = tuple(dims)  # an operand that is not mapped has the dim None
    out = jax.vmap(lambda *args: _scan(*args, **params), in_axes=in_axes)(*operands)
    return out, [0] * len(out)


accumulate_p.def_impl(_impl)
accumulate_p.def_abstract_eval(_abstract)
ad.primitive_jvps[accumulate_p] = _jvp
batching.primitive_batchers[accumulate_p] = _batch
mlir.register_lowering(accumulate_p, mlir.lower_fun(_scan, multiple_results=True))
