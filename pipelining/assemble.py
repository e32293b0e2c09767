"""Write the program: every run and every transfer, in one global order.

In: a cut loop, placed outer operations, a schedule's order.  Out: for each rank a list of *drafts*, which name values
instead of slots.  Every transfer is drafted on both ranks at the same point of one global order of all tasks, so that
sends and receives of any two ranks stand in the same order on both and the program runs even if a send blocks until
its receive is posted.  `liveness.py` turns drafts into a `Program`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from stagewright.pipelining.actions import Action, Order
from stagewright.pipelining.graph import Graph, Operation, Value, ancestors, evaluate, free_values
from stagewright.pipelining.orders import topological_order
from stagewright.pipelining.outer import Accumulator, Outer
from stagewright.pipelining.placement import Placement
from stagewright.pipelining.program import Code
from stagewright.pipelining.reductions import Reduction
from stagewright.pipelining.segments import Detour, Segment, group_segments
from stagewright.pipelining.stages import StagePlan, StageTask

OUTSIDE = -1  # the micro-batch of values outside the loop

Key: TypeAlias = tuple[Any, int]  # a value and its micro-batch


@dataclass(frozen=True, slots=True, eq=False)
class DraftRun:
    """A run, in names."""

    code: int
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    action: Action | None
    label: str


@dataclass(frozen=True, slots=True, eq=False)
class DraftTransfer:
    """One side of a transfer, in names."""

    keys: tuple[Key, ...]
    peer: int
    tag: str
    sends: bool


Draft: TypeAlias = DraftRun | DraftTransfer


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """All ranks' drafts, and the codes that they run."""

    ranks: tuple[list[Draft], ...]
    codes: list[Code] = field(default_factory=list)

    def run(
        self,
        rank: int,
        code: int,
        inputs: Iterable[Key],
        outputs: Iterable[Key],
        action: Any,
        label: str,
    ) -> None:
        """Draft a run."""
        self.ranks[rank].append(DraftRun(code, tuple(inputs), tuple(outputs), action, label))

    def transfer(self, source: int, to: int, keys: Iterable[Key], tag: str) -> None:
        """Draft both sides of a transfer."""
        moved = tuple(keys)
        if moved:
            self.ranks[source].append(DraftTransfer(moved, to, tag, True))
            self.ranks[to].append(DraftTransfer(moved, source, tag, False))


def assemble(
    plan: StagePlan,
    outer: Outer,
    placement: Placement,
    order: Order,
    detour: Detour,
    fixed: Mapping[Value, PartitionSpec],
) -> Drafts:
    """Draft the whole step.

    Args:
      plan: the cut loop.
      outer: what is around it.
      placement: where that runs.
      order: the schedule's.
      detour: what makes way for others around the loop.
      fixed: values whose spread over a rank's devices is not XLA's choice.
    """
    drafts = Drafts(tuple([] for _ in range(order.num_ranks)))
    loop_reads = _read_by_loop(plan, outer)
    before = ancestors(outer.operations, loop_reads)
    earlier = set(before)
    after = tuple(op for op in outer.operations if op not in earlier)
    kept = {*loop_reads, *placement.final, *free_values(after)}
    names = {a.start: a.end for a in outer.accumulators.values()}
    made = {value for op in outer.operations for value in op.outputs} | set(names.values())
    side = _OuterPart(drafts, placement, kept, names, detour, fixed)
    side.draft(before, [v for v in placement.needs if v not in made], "before the loop")
    _loop_part(drafts, plan, outer, order, fixed)
    side.draft(after, list(names.values()), "after the loop")
    return drafts


def _read_by_loop(plan: StagePlan, outer: Outer) -> list[Value]:
    loop = plan.loop
    starts = [a.start for a in outer.accumulators.values()]
    return [*(v for _, v in loop.invariants), *(v for _, v in loop.batch), *starts]


# ---- the loop -------------------------------------------------------------------------------------------------------


def _loop_part(
    drafts: Drafts,
    plan: StagePlan,
    outer: Outer,
    order: Order,
    fixed: Mapping[Value, PartitionSpec],
) -> None:
    codes = {}
    for key, task in plan.tasks.items():
        codes[key] = _TaskCode(plan, task, outer.accumulators, len(drafts.codes))
        drafts.codes.append(codes[key].code(order.placement[task.stage], fixed))
    readers = _readers(plan, order)
    for rank, action in topological_order(order):
        code = codes.get((action.stage, action.kind))
        if code is None:
            continue
        microbatch = action.microbatch
        drafts.run(
            rank,
            code.number,
            code.inputs(microbatch),
            code.outputs(microbatch),
            action,
            str(action),
        )
        for to, values in _sends(code.task, rank, readers).items():
            drafts.transfer(rank, to, ((value, microbatch) for value in values), str(action))


def _readers(plan: StagePlan, order: Order) -> dict[Value, set[int]]:
    """The ranks that read each value that a task exports."""
    readers: dict[Value, set[int]] = {}
    for task in plan.tasks.values():
        for value in task.reads:
            readers.setdefault(value, set()).add(order.placement[task.stage])
    return readers


def _sends(task: StageTask, rank: int, readers: Mapping[Value, set[int]]) -> dict[int, list[Value]]:
    sends: dict[int, list[Value]] = {}
    for value in task.exports:
        for to in sorted(readers.get(value, set()) - {rank}):
            sends.setdefault(to, []).append(value)
    return sends


