"""Cut a traced loop into stages: the forward and the backward of each, as graphs of their own.

In: a `Loop`, the number of stages, a partition.  Out: a `StagePlan`: for each stage an F and a B (and, where a
schedule asks for it, an I and a W: `split.py`), what each reads, hands on and contributes to the step's results.
Where stages run, and when, is not known here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagewright.nn.partition import Partition
from stagewright.pipelining.actions import Kind
from stagewright.pipelining.costs import operation_cost
from stagewright.pipelining.graph import (
    Atom,
    Graph,
    Operation,
    Value,
    free_values,
    resolve,
    substitute,
)
from stagewright.pipelining.marks import Marks, find_marks, is_mark
from stagewright.pipelining.partials import split_partials
from stagewright.pipelining.phases import Phases, assign_phases
from stagewright.pipelining.trace import Loop


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One accumulator: what a stage contributes to one output of the loop.

    Attributes:
      output: index of the loop's output.
      atom: the micro-batch's contribution.
    """

    output: int
    atom: Atom


@dataclass(frozen=True, slots=True, eq=False)
class StageTask:
    """One task of one stage, the same for every micro-batch.

    Attributes:
      stage: index of the stage.
      kind: F, B, I or W.
      operations: what it runs, in order.
      reads: values that it takes: loop invariants, micro-batch leaves, the index, and other tasks' exports.
      exports: values that it hands to other tasks.
      results: its contributions to the loop's outputs.
    """

    stage: int
    kind: Kind
    operations: tuple[Operation, ...]
    reads: tuple[Value, ...]
    exports: tuple[Value, ...]
    results: tuple[Result, ...]

    @property
    def graph(self) -> Graph:
        """Reads -> exports and results."""
        return Graph(self.reads, self.operations, (*self.exports, *(r.atom for r in self.results)))

    def __str__(self) -> str:
        return f"{self.kind.value} of stage {self.stage}"


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """A loop cut into stages.

    Attributes:
      loop: the loop, as cut (sums over several stages are parted: see `partials.py`).
      num_stages: number of stages.
      tasks: by (stage, kind); a task that has nothing to do is absent.
    """

    loop: Loop
    num_stages: int
    tasks: Mapping[tuple[int, Kind], StageTask]

    def maker(self) -> dict[Value, tuple[int, Kind]]:
        """Which task makes each exported value."""
        return {value: key for key, task in self.tasks.items() for value in task.exports}


def cut_stages(loop: Loop, num_stages: int, partition: Partition) -> StagePlan:
    """Cut a loop into `num_stages` stages at its marks.

    Raises:
      StageError: if there are too few marks.
    """
    body, marks = _choose_edges(loop.body, num_stages, partition)
    values, grads = body.outputs[: loop.num_values], body.outputs[loop.num_values :]
    phases = assign_phases(body.operations, marks, values, grads)
    contributions = split_partials(loop, body, phases, marks)
    if contributions.changed:
        parted = Graph(body.inputs, contributions.operations, contributions.atoms)
        body, marks = _prune(parted, marks)
        phases = assign_phases(
            body.operations, marks, values, [r.atom for r in contributions.grads]
        )
    aliases = {
        out: atom for op in marks.edges for out, atom in zip(op.outputs, op.inputs, strict=True)
    }
    results = [Result(r.output, resolve(r.atom, aliases)) for r in contributions.results]
    tasks = _build_tasks(body.operations, phases, aliases, results, loop, num_stages)
    return StagePlan(replace(loop, body=body), num_stages, tasks)


def _choose_edges(body: Graph, num_stages: int, partition: Partition) -> tuple[Graph, Marks]:
    """Find the marks that are stage edges and drop the others."""
    operations = body.operations
    marks = find_marks(operations, num_stages, partition, _segment_costs(operations))
    dropped = [op for op in operations if is_mark(op) and op not in marks.edges]
    aliases: dict[Value, Atom] = {
        out: a for op in dropped for out, a in zip(op.outputs, op.inputs, strict=True)
    }
    kept = []
    edges = {}
    for op in operations:
        if op in dropped:
            continue
        new = substitute(op, aliases)
        kept.append(new)
        if op in marks.edges:
            edges[new] = marks.edges[op]
    outputs = tuple(resolve(atom, aliases) for atom in body.outputs)
    return _prune(Graph(body.inputs, tuple(kept), outputs), Marks(num_stages, edges))


