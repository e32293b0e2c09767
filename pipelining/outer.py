"""Rewrite what surrounds the loop so that each rank can do its part.

In: a cut loop and the step's outer operations.  Out: outer operations that also start and finish the accumulators,
in which

- the parts of a gradient that several stages contribute to are added once;
- a chain of additions over values of several ranks (a global norm) adds up each rank's values first, so that one
  partial a rank is sent; additions on one rank keep their order, and with it their bits;
- a branch (`cond`) over values of several ranks becomes both branches and a selection.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagewright.pipelining.graph import (
    Atom,
    Graph,
    Literal,
    Operation,
    Value,
    inline,
    resolve,
    sort_operations,
    substitute,
)
from stagewright.pipelining.placement import Anchors, Borders, anchor_all
from stagewright.pipelining.primitives import SMALL, is_sum
from stagewright.pipelining.stages import Result, StagePlan
from stagewright.pipelining.trace import Trace
from stagewright.pipelining.translate import branches, trace_graph


@dataclass(frozen=True, slots=True, eq=False)
class Accumulator:
    """Where one result of one task is added up.

    Attributes:
      result: what is added.
      start: the accumulator before the loop.
      end: the accumulator after it.
    """

    result: Result
    start: Value
    end: Value


@dataclass(frozen=True, slots=True, eq=False)
class Outer:
    """The step around the loop.

    Attributes:
      operations: in an order in which they can run.
      accumulators: by result.
      outputs: the step's results.
      combined: small sums over several ranks' partials, with the rank that makes them.
    """

    operations: tuple[Operation, ...]
    accumulators: Mapping[Result, Accumulator]
    outputs: tuple[Atom, ...]
    combined: Mapping[Value, int] = field(default_factory=dict)


def add_accumulators(trace: Trace, plan: StagePlan) -> Outer:
    """Outer operations with the start and the finish of every accumulator."""
    loop = plan.loop
    results = dict.fromkeys(result for task in plan.tasks.values() for result in task.results)
    added: list[Operation] = []
    accumulators = {}
    parts: dict[int, list[Value]] = {}
    for result in sorted(results, key=lambda r: r.output):
        struct = struct_of(result.atom)
        reduction = loop.reductions[result.output]
        start = _call(
            added, lambda r=reduction, s=struct: r.init(s, loop.num_microbatches, loop.accum_dtype)
        )
        end = Value(start.shape, start.dtype)
        accumulators[result] = Accumulator(result, start, end)
        parts.setdefault(result.output, []).append(end)
    finished: dict[Value, Atom] = {}
    for output, ends in parts.items():
        finished[loop.outputs[output]] = _finish(added, trace, plan, output, ends)
    outputs = _distinct(added, [resolve(atom, finished) for atom in trace.outputs])
    operations = sort_operations((*(substitute(op, finished) for op in trace.operations), *added))
    return Outer(operations, accumulators, outputs)


def _distinct(added: list[Operation], outputs: Sequence[Atom]) -> tuple[Atom, ...]:
    """The results, each an array of its own: the caller may give one away and keep another."""
    seen: set[Atom] = set()
    distinct: list[Atom] = []
    for atom in outputs:
        distinct.append(_call(added, jnp.copy, atom) if atom in seen else atom)
        seen.add(atom)
    return tuple(distinct)


def _finish(
    added: list[Operation], trace: Trace, plan: StagePlan, output: int, ends: Sequence[Value]
) -> Atom:
    loop = plan.loop
    total: Atom = ends[0]
    for end in ends[1:]:
        total = _call(added, _add, total, end)
    struct = struct_of(trace.loop.body.outputs[output])  # the cut loop's has a place for each part
    reduction = loop.reductions[output]
    finished: Atom = _call(
        added, lambda a: reduction.finish(a, struct, loop.num_microbatches), total
    )
    return finished


def _call(added: list[Operation], function: Any, *args: Atom) -> Any:
    """Trace a function of one result and append its operations."""
    operations, (out,) = inline(trace_graph(function, *(struct_of(a) for a in args)), args)
    added += operations
    return _call(added, jnp.copy, out) if isinstance(out, Literal) else out


def struct_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a value or a literal."""
    if isinstance(atom, Value):
        return atom.struct
    return jax.ShapeDtypeStruct(np.shape(atom.value), atom.value.dtype)


