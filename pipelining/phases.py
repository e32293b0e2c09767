"""Which phase of the pipeline each operation of the loop body belongs to.

Phases are the stages in the order in which one micro-batch passes them: forward 0 … S-1, then backward S-1 … 0; so
phase p < S is the forward of stage p, and phase p >= S the backward of stage 2S-1-p.  An operation

- that reads a cotangent runs as early as it can: in the backward of the stage whose cotangents it reads;
- that a later stage or the loss needs runs in the stage of the latest mark that its operands passed;
- that only a backward needs (a residual that is no activation) waits for that backward;
- that depends on no activation goes to the first phase that needs it, and is repeated in each of them if it is cheap
  (masks, positions, casts);
- that nobody reads is there for its effect (`jax.debug.print`) and runs as early as it can.

In: operations, marks, outputs.  Out: for each operation, its phases.
"""

from collections.abc import Iterable, Sequence

from stagewright.pipelining.graph import Atom, Operation, Value, ancestors
from stagewright.pipelining.marks import Marks
from stagewright.pipelining.primitives import is_cheap

Phases = dict[Operation, frozenset[int]]

_NOWHERE = -1  # the anchor of what depends on no activation


def assign_phases(
    operations: Sequence[Operation], marks: Marks, values: Sequence[Atom], grads: Sequence[Atom]
) -> Phases:
    """The phases of every operation; marks that are no stage edge count as any other operation.

    Args:
      operations: the loop body, pruned, in order.
      marks: its stage edges.
      values: the body's losses and aux.
      grads: the body's gradients.
    """
    last = 2 * marks.num_stages - 1
    anchor = _anchors(operations, marks)
    forward = _needed_forward(operations, marks, values)
    wanted: dict[Value, set[int]] = {}
    _want(wanted, grads, {last})
    _want(wanted, values, {marks.num_stages - 1})
    independent = _independent(operations, anchor)
    phases: Phases = {}
    for op in reversed(operations):
        if op in marks.edges:
            _want(wanted, op.inputs, {_leaving(marks, op)})
            continue
        readers = set().union(*(wanted.get(value, set()) for value in op.outputs))
        phases[op] = _choose(
            op,
            anchor[op],
            readers or {max(anchor[op], 0)},
            op in forward or not readers,
            op in independent,
            marks.num_stages,
        )
        _want(wanted, op.inputs, phases[op])
    return phases


def _choose(
    op: Operation, anchor: int, readers: set[int], forward: bool, independent: bool, num_stages: int
) -> frozenset[int]:
    if anchor >= num_stages or (forward and anchor != _NOWHERE):
        return frozenset({anchor})
    if anchor != _NOWHERE:
        return frozenset({max(anchor, min(*readers, 2 * num_stages - 1 - anchor))})
    return frozenset(readers) if independent else frozenset({min(readers)})


def _want(wanted: dict[Value, set[int]], atoms: Iterable[Atom], phases: Iterable[int]) -> None:
    for atom in atoms:
        if isinstance(atom, Value):
            wanted.setdefault(atom, set()).update(phases)


def _anchors(operations: Sequence[Operation], marks: Marks) -> dict[Operation, int]:
    """The earliest phase in which an operation's operands are all there."""
    at: dict[Value, int] = {}
    anchors = {}
    for op in operations:
        anchor = max((at.get(value, _NOWHERE) for value in op.values_in), default=_NOWHERE)
        if op in marks.edges:
            anchor = max(anchor, _entered(marks, op))
        anchors[op] = anchor
        at.update(dict.fromkeys(op.outputs, anchor))
    return anchors


def _entered(marks: Marks, op: Operation) -> int:
    """The phase that begins behind a mark."""
    edge, forward = marks.edges[op]
    return edge + 1 if forward else 2 * marks.num_stages - 1 - edge


def _leaving(marks: Marks, op: Operation) -> int:
    """The phase that ends at a mark."""
    return _entered(marks, op) - 1


def _needed_forward(
    operations: Sequence[Operation], marks: Marks, values: Sequence[Atom]
) -> set[Operation]:
    """What the forward marks and the losses need."""
    handed = [atom for op, (_, forward) in marks.edges.items() if forward for atom in op.inputs]
    return set(ancestors(operations, [*handed, *values]))


def _independent(operations: Sequence[Operation], anchor: dict[Operation, int]) -> set[Operation]:
    """Cheap operations that depend on no activation, and so do the ones that they read."""
    dependent: set[Value] = set()
    independent = set()
    for op in operations:
        if anchor[op] == _NOWHERE and is_cheap(op) and not dependent.intersection(op.values_in):
            independent.add(op)
        else:
            dependent.update(op.outputs)
    return independent
