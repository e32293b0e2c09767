"""From JAX's jaxprs to the compiler's graphs.

In: a jaxpr of any supported JAX version.  Out: a flat `Graph`, with calls (`jit`, `custom_jvp_call` …) inlined, so that
a cut can go between any two equations.  Loops, branches and checkpoints stay whole: `split.py` opens them where a
zero-bubble schedule needs it.  A stage mark inside one of those is refused here, with its source line.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from stagewright.nn.yields import pipeline_yield_p
from stagewright.pipelining import jax_seams
from stagewright.pipelining.accumulate import accumulate_p
from stagewright.pipelining.errors import StageError
from stagewright.pipelining.graph import Apply, Atom, Graph, Literal, Operation, Scan, Value

# Calls that mean nothing but their body, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_CHECKPOINTS = ("remat2", "checkpoint", "remat")
_NAMES = {"remat2": "checkpoint", "remat": "checkpoint"}


def trace_graph(function: Callable[..., Any], *structs: Any) -> Graph:
    """Trace a function of flat arguments, without captured arrays, to a graph."""
    graph, constants = to_graph(jax.make_jaxpr(function)(*structs))
    assert not constants, f"{function} captured arrays"
    return graph


def to_graph(
    jaxpr: Any, *, inline_checkpoints: bool = False, constants_as_inputs: bool = False
) -> tuple[Graph, tuple[tuple[Value, Any], ...]]:
    """Translate a jaxpr.

    Args:
      jaxpr: a closed jaxpr.
      inline_checkpoints: open `jax.checkpoint` equations too (their recomputation becomes plain equations).
      constants_as_inputs: what the jaxpr captured becomes the graph's first inputs.

    Returns:
      The graph, and its constants: arrays that the jaxpr holds, each with the value that stands for it.  Scalars
      among them are literals in the graph instead.

    Raises:
      StageError: if a stage mark lies inside a loop, a branch or a checkpoint.
    """
    parts = jax_seams.jaxpr_parts(jaxpr)
    env: dict[Any, Atom] = {}
    constants = []
    for var, const in (
        () if constants_as_inputs else zip(parts.constvars, parts.consts, strict=True)
    ):
        env[var] = atom = _constant(var, const)
        if isinstance(atom, Value):
            constants.append((atom, const))
    variables = (*parts.constvars, *parts.invars) if constants_as_inputs else parts.invars
    inputs = tuple(_new_value(var) for var in variables)
    env.update(zip(variables, inputs, strict=True))
    operations: list[Operation] = []
    _translate(parts.eqns, env, operations, inline_checkpoints)
    outputs = tuple(_read(atom, env) for atom in parts.outvars)
    return Graph(inputs, tuple(operations), outputs), tuple(constants)


def open_scan(op: Operation, *, inline_checkpoints: bool) -> Scan:
    """The operator of a scan operation with its body as a graph."""
    if isinstance(op.operator, Scan):
        return op.operator
    parts = jax_seams.scan_parts(op.operator.eqn)
    body = _closed_body(parts.body, inline_checkpoints)
    source = op.operator.source
    return Scan(
        body, parts.num_consts, parts.num_carry, parts.length, parts.reverse, parts.unroll, source
    )


def open_checkpoint(op: Operation) -> Graph | None:
    """The body of a checkpoint operation, or None if it is not one."""
    if isinstance(op.operator, Scan) or op.operator.name not in _CHECKPOINTS:
        return None
    return _closed_body(op.operator.eqn.params["jaxpr"], True)


def branches(op: Operation) -> tuple[Graph, ...] | None:
    """The branches of a `cond` operation, or None if it is not one."""
    if isinstance(op.operator, Scan) or op.operator.name != "cond":
        return None
    return tuple(_closed_body(branch, False) for branch in op.operator.eqn.params["branches"])


def _closed_body(jaxpr: Any, inline_checkpoints: bool) -> Graph:
    graph, constants = to_graph(jaxpr, inline_checkpoints=inline_checkpoints)
    if not constants:
        return graph
    literals: dict[Value, Literal] = {value: Literal(const) for value, const in constants}
    operations = tuple(
        Operation(
            op.operator,
            tuple(literals.get(a, a) if isinstance(a, Value) else a for a in op.inputs),
            op.outputs,
        )
        for op in graph.operations
    )
    outputs = tuple(literals.get(a, a) if isinstance(a, Value) else a for a in graph.outputs)
    return Graph(graph.inputs, operations, outputs)


def _translate(
    eqns: Sequence[Any], env: dict[Any, Atom], out: list[Operation], inline_checkpoints: bool
) -> None:
    for eqn in eqns:
        operands = [_read(atom, env) for atom in eqn.invars]
        body = _call_body(eqn, inline_checkpoints)
        if body is not None:
            results = _inline_call(body, operands, out, inline_checkpoints)
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        if eqn.primitive is not accumulate_p:
            _refuse_hidden_marks(eqn)
        outputs = tuple(_new_value(var) for var in eqn.outvars)
        env.update(zip(eqn.outvars, outputs, strict=True))
        out.append(Operation(Apply(eqn), tuple(operands), outputs))


def _call_body(eqn: Any, inline_checkpoints: bool) -> Any:
    name = eqn.primitive.name
    if name in _CALLS:
        return eqn.params.get(_CALLS[name], eqn.params.get("jaxpr"))
    return eqn.params["jaxpr"] if inline_checkpoints and name in _CHECKPOINTS else None


def _inline_call(
    body: Any, operands: Sequence[Atom], out: list[Operation], inline_checkpoints: bool
) -> list[Atom]:
    parts = jax_seams.jaxpr_parts(body)
    env: dict[Any, Atom] = {
        var: Literal(c) for var, c in zip(parts.constvars, parts.consts, strict=True)
    }
    env.update(zip(parts.invars, operands, strict=True))
    _translate(parts.eqns, env, out, inline_checkpoints)
    return [_read(atom, env) for atom in parts.outvars]


def _refuse_hidden_marks(eqn: Any) -> None:
    for mark in _marks_inside(eqn):
        name = _NAMES.get(eqn.primitive.name, eqn.primitive.name)
        raise StageError(
            f"pipeline_yield at {jax_seams.source_line(mark)} lies inside `{name}` "
            f"({jax_seams.source_line(eqn)}): a stage can only end between operations of the micro-batch function "
            f"itself; move the mark out of the `{name}`, for example by running the layers of one stage in it and "
            "marking after it"
        )


def _marks_inside(eqn: Any) -> list[Any]:
    if eqn.primitive is pipeline_yield_p:
        return []
    found = []
    for inner in _inner_jaxprs(eqn):
        for nested in jax_seams.jaxpr_parts(inner).eqns:
            found += [nested] if nested.primitive is pipeline_yield_p else _marks_inside(nested)
    return found


def _inner_jaxprs(eqn: Any) -> list[Any]:
    inner = []
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if jax_seams.is_jaxpr(item):
                inner.append(item)
    return inner


def _read(atom: Any, env: dict[Any, Atom]) -> Atom:
    return _literal(atom) if jax_seams.is_literal(atom) else env[atom]


def _literal(atom: Any) -> Literal:
    dtype = atom.aval.dtype
    return Literal(np.asarray(atom.val, dtype) if isinstance(dtype, np.dtype) else atom.val)


def _constant(var: Any, const: Any) -> Atom:
    if isinstance(const, (int, float, complex, np.generic)) or (
        isinstance(const, np.ndarray) and const.ndim == 0
    ):
        return Literal(np.asarray(const, var.aval.dtype))
    return _new_value(var)


def _new_value(var: Any) -> Value:
    return Value(tuple(var.aval.shape), var.aval.dtype)