def distribute(outer: Outer, borders: Borders) -> Outer:
    """Open branches and regroup sums over several ranks."""
    opened = _open_branches(outer, anchor_all(outer.operations, borders))
    return _regroup_sums(opened, anchor_all(opened.operations, borders))


def _open_branches(outer: Outer, anchors: Anchors) -> Outer:
    aliases: dict[Value, Atom] = {}
    operations: list[Operation] = []
    for op in outer.operations:
        ranks = {anchors.local[value] for value in op.values_in if value in anchors.local}
        choices = branches(op) if len(ranks) > 1 else None
        if choices is None:
            operations.append(substitute(op, aliases))
        else:
            outputs = _select(operations, [resolve(a, aliases) for a in op.inputs], choices)
            aliases.update(zip(op.outputs, outputs, strict=True))
    return Outer(
        tuple(operations), outer.accumulators, tuple(resolve(a, aliases) for a in outer.outputs)
    )


def _select(
    operations: list[Operation], operands: Sequence[Atom], choices: Sequence[Graph]
) -> list[Atom]:
    which, *rest = operands
    cases = []
    for choice in choices:
        inner, outputs = inline(choice, rest)
        operations += inner
        cases.append(outputs)
    chosen: list[Atom] = []
    for atoms in zip(*cases, strict=True):
        chosen.append(_call(operations, lambda w, *cs: jax.lax.select_n(w, *cs), which, *atoms))
    return chosen


def _regroup_sums(outer: Outer, anchors: Anchors) -> Outer:
    maker = {value: op for op in outer.operations for value in op.outputs}
    uses = Counter(value for op in outer.operations for value in op.values_in)
    uses.update(atom for atom in outer.outputs if isinstance(atom, Value))

    def inner(value: Value) -> bool:
        return value in maker and is_sum(maker[value]) and uses[value] == 1

    def terms(value: Value) -> list[Value]:
        return [t for v in maker[value].values_in for t in (terms(v) if inner(v) else [v])]

    consumed = {v for op in outer.operations if is_sum(op) for v in op.values_in if inner(v)}
    aliases: dict[Value, Atom] = {}
    added: list[Operation] = []
    combined: dict[Value, int] = {}
    for op in outer.operations:
        root = op.outputs[0] if op.outputs else None
        if root is not None and is_sum(op) and root not in consumed:
            groups = _group(terms(root), anchors)
            if len(groups) > 1:
                aliases[root] = _sum_groups(added, groups, combined)
    operations = sort_operations((*(substitute(op, aliases) for op in outer.operations), *added))
    outputs = tuple(resolve(atom, aliases) for atom in outer.outputs)
    return Outer(operations, outer.accumulators, outputs, combined)


def _group(terms: Sequence[Value], anchors: Anchors) -> dict[int, list[Value]]:
    """The terms by rank, ranks in order; terms of no rank go with the first."""
    groups: dict[int, list[Value]] = {}
    for term in terms:
        groups.setdefault(anchors.local.get(term, -1), []).append(term)
    unbound = groups.pop(-1, [])
    ordered = {rank: groups[rank] for rank in sorted(groups)}
    if unbound and ordered:
        first = next(iter(ordered))
        ordered[first] = [*unbound, *ordered[first]]
    return ordered


def _sum_groups(
    added: list[Operation], groups: Mapping[int, Sequence[Value]], combined: dict[Value, int]
) -> Value:
    """One partial a rank, then their sum on the first of them, which is shared if it is small."""
    total, *partials = [_sum(added, group) for group in groups.values()]
    for partial in partials:
        total = _call(added, _add, total, partial)
        if total.size <= SMALL:
            combined[total] = min(groups)
    return total


def _sum(added: list[Operation], terms: Sequence[Value]) -> Value:
    total, *rest = terms
    for term in rest:
        total = _call(added, _add, total, term)
    return total


def _add(left: Any, right: Any) -> Any:
    return left + right
