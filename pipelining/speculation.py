"""Update before the norm is known: post-validation for whatever hides a global condition behind a selection.

In: the outer operations of a step.  Out: the same with, for each rank, an *optimistic* version of its updates that
waits for no other rank, and a *validation* that keeps it if the guess was right and makes the exact update from the
old state if it was not.

What has to be waited for are *late* values: small results of several ranks (a global norm, "all gradients are
finite").  Clipping and its kin apply them as `select(condition, updated, otherwise)`.  Where exactly one of the cases
depends on gradients and needs nothing late but what was guessed already, that case is the guess.  An update that uses
a late value in any other way (divides by the norm whatever it is) has no optimistic version and stays as it is.

Reference:
  Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 4.  There the optimizer's own
  arithmetic is undone on a wrong guess, and validation reaches into the next step; here the old state is kept until
  the step's validation.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from stagewright.pipelining.graph import (
    Atom,
    Graph,
    Operation,
    Value,
    ancestors,
    clone,
    evaluate,
    free_values,
    inline,
    resolve,
)
from stagewright.pipelining.outer import Outer, struct_of
from stagewright.pipelining.placement import Anchors, Borders, anchor_all
from stagewright.pipelining.primitives import MOVEMENT
from stagewright.pipelining.segments import Detour
from stagewright.pipelining.translate import trace_graph

Assumptions = dict[Value, int]
"""For each small condition, the case that it is expected to choose."""


@dataclass(slots=True, eq=False)
class _Guesses:
    """What is known while walking down the operations: filled by one pass, read by the next."""

    optimistic: dict[Value, Atom] = field(default_factory=dict)
    assumptions: dict[Value, Assumptions] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)


def speculate(outer: Outer, borders: Borders) -> tuple[Outer, Detour]:
    """Give each rank's late results an optimistic version and a validation.

    Args:
      outer: the step around the loop, its sums regrouped.
      borders: what the loop and the caller ask of it.

    Returns:
      The new step (the old one where nothing can be guessed), and the optimistic updates, which run while the late
      values are on their way.
    """
    anchors = anchor_all(outer.operations, borders)
    roots = _late_roots(outer, borders, anchors)
    late = _descendants(outer.operations, roots)
    gradients = _values_from(outer.operations, borders.loop_gradients)
    guesses = _guess(outer.operations, late, gradients)
    wanted: dict[int, list[Value]] = {}
    for atom in dict.fromkeys(outer.outputs):
        if isinstance(atom, Value) and atom in guesses.optimistic and atom in anchors.local:
            wanted.setdefault(anchors.local[atom], []).append(atom)
    if not wanted:
        return outer, Detour()
    outer = _with_validation(outer, roots, late, guesses, wanted)
    return outer, Detour(frozenset(guesses.operations), roots)


def _late_roots(outer: Outer, borders: Borders, anchors: Anchors) -> frozenset[Operation]:
    """Operations that join small values of several ranks' gradients."""
    origin: dict[Value, frozenset[int]] = {
        value: frozenset({rank}) for value, rank in borders.loop_gradients.items()
    }
    for op in outer.operations:
        ranks = frozenset().union(*(origin.get(v, frozenset()) for v in op.values_in))
        origin.update(dict.fromkeys(op.outputs, ranks))
    return frozenset(
        op
        for op in outer.operations
        if op.outputs and all(v in anchors.shared and len(origin[v]) > 1 for v in op.outputs)
    )


def _descendants(operations: Sequence[Operation], roots: frozenset[Operation]) -> set[Value]:
    found: set[Value] = set()
    for op in operations:
        if op in roots or any(v in found for v in op.values_in):
            found.update(op.outputs)
    return found


def _values_from(operations: Sequence[Operation], sources: Mapping[Value, int]) -> set[Value]:
    found = set(sources)
    for op in operations:
        if any(v in found for v in op.values_in):
            found.update(op.outputs)
    return found


# ---- guessing -------------------------------------------------------------------------------------------------------


def _guess(operations: Sequence[Operation], late: set[Value], gradients: set[Value]) -> _Guesses:
    """The optimistic version of each late value that has one."""
    guesses = _Guesses()
    maker = {value: op for op in operations for value in op.outputs}
    for op in operations:
        if op.has_effects or not any(value in late for value in op.values_in):
            continue
        condition = _guard(op, late, maker)
        if condition is not None:
            _choose(op, condition, late, gradients, guesses)
        elif all(v in guesses.optimistic for v in op.values_in if v in late):
            assumed = _assumed_by(op.values_in, guesses)
            if assumed is not None:
                copy, new = clone(op, guesses.optimistic)
                guesses.operations.append(copy)
                guesses.optimistic.update(new)
                guesses.assumptions.update(dict.fromkeys(op.outputs, assumed))
    return guesses


