"""How a step's values are spread over the devices of their ranks, where that is not XLA's choice.

In: specs of the arguments, a traced step and its accumulators.  Out: specs of the accumulators, which every task of a
stage must agree on, and of results that come back as arguments.  All else, residuals and what crosses a stage's edge
included, is spread as XLA's propagation finds best from there.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from stagewright.nn.axes import AxisRules, bind_axes
from stagewright.pipelining import jax_seams
from stagewright.pipelining.graph import Atom, Operation, Scan, Value
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.outer import Outer
from stagewright.pipelining.primitives import MOVEMENT
from stagewright.pipelining.trace import Trace

_CONSTRAINT = "sharding_constraint"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What a step on several devices a rank is compiled for.

    Attributes:
      mesh: the sizes.
      rules: from logical axis names to mesh axes.
      specs: one for each argument.
    """

    mesh: MeshSpec
    rules: AxisRules
    specs: tuple[PartitionSpec, ...]

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """The context in which to trace the step."""
        mesh = jax_seams.abstract_mesh(data=self.mesh.data, tensor=self.mesh.tensor)
        return bind_axes(self.rules, mesh)


def fix_specs(
    trace: Trace,
    outer: Outer,
    specs: Sequence[PartitionSpec],
    same_home: Sequence[tuple[Value, Value]],
) -> dict[Value, PartitionSpec]:
    """The values whose spread is fixed, outside the loop.

    Args:
      trace: the traced step.
      outer: the step around the loop, with its accumulators.
      specs: of the arguments.
      same_home: pairs (result, argument) of a state that comes back.
    """
    of_argument = dict(zip(trace.inputs, specs, strict=True))
    fixed = {new: of_argument[old] for new, old in same_home}
    maker = {value: op for op in trace.loop.body.operations for value in op.outputs}
    for accumulator in outer.accumulators.values():
        result = accumulator.result
        marked = _spec_of_atom(trace.loop.body.outputs[result.output], maker)
        added_dims = len(accumulator.start.shape) - len(result.atom.shape)
        spec = PartitionSpec(*([None] * added_dims), *marked)
        fixed[accumulator.start] = fixed[accumulator.end] = spec
    return fixed


def _spec_of_atom(atom: Atom, maker: Mapping[Value, Operation]) -> PartitionSpec:
    """The spec of the nearest constraint above a result, through movement that keeps its shape; whole without one."""
    while isinstance(atom, Value) and atom in maker:
        op = maker[atom]
        if isinstance(op.operator, Scan):
            break
        if op.operator.name == _CONSTRAINT:
            spec: PartitionSpec = op.operator.eqn.params["sharding"].spec
            return PartitionSpec(
                *(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec)
            )
        if op.operator.name not in MOVEMENT or op.inputs[0].shape != atom.shape:
            break
        atom = op.inputs[0]
    return PartitionSpec()
