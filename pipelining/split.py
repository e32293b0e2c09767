"""Split a stage's backward in two: input gradients (I), which other stages wait for, and weight gradients (W).

In: a B task.  Out: an I task that makes everything other tasks read, and a W task with the rest; together they run
the same operations on the same numbers.  What crosses from I to W is kept in memory until W runs.

Between plain operations the split is data flow.  Two kinds of operations hide it and are opened:

- a `scan` (a run of equal layers) whose outputs are wanted in part is *fissioned*: a scan for I, which also stacks
  what the second one reads, and a scan for W;
- a `checkpoint` whose outputs are wanted in part is inlined, so that its recomputation runs once, in I.

The first stage hands no gradient on.  There, what leads to more than one parameter's gradient (the chain through the
layers) is I, and what only one gradient needs is W.

Reference: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2 (its "B" is our I).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagewright.pipelining.actions import Kind
from stagewright.pipelining.graph import (
    Atom,
    Graph,
    Operation,
    Scan,
    Value,
    ancestors,
    free_values,
    inline,
)
from stagewright.pipelining.primitives import MOVEMENT
from stagewright.pipelining.stages import StagePlan, StageTask
from stagewright.pipelining.translate import open_checkpoint, open_scan


def split_backwards(plan: StagePlan) -> StagePlan:
    """A plan in which every stage has an I and a W beside its B."""
    tasks = dict(plan.tasks)
    for (stage, kind), task in plan.tasks.items():
        if kind is Kind.B:
            first, second = split_backward(task)
            tasks[stage, Kind.I] = first
            tasks[stage, Kind.W] = second
    return replace(plan, tasks=tasks)


def split_backward(task: StageTask) -> tuple[StageTask, StageTask]:
    """The I and W of one B task."""
    if not task.exports:
        task = replace(task, operations=_without_checkpoints(task.operations))
    wanted = set(task.exports) or _shared(task)
    first, second = _split(task.operations, wanted)
    made = {value for op in first for value in op.outputs}
    own = [r for r in task.results if r.atom in made]
    rest = [r for r in task.results if r.atom not in made]
    reads = free_values(second, [r.atom for r in rest])
    stash = tuple(value for value in reads if value in made and value not in task.exports)
    i_task = StageTask(
        task.stage, Kind.I, first, free_values(first), (*task.exports, *stash), tuple(own)
    )
    return i_task, StageTask(task.stage, Kind.W, second, reads, (), tuple(rest))


def _without_checkpoints(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations with checkpoints opened, so that the chain inside one is seen."""
    opened: list[Operation] = []
    for op in operations:
        body = open_checkpoint(op)
        inner = None if body is None else _inlined(op, body)
        opened += [op] if inner is None else inner
    return tuple(opened)


def _shared(task: StageTask) -> set[Value]:
    """Results of work for more than one gradient; a gradient's own slices and casts count as that gradient."""
    maker = {value: op for op in task.operations for value in op.outputs}
    roots: dict[Value, int] = {}
    for result in task.results:
        root = _behind_movement(result.atom, maker)
        if isinstance(root, Value):
            roots.setdefault(root, 1 << len(roots))
    leads: dict[Value, int] = dict(roots)
    shared: set[Value] = set()
    for op in reversed(task.operations):
        mask = 0
        for value in op.outputs:
            mask |= leads.get(value, 0)
        for value in op.values_in:
            leads[value] = leads.get(value, 0) | mask
        if mask.bit_count() > 1:
            shared.update(value for value in op.outputs if value not in roots)
    return shared


def _behind_movement(atom: Atom, maker: dict[Value, Operation]) -> Atom:
    while isinstance(atom, Value) and atom in maker:
        op = maker[atom]
        if op.operator.name not in MOVEMENT or len(op.values_in) != 1:
            return atom
        atom = op.values_in[0]
    return atom


