"""Part the gradients that several stages contribute to.

The gradient of a parameter that several stages read (tied embeddings) is a sum over stages for every micro-batch.
Adding it up there would send an array as large as the parameter for each micro-batch; so each stage's part gets an
accumulator of its own, and the parts are added once, after the loop.

In: a loop body with phases.  Out: its outputs as one or several contributions each, all other things unchanged.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagewright.pipelining.graph import Atom, Graph, Operation, Operator, Value, like
from stagewright.pipelining.marks import Marks
from stagewright.pipelining.phases import Phases
from stagewright.pipelining.primitives import LINEAR, is_sum
from stagewright.pipelining.reductions import Mean, Sum
from stagewright.pipelining.trace import Loop


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """One part of one output of the loop."""

    output: int
    atom: Atom


@dataclass(frozen=True, slots=True, eq=False)
class Contributions:
    """The loop's outputs, parted.

    Attributes:
      operations: the body's operations, with the ones that the parts needed in addition.
      results: all parts, in the order of the outputs.
      num_values: how many of the outputs are losses and aux.
      changed: whether anything was parted.
    """

    operations: tuple[Operation, ...]
    results: tuple[Contribution, ...]
    num_values: int
    changed: bool

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """What the parts are made of."""
        return tuple(r.atom for r in self.results)

    @property
    def grads(self) -> tuple[Contribution, ...]:
        """The parts of gradients."""
        return tuple(r for r in self.results if r.output >= self.num_values)


class _Splitter:
    """Walks one output's sum down to the terms of single stages."""

    def __init__(self, body: Graph, phases: Phases, marks: Marks) -> None:
        self.maker = {value: op for op in body.operations for value in op.outputs}
        self.uses = Counter(value for op in body.operations for value in op.values_in)
        self.uses.update(atom for atom in body.outputs if isinstance(atom, Value))
        self.phases = dict(phases)
        self.marks = marks
        self.added: list[Operation] = []

    def stage(self, value: Value) -> int | None:
        """The stage that makes a value; None for what no operation makes."""
        phases = self._phases_of(value)
        if not phases:
            return None
        phase, num_stages = max(phases), self.marks.num_stages
        return phase if phase < num_stages else 2 * num_stages - 1 - phase

    def _phases_of(self, value: Value) -> frozenset[int]:
        op = self.maker.get(value)
        return self.phases.get(op, frozenset()) if op is not None else frozenset()

    def terms(self, value: Value) -> list[Value]:
        """The terms that sum to `value`, more than one only if they come from several stages."""
        op = self.maker.get(value)
        if op is None or self.uses[value] > 1:
            return [value]
        if op in self.marks.edges:  # it came over an edge: its terms are made before
            atom = op.inputs[op.outputs.index(value)]
            return self.terms(atom) if isinstance(atom, Value) else [value]
        if is_sum(op):
            left, right = op.values_in
            terms = self.terms(left) + self.terms(right)
        elif op.operator.name in LINEAR and len(op.values_in) == 1:
            terms = [self._through(op, term) for term in self.terms(op.values_in[0])]
        else:
            return [value]
        return terms if len({self.stage(term) for term in terms}) > 1 else [value]

    def _through(self, op: Operation, term: Value) -> Value:
        """The term behind a linear operation."""
        if term is op.values_in[0]:
            return op.outputs[0]
        out = like(op.outputs[0])
        self._add(Operation(op.operator, (term,), (out,)), self._phases_of(term))
        return out

    def sum_by_stage(self, terms: Sequence[Value]) -> list[Value]:
        """One value a stage."""
        by_stage: dict[int | None, Value] = {}
        for term in terms:
            stage = self.stage(term)
            by_stage[stage] = self._plus(by_stage[stage], term) if stage in by_stage else term
        return list(by_stage.values())

    def _plus(self, left: Value, right: Value) -> Value:
        out = like(left)
        self._add(Operation(self._adder(left), (left, right), (out,)), self._phases_of(right))
        return out

    def _adder(self, value: Value) -> Operator:
        from stagewright.pipelining.translate import trace_graph

        (op,) = trace_graph(lambda a, b: a + b, value.struct, value.struct).operations
        return op.operator

    def _add(self, op: Operation, phases: frozenset[int]) -> None:
        self.added.append(op)
        self.maker[op.outputs[0]] = op
        self.phases[op] = phases


def split_partials(loop: Loop, body: Graph, phases: Phases, marks: Marks) -> Contributions:
    """Part each summed gradient by the stages that contribute to it."""
    splitter = _Splitter(body, phases, marks)
    results: list[Contribution] = []
    for output, (atom, reduction) in enumerate(zip(body.outputs, loop.reductions, strict=True)):
        parts: Sequence[Atom] = [atom]
        if (
            isinstance(atom, Value)
            and isinstance(reduction, (Sum, Mean))
            and output >= loop.num_values
        ):
            terms = splitter.terms(atom)
            parts = splitter.sum_by_stage(terms) if len(terms) > 1 else [atom]
        results += [Contribution(output, part) for part in parts]
    operations = (*body.operations, *splitter.added)
    changed = len(results) > len(body.outputs)
    return Contributions(operations, tuple(results), loop.num_values, changed)


def by_output(results: Sequence[Contribution]) -> Mapping[int, list[Contribution]]:
    """The parts of each output."""
    found: dict[int, list[Contribution]] = {}
    for result in results:
        found.setdefault(result.output, []).append(result)
    return found