def _prune(body: Graph, marks: Marks) -> tuple[Graph, Marks]:
    """Drop operations without use (see `graph.prune`), and from marks what nobody reads behind them."""
    needed = {atom for atom in body.outputs if isinstance(atom, Value)}
    kept: list[Operation] = []
    edges = {}
    for op in reversed(body.operations):
        live = [i for i, value in enumerate(op.outputs) if value in needed]
        if not (live or op.has_effects):
            continue
        new = op
        if op in marks.edges:
            inputs = tuple(op.inputs[i] for i in live)
            new = Operation(op.operator, inputs, tuple(op.outputs[i] for i in live))
            edges[new] = marks.edges[op]
        kept.append(new)
        needed.update(new.values_in)
    return Graph(body.inputs, tuple(reversed(kept)), body.outputs), Marks(marks.num_stages, edges)


def _segment_costs(operations: Sequence[Operation]) -> list[float]:
    """Forward cost of each segment between marks, up to the last forward mark; the rest is the last one's."""
    costs = [0.0]
    for op in operations:
        if is_mark(op):
            costs += [0.0] if op.operator.eqn.params["forward"] else []  # type: ignore[union-attr]
        else:
            costs[-1] += operation_cost(op)
    return costs


def _phase_key(phase: int, num_stages: int) -> tuple[int, Kind]:
    return (phase, Kind.F) if phase < num_stages else (2 * num_stages - 1 - phase, Kind.B)


def _build_tasks(
    operations: Sequence[Operation],
    phases: Phases,
    aliases: Mapping[Value, Atom],
    results: Sequence[Result],
    loop: Loop,
    num_stages: int,
) -> dict[tuple[int, Kind], StageTask]:
    per_phase: list[list[Operation]] = [[] for _ in range(2 * num_stages)]
    for op in operations:
        for phase in phases.get(op, ()):
            per_phase[phase].append(substitute(op, aliases))
    results_of = _results_by_phase(results, per_phase, loop.num_values, num_stages)
    reads = [
        free_values(ops, [r.atom for r in done])
        for ops, done in zip(per_phase, results_of, strict=True)
    ]
    tasks = {}
    for phase, ops in enumerate(per_phase):
        made = {value for op in ops for value in op.outputs}
        read_later = {value for later in reads[phase + 1 :] for value in later}
        exports = tuple(
            v
            for op in ops
            for v in op.outputs
            if v in made & read_later and _first(v, per_phase) == phase
        )
        stage, kind = _phase_key(phase, num_stages)
        if ops or results_of[phase]:
            tasks[stage, kind] = StageTask(
                stage, kind, tuple(ops), reads[phase], exports, tuple(results_of[phase])
            )
    return tasks


def _first(value: Value, per_phase: Sequence[Sequence[Operation]]) -> int:
    return next(p for p, ops in enumerate(per_phase) if any(value in op.outputs for op in ops))


def _results_by_phase(
    results: Sequence[Result],
    per_phase: Sequence[Sequence[Operation]],
    num_values: int,
    num_stages: int,
) -> list[list[Result]]:
    """Each result belongs to the phase that makes it; inputs and constants to the last forward or backward."""
    made_in: dict[Value, int] = {}
    for phase, ops in enumerate(per_phase):
        for op in ops:
            made_in.update((value, phase) for value in op.outputs if value not in made_in)
    found: list[list[Result]] = [[] for _ in per_phase]
    for result in results:
        default = num_stages - 1 if result.output < num_values else 2 * num_stages - 1
        phase = made_in.get(result.atom, default) if isinstance(result.atom, Value) else default
        found[phase].append(result)
    return found