def _split(
    operations: Sequence[Operation], wanted: set[Value]
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Part operations into those that `wanted` needs and the others, opening what is needed in part."""
    needed = set(wanted)
    first: list[Operation] = []
    second: list[Operation] = []
    work = list(operations)
    while work:
        op = work.pop()
        hits = [value in needed for value in op.outputs]
        if not any(hits):
            second.append(op)
            continue
        opened = None if all(hits) else _open(op, hits)
        if opened is None:
            first.append(op)
            needed.update(op.values_in)
        elif isinstance(opened, Fission):
            first.append(opened.first)
            needed.update(opened.first.values_in)
            second.append(opened.second)
        else:
            work.extend(opened)
    return tuple(reversed(first)), tuple(reversed(second))


@dataclass(frozen=True, slots=True, eq=False)
class Fission:
    """A scan in two: `first` also makes what `second` reads of it."""

    first: Operation
    second: Operation


def _open(op: Operation, hits: Sequence[bool]) -> "Fission | Sequence[Operation] | None":
    """The operation in parts, or None if it has to stay whole."""
    if op.operator.name == "scan":
        return fission(op, hits)
    body = open_checkpoint(op)
    return None if body is None else _inlined(op, body)


def _inlined(op: Operation, body: Graph) -> list[Operation] | None:
    """The operations of a checkpoint, making the very values that the checkpoint made."""
    operations, outputs = inline(body, op.inputs)
    made = {value for inner in operations for value in inner.outputs}
    renamed = {a: v for a, v in zip(outputs, op.outputs, strict=True) if isinstance(a, Value)}
    if len(renamed) < len(outputs) or not made.issuperset(renamed):
        return None  # an output twice, a constant, or an input handed through
    return [_rename(inner, renamed) for inner in operations]


def _rename(op: Operation, names: Mapping[Value, Value]) -> Operation:
    inputs = tuple(names.get(a, a) if isinstance(a, Value) else a for a in op.inputs)
    return Operation(op.operator, inputs, tuple(names.get(v, v) for v in op.outputs))


def fission(op: Operation, hits: Sequence[bool]) -> Fission | None:
    """Split a scan: the wanted outputs (`hits`), and the others.

    Returns:
      None if the wanted outputs need everything.
    """
    scan = open_scan(op, inline_checkpoints=True)
    body, num_carry = scan.body, scan.num_carry
    carry_in = body.inputs[scan.num_consts : scan.num_consts + num_carry]
    wanted = _close_over_carry(body, carry_in, list(hits))
    if all(wanted):
        return None
    targets = {
        a for a, hit in zip(body.outputs, wanted, strict=True) if hit and isinstance(a, Value)
    }
    first_ops, second_ops = _split(body.operations, targets)
    rest = [a for a, hit in zip(body.outputs, wanted, strict=True) if not hit]
    own_carry = {v for v, hit in zip(carry_in, wanted[:num_carry], strict=True) if hit}
    made = {value for inner in first_ops for value in inner.outputs} | own_carry
    stash = [value for value in free_values(second_ops, rest) if value in made]
    stacked = [Value((scan.length, *value.shape), value.dtype) for value in stash]
    first = _scan_part(op, scan, first_ops, wanted, stash, stacked, ())
    second = _scan_part(
        op,
        scan,
        second_ops,
        [not hit for hit in wanted],
        (),
        (),
        tuple(zip(stash, stacked, strict=True)),
    )
    return Fission(first, second)


def _close_over_carry(body: Graph, carry_in: Sequence[Value], wanted: list[bool]) -> list[bool]:
    """Want every carry that the wanted outputs read."""
    while True:
        targets = [a for a, hit in zip(body.outputs, wanted, strict=True) if hit]
        read = set(free_values(ancestors(body.operations, targets), targets))
        more = [i for i, value in enumerate(carry_in) if value in read and not wanted[i]]
        if not more:
            return wanted
        for i in more:
            wanted[i] = True


def _scan_part(
    op: Operation,
    scan: Scan,
    operations: tuple[Operation, ...],
    wanted: Sequence[bool],
    extra_ys: Sequence[Value],
    extra_outputs: Sequence[Value],
    extra_xs: Sequence[tuple[Value, Value]],
) -> Operation:
    """A scan over `operations` with the wanted outputs, more stacked ones, and more scanned-over inputs."""
    body, num_consts, num_carry = scan.body, scan.num_consts, scan.num_carry
    outputs = [a for a, hit in zip(body.outputs, wanted, strict=True) if hit]
    read = set(free_values(operations, [*outputs, *extra_ys]))
    pairs = list(zip(body.inputs, op.inputs, strict=True))
    consts = [pair for pair in pairs[:num_consts] if pair[0] in read]
    carry = [
        pair
        for pair, hit in zip(
            pairs[num_consts : num_consts + num_carry], wanted[:num_carry], strict=True
        )
        if hit
    ]
    xs = [pair for pair in pairs[num_consts + num_carry :] if pair[0] in read] + list(extra_xs)
    inputs = [*consts, *carry, *xs]
    part = Scan(
        Graph(tuple(v for v, _ in inputs), operations, (*outputs, *extra_ys)),
        len(consts), len(carry), scan.length, scan.reverse, scan.unroll, scan.source,
    )  # fmt: skip
    made = [v for v, hit in zip(op.outputs, wanted, strict=True) if hit]
    return Operation(part, tuple(a for _, a in inputs), (*made, *extra_outputs))