def _guard(op: Operation, late: set[Value], maker: Mapping[Value, Operation]) -> Value | None:
    """The scalar by which an operation selects, if it is late."""
    which = op.inputs[0] if op.inputs else None
    if op.operator.name != "select_n" or not isinstance(which, Value) or which not in late:
        return None
    return _condition(which, maker)


def _choose(
    op: Operation, condition: Value, late: set[Value], gradients: set[Value], guesses: _Guesses
) -> None:
    """Guess a selection's case, if exactly one can be the update."""
    cases = list(enumerate(op.inputs[1:]))
    known = [(i, c) for i, c in cases if c not in late or c in guesses.optimistic]
    updates = [(i, c) for i, c in known if c in gradients]
    if len(updates) == 1:
        ((index, case),) = updates
        assumed = guesses.assumptions.get(case, {})
        if assumed.get(condition, index) != index:
            return
        guesses.optimistic[op.outputs[0]] = resolve(case, guesses.optimistic)
        guesses.assumptions[op.outputs[0]] = {**assumed, condition: index}


def _assumed_by(values: Sequence[Value], guesses: _Guesses) -> Assumptions | None:
    """What all of the guesses together assume; None if they contradict each other."""
    assumed: Assumptions = {}
    for value in values:
        for condition, case in guesses.assumptions.get(value, {}).items():
            if assumed.setdefault(condition, case) != case:
                return None
    return assumed


def _condition(which: Value, maker: Mapping[Value, Operation]) -> Value | None:
    """The scalar that a condition is broadcast from."""
    while which.size != 1:
        op = maker.get(which)
        if op is None or op.operator.name not in MOVEMENT or len(op.values_in) != 1:
            return None
        (which,) = op.values_in
    return which


# ---- validating -----------------------------------------------------------------------------------------------------


def _with_validation(
    outer: Outer,
    roots: frozenset[Operation],
    late: set[Value],
    guesses: _Guesses,
    wanted: Mapping[int, Sequence[Value]],
) -> Outer:
    dependent = tuple(
        op for op in outer.operations if op not in roots and any(v in late for v in op.values_in)
    )
    validated: dict[Value, Atom] = {}
    added: list[Operation] = []
    for values in wanted.values():
        added += _validate(_compatible(values, guesses), dependent, guesses, validated)
    outputs = tuple(resolve(atom, validated) for atom in outer.outputs)
    operations = (*outer.operations, *guesses.operations, *added)
    return replace(outer, operations=operations, outputs=outputs)


def _compatible(values: Sequence[Value], guesses: _Guesses) -> list[Value]:
    """Values whose guesses can all be right at once; those that contradict earlier ones stay exact."""
    chosen: list[Value] = []
    for value in values:
        if _assumed_by([*chosen, value], guesses) is not None:
            chosen.append(value)
    return chosen


def _validate(
    values: Sequence[Value],
    dependent: Sequence[Operation],
    guesses: _Guesses,
    validated: dict[Value, Atom],
) -> list[Operation]:
    """One choice a rank between its optimistic results and the exact ones."""
    exact_operations = ancestors(dependent, values)
    reads = free_values(exact_operations)
    exact = Graph(reads, exact_operations, tuple(values))
    guessed = [guesses.optimistic[value] for value in values]
    assumed = _assumed_by(values, guesses) or {}
    conditions, cases = list(assumed), list(assumed.values())

    def choose(*args: Any) -> list[Any]:
        flags, rest = args[: len(conditions)], args[len(conditions) :]
        right = [_case(flag) == case for flag, case in zip(flags, cases, strict=True)]
        chosen: list[Any] = jax.lax.cond(
            functools.reduce(jnp.logical_and, right),
            lambda guessed, reads: list(guessed),
            lambda guessed, reads: evaluate(exact, reads),
            rest[: len(guessed)],
            rest[len(guessed) :],
        )
        return chosen

    atoms = [*conditions, *guessed, *reads]
    operations, outputs = inline(trace_graph(choose, *(struct_of(a) for a in atoms)), atoms)
    validated.update(zip(values, outputs, strict=True))
    return operations


def _case(flag: Any) -> Any:
    """The number of the case that a condition of one element chooses."""
    return jnp.reshape(flag, ()).astype(jnp.int32)