class _TaskCode:
    """A stage task as a function of arrays, and the keys of its arguments and results."""

    def __init__(
        self, plan: StagePlan, task: StageTask, accumulators: Mapping[Any, Accumulator], number: int
    ) -> None:
        self.number = number
        self.task = task
        loop = plan.loop
        self._invariants = dict(loop.invariants)
        self._batch = dict(loop.batch)
        self._index = loop.index
        self._accumulators = [accumulators[result] for result in task.results]
        self._reductions: list[Reduction] = [
            loop.reductions[result.output] for result in task.results
        ]

    def inputs(self, microbatch: int) -> list[Key]:
        """Keys of the arguments."""
        reads = [self._key(value, microbatch) for value in self.task.reads]
        return [(INDEX, microbatch), *reads, *((a.end, OUTSIDE) for a in self._accumulators)]

    def outputs(self, microbatch: int) -> list[Key]:
        """Keys of the results."""
        exports = [(value, microbatch) for value in self.task.exports]
        return [*exports, *((a.end, OUTSIDE) for a in self._accumulators)]

    def _key(self, value: Value, microbatch: int) -> Key:
        if value is self._index:
            return (INDEX, microbatch)
        outside = self._invariants.get(value) or self._batch.get(value)
        return (value, microbatch) if outside is None else (outside, OUTSIDE)

    def code(self, rank: int, fixed: Mapping[Value, PartitionSpec]) -> Code:
        """The task for one rank."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        reads = [(self._batch.get(value) or value).struct for value in self.task.reads]
        structs = (index, *reads, *(a.start.struct for a in self._accumulators))
        return Code(
            str(self.task),
            rank,
            self.call,
            structs,
            tuple(value.struct for value in self.task.exports)
            + tuple(a.start.struct for a in self._accumulators),
            num_operations=len(self.task.operations),
            out_specs=(
                *([None] * len(self.task.exports)),
                *(fixed.get(a.end) for a in self._accumulators),
            ),
        )

    def call(self, index: Any, *args: Any) -> list[Any]:
        """Pick the micro-batch, run the stage, add the results up."""
        task = self.task
        picked = [
            self._pick(v, a, index)
            for v, a in zip(task.reads, args[: len(task.reads)], strict=True)
        ]
        results = evaluate(task.graph, picked)
        exports, contributions = results[: len(task.exports)], results[len(task.exports) :]
        totals = [
            reduction.update(total, jnp.asarray(value), index)
            for reduction, total, value in zip(
                self._reductions, args[len(task.reads) :], contributions, strict=True
            )
        ]
        return [*exports, *totals]

    def _pick(self, value: Value, array: Any, index: Any) -> Any:
        if value is self._index:
            return index
        if value in self._batch:
            return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
        return array


class _Index:
    """The key of micro-batch indices."""

    def __repr__(self) -> str:
        return "index"


INDEX = _Index()


def index_constant(microbatch: int) -> np.ndarray[Any, Any]:
    """The array behind an index key."""
    return np.asarray(microbatch, np.int32)


# ---- before and after -----------------------------------------------------------------------------------------------


class _OuterPart:
    """Drafts one side of the loop: what has to move first, then level by level."""

    def __init__(
        self,
        drafts: Drafts,
        placement: Placement,
        kept: set[Value],
        names: Mapping[Value, Value],
        detour: Detour,
        fixed: Mapping[Value, PartitionSpec],
    ) -> None:
        self._drafts = drafts
        self._placement = placement
        self._kept = kept
        self._names = names
        self._detour = detour
        self._fixed = fixed

    def draft(self, operations: Sequence[Operation], present: Sequence[Value], label: str) -> None:
        """Draft `operations`; `present` are the values that lie somewhere at the beginning."""
        self._move(present, label)
        segments = group_segments(operations, self._placement, self._detour)
        for level in sorted({segment.level for segment in segments}):
            made: list[Value] = []
            for segment in (s for s in segments if s.level == level):
                self._segment(segment, segments, label)
                made += [v for op in segment.operations for v in op.outputs]
            self._move(made, label)

    def _move(self, values: Sequence[Value], label: str) -> None:
        routes: dict[tuple[int, int], list[Key]] = {}
        for value in dict.fromkeys(values):
            for to in self._missing(value):
                route = (min(self._placement.homes[value]), to)
                routes.setdefault(route, []).append(self._key(value))
        for (source, to), keys in sorted(routes.items(), key=lambda item: item[0]):
            self._drafts.transfer(source, to, keys, label)

    def _missing(self, value: Value) -> list[int]:
        """The ranks that need a value and do not make it."""
        homes = self._placement.homes.get(value, frozenset())
        return sorted(self._placement.needs.get(value, frozenset()) - homes) if homes else []

    def _segment(self, segment: Segment, segments: Sequence[Segment], label: str) -> None:
        others = [s for s in segments if s.rank == segment.rank and s is not segment]
        read = {v for s in others for op in s.operations for v in op.values_in} | self._kept
        made = [value for op in segment.operations for value in op.outputs]
        exports = tuple(v for v in made if v in read or self._missing(v))
        reads = free_values(segment.operations)
        graph = Graph(reads, segment.operations, exports)
        name = f"{label}, rank {segment.rank}, part {segment.level}"
        code = Code(
            name,
            segment.rank,
            lambda *args: evaluate(graph, args),
            tuple(value.struct for value in reads),
            tuple(value.struct for value in exports),
            num_operations=len(segment.operations),
            out_specs=tuple(self._fixed.get(value) for value in exports),
        )
        number = len(self._drafts.codes)
        self._drafts.codes.append(code)
        self._drafts.run(
            segment.rank, number, map(self._key, reads), map(self._key, exports), None, name
        )

    def _key(self, value: Value) -> Key:
        return (self._names.get(value, value), OUTSIDE)
