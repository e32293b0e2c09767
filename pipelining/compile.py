"""The passes of the compiler, in order, and nothing else.

step --trace--> Trace --cut--> StagePlan --split--> StagePlan --outer, place--> Placement
     [--speculate--> Outer] --assemble--> Drafts --allocate--> Program --validate--> Program
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from stagewright.nn.partition import Partition
from stagewright.pipelining.actions import Action, Order
from stagewright.pipelining.assemble import assemble
from stagewright.pipelining.check import validate_program
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.graph import Value
from stagewright.pipelining.layout import Layout, fix_specs
from stagewright.pipelining.liveness import Interface, allocate
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.outer import Outer, add_accumulators, distribute
from stagewright.pipelining.placement import Borders, Placement, place
from stagewright.pipelining.program import Program
from stagewright.pipelining.schedules import Schedule
from stagewright.pipelining.segments import Detour
from stagewright.pipelining.speculation import speculate
from stagewright.pipelining.split import split_backwards
from stagewright.pipelining.stages import StagePlan, cut_stages
from stagewright.pipelining.trace import Trace, trace_step


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A compiled step before XLA has seen it.

    Attributes:
      trace: the traced step.
      stages: its loop, cut.
      order: the schedule's order for this mesh and number of micro-batches.
      placement: where the outer operations run.
      program: what the ranks run.
      specs: how each argument is spread over the devices of the ranks where it lies.
    """

    trace: Trace
    stages: StagePlan
    order: Order
    placement: Placement
    program: Program
    specs: tuple[PartitionSpec, ...]

    def input_ranks(self) -> tuple[frozenset[int], ...]:
        """For each argument, the ranks on which it lies."""
        return tuple(self.placement.homes.get(value, frozenset()) for value in self.trace.inputs)


def compile_step(
    step: Callable[..., Sequence[Any]],
    structs: Sequence[jax.ShapeDtypeStruct],
    *,
    schedule: Schedule,
    num_ranks: int,
    partition: Partition,
    layout: Layout | None = None,
    donated: frozenset[int] = frozenset(),
    same_home: Callable[[], Sequence[tuple[int, int]]] = tuple,
    post_validation: bool = False,
) -> Plan:
    """Compile a function of flat arrays into a program for `num_ranks` ranks.

    Args:
      step: flat arrays to flat arrays; calls `accumulate_grads` once.
      structs: shapes and dtypes of the arguments.
      schedule: decides the order.
      num_ranks: pipeline ranks.
      partition: groups the segments between stage marks.
      layout: what several devices a rank need to know; None for one device a rank.
      donated: arguments that the caller gives away.
      same_home: after tracing, pairs (result, argument) that must lie on the same ranks.
      post_validation: update before global conditions are known, and validate then (see `speculation.py`).
    """
    with layout.bound() if layout else contextlib.nullcontext():
        trace = trace_step(step, structs)
    order = make_order(schedule, num_ranks, trace.loop.num_microbatches)
    stages = cut_stages(trace.loop, order.num_stages, partition)
    if order.splits_backward:
        stages = split_backwards(stages)
    stages = select_kinds(stages, order)
    outer = add_accumulators(trace, stages)
    borders = find_borders(trace, stages, outer, order)
    outer = distribute(outer, borders)
    borders = replace(borders, outputs=outer.outputs, combined=outer.combined)
    outer, detour = speculate(outer, borders) if post_validation else (outer, Detour())
    homes = pair_homes(trace, outer, same_home())
    borders = replace(borders, outputs=outer.outputs, same_home=homes)
    placement = place(outer.operations, borders)
    specs = layout.specs if layout else (PartitionSpec(),) * len(trace.inputs)
    fixed = fix_specs(trace, outer, specs, homes) if layout else {}
    drafts = assemble(stages, outer, placement, order, detour, fixed)
    program = allocate(
        drafts, placement, Interface(trace.inputs, donated, trace.constants, outer.outputs)
    )
    validate_program(program, order, skipped_actions(stages, order))
    return Plan(trace, stages, order, placement, program, specs)


def make_order(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Order:
    """Ask the schedule for its order, and check it."""
    order = schedule.order(num_ranks, num_microbatches)
    if not isinstance(order, Order):
        raise ScheduleError(
            f"{schedule.name}.order must return an Order (see pipelining/actions.py, or write the schedule with the "
            f"decorator sw.schedule()), got {type(order).__name__}"
        )
    if (order.num_ranks, order.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"{schedule.name} was asked for {num_ranks} ranks and {num_microbatches} micro-batches, but its order has "
            f"{order.num_ranks} ranks and {order.num_microbatches} micro-batches"
        )
    validate_order(order)
    return order


def select_kinds(stages: StagePlan, order: Order) -> StagePlan:
    """Keep the tasks that the order runs."""
    used = {(action.stage, action.kind) for actions in order.actions for action in actions}
    return replace(stages, tasks={key: task for key, task in stages.tasks.items() if key in used})


def skipped_actions(stages: StagePlan, order: Order) -> frozenset[Action]:
    """Actions of tasks that have nothing to do (a forward-only step has no backward)."""
    return frozenset(
        a for actions in order.actions for a in actions if (a.stage, a.kind) not in stages.tasks
    )


def find_borders(
    trace: Trace,
    stages: StagePlan,
    outer: Outer,
    order: Order,
) -> Borders:
    """What the loop reads and leaves, by rank."""
    loop = trace.loop
    outside: dict[Value, Value] = {**dict(loop.invariants), **dict(loop.batch)}
    reads: dict[Value, frozenset[int]] = {}
    gradients: dict[Value, int] = {}
    values: dict[Value, int] = {}
    for task in stages.tasks.values():
        rank = order.placement[task.stage]
        for value in (outside[v] for v in task.reads if v in outside):
            reads[value] = reads.get(value, frozenset()) | {rank}
        for accumulator in (outer.accumulators[result] for result in task.results):
            reads[accumulator.start] = frozenset({rank})
            ends = values if accumulator.result.output < loop.num_values else gradients
            ends[accumulator.end] = rank
    return Borders(
        inputs=(*trace.inputs, *(value for value, _ in trace.constants)),
        loop_reads=reads,
        loop_gradients=gradients,
        loop_values=values,
        outputs=outer.outputs,
        same_home=(),
    )


def pair_homes(
    trace: Trace, outer: Outer, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[Value, Value], ...]:
    """The values behind pairs (result, argument), without results that are arguments unchanged."""
    values = ((outer.outputs[new], trace.inputs[old]) for new, old in pairs)
    return tuple(
        (new, old) for new, old in values if isinstance(new, Value) and new not in trace.inputs
    )
