"""Trace a train step once: its operations, and the one loop over micro-batches among them.

In: a function of flat arrays.  Out: a `Trace`, whose loop body is a graph of its own.  Nothing is cut or placed here;
only what never varies between micro-batches and merely moves data (stacked or cast parameters) is taken out of the
loop, so that it happens once a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from stagewright.pipelining.accumulate import accumulate_p
from stagewright.pipelining.errors import StageError
from stagewright.pipelining.graph import (
    Atom,
    Graph,
    Literal,
    Operation,
    Value,
    ancestors,
    clone,
    free_values,
    prune,
    sort_operations,
    substitute,
)
from stagewright.pipelining.primitives import copies, only_moves
from stagewright.pipelining.reductions import Reduction
from stagewright.pipelining.translate import to_graph


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """The accumulation loop.

    Attributes:
      body: a graph whose inputs are `invariants`' values, then one micro-batch of each of `batch`, then the index.
      invariants: the step's values that every micro-batch reads, as (value in the body, value in the step).
      batch: leaves [num_microbatches, ...], as (value of one micro-batch in the body, value in the step).
      index: the body's micro-batch index, int32[].
      num_microbatches: how often the body runs.
      reductions: one for each output of the body.
      num_values: how many outputs are losses and aux; the rest are gradients.
      accum_dtype: least dtype of the accumulators.
      outputs: the reduced values in the step.
    """

    body: Graph
    invariants: tuple[tuple[Value, Value], ...]
    batch: tuple[tuple[Value, Value], ...]
    index: Value
    num_microbatches: int
    reductions: tuple[Reduction, ...]
    num_values: int
    accum_dtype: Any
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced step.

    Attributes:
      inputs: the step's arguments.
      constants: arrays that the step closes over, each with its value.
      operations: all operations outside the loop, in an order in which they could run with the loop among them.
      loop: the loop.
      outputs: the step's results.
    """

    inputs: tuple[Value, ...]
    constants: tuple[tuple[Value, Any], ...]
    operations: tuple[Operation, ...]
    loop: Loop
    outputs: tuple[Atom, ...]


def trace_step(
    step: Callable[..., Sequence[Any]], structs: Sequence[jax.ShapeDtypeStruct]
) -> Trace:
    """Trace `step`, a function of flat arrays to flat arrays.

    Raises:
      StageError: if the step does not call `accumulate_grads` exactly once, or marks a stage where none can end.
    """
    graph, constants = to_graph(jax.make_jaxpr(step)(*structs))
    loops = [op for op in graph.operations if op.operator.name == accumulate_p.name]
    if len(loops) != 1:
        raise StageError(
            f"a step under mpmd_jit must call accumulate_grads exactly once, outside of any loop or branch; this one "
            f"calls it {len(loops)} times"
        )
    loop = _read_loop(loops[0])
    outside = tuple(op for op in graph.operations if op is not loops[0])
    return hoist(Trace(graph.inputs, constants, outside, loop, graph.outputs))


def _read_loop(op: Operation) -> Loop:
    params = op.operator.eqn.params  # type: ignore[union-attr]
    num_consts = params["num_consts"]
    body, _ = to_graph(params["jaxpr"], constants_as_inputs=True)
    literals: dict[Value, Atom] = {}
    invariants = []
    for inner, outer in zip(body.inputs[:num_consts], op.inputs[:num_consts], strict=True):
        if isinstance(outer, Literal):
            literals[inner] = outer
        else:
            invariants.append((inner, outer))
    batch = tuple(zip(body.inputs[num_consts:-1], op.inputs[num_consts:-1], strict=True))
    return Loop(
        body=prune(_replace(body, literals)),
        invariants=tuple(invariants),
        batch=batch,  # type: ignore[arg-type]
        index=body.inputs[-1],
        num_microbatches=params["num_microbatches"],
        reductions=tuple(params["reductions"]),
        num_values=params["num_values"],
        accum_dtype=params["accum_dtype"],
        outputs=op.outputs,
    )


def _replace(graph: Graph, replacement: Mapping[Value, Atom]) -> Graph:
    operations = tuple(substitute(op, replacement) for op in graph.operations)
    outputs = tuple(replacement.get(a, a) if isinstance(a, Value) else a for a in graph.outputs)
    return Graph(graph.inputs, operations, outputs)


def hoist(trace: Trace) -> Trace:
    """Take data movement on loop invariants out of the loop: it happens once a step, not once a micro-batch.

    A run of equal layers is scanned over their stacked parameters; this is what makes the stacking free of the number
    of micro-batches.  Only operations that move or cast are taken, so no number changes; and only casts, joins and
    what leads to them, for XLA folds a transpose or a reshape into its reader, where it costs nothing and does not
    change how a product is computed.
    """
    loop = trace.loop
    moved = set(_worth_hoisting(loop))
    outside: dict[Value, Atom] = dict(loop.invariants)
    before: list[Operation] = []
    for op in (op for op in loop.body.operations if op in moved):
        copy, new = clone(op, {value: outside[value] for value in op.values_in})
        before.append(copy)
        outside.update(new)
    kept = tuple(op for op in loop.body.operations if op not in moved)
    read = [value for value in free_values(kept, loop.body.outputs) if value in outside]
    body = Graph(loop.body.inputs, kept, loop.body.outputs)
    invariants = tuple((value, outside[value]) for value in read)
    return replace(
        trace,
        operations=sort_operations((*trace.operations, *before)),
        loop=replace(loop, body=body, invariants=invariants),  # type: ignore[arg-type]
    )


def _worth_hoisting(loop: Loop) -> tuple[Operation, ...]:
    invariant = {value for value, _ in loop.invariants}
    candidates: list[Operation] = []
    for op in loop.body.operations:
        if only_moves(op) and invariant.issuperset(op.values_in):
            candidates.append(op)
            invariant.update(op.outputs)
    return ancestors(candidates, [v for op in candidates if copies(op) for v in op.outputs])
