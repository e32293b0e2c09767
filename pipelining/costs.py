"""What an operation costs, in floating-point operations, counted from its shapes.

Products count two a multiply-add, everything else one an element.  Used to balance stages before anything was
measured.
"""

import numpy as np

from stagewright.pipelining.graph import Operation, Scan
from stagewright.pipelining.translate import branches, open_checkpoint, open_scan


def operation_cost(op: Operation) -> float:
    """Floating-point operations of one operation."""
    name = op.operator.name
    if name == "dot_general":
        return _dot_cost(op)
    if name == "scan":
        scan = open_scan(op, inline_checkpoints=False)
        return scan.length * sum(map(operation_cost, scan.body.operations))
    body = open_checkpoint(op)
    if body is not None:
        return sum(map(operation_cost, body.operations))
    choices = branches(op)
    if choices is not None:
        return max(sum(map(operation_cost, choice.operations)) for choice in choices)
    return float(sum(value.size for value in op.outputs))


def _dot_cost(op: Operation) -> float:
    assert not isinstance(op.operator, Scan)
    (contracted, _), _ = op.operator.eqn.params["dimension_numbers"]
    left = op.inputs[0].shape
    return 2.0 * op.outputs[0].size * float(np.prod([left[axis] for axis in contracted]))
