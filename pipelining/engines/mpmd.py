"""The engine of this project: MPMD pipeline stages, each rank with programs of its own.

In: the Trainer's pure functions, a schedule and a number of micro-batches.  Out: a compiled step that `mpmd_jit` made.
What is here is only the fitting: where the state is born, and what the start-up panel is told.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec, Sharding

from stagewright.nn.axes import AxisRules, default_axis_rules
from stagewright.nn.partition import Partition, Uniform
from stagewright.pipelining.calibrate import measured_costs
from stagewright.pipelining.engines.birth import create
from stagewright.pipelining.engines.engine import (
    Batch,
    BatchAxes,
    Metrics,
    StageRow,
    State,
    StepSummary,
)
from stagewright.pipelining.mesh import MeshSpec, rank_meshes
from stagewright.pipelining.mpmd_jit import CompiledFunction, MpmdFunction, MpmdOptions
from stagewright.pipelining.runtime.local import DEFAULT_TIMEOUT
from stagewright.pipelining.schedules import OneFOneB, Schedule
from stagewright.pipelining.schedules.schedule import check_schedule
from stagewright.pipelining.simulate import simulate_program
from stagewright.pipelining.specs import sharding_on, spread_over
from stagewright.pipelining.timeline import Timeline, simulate_order


@dataclass(frozen=True, slots=True)
class MpmdEngine:
    """Run the step as an MPMD pipeline.

    Attributes:
      schedule: in which order the ranks run their tasks, and how many stages there are.
      microbatches: micro-batches a step.
      timeout: seconds that a rank waits for another one before the step fails.
      post_validation: update before the global norm is known and validate afterwards (see `mpmd_jit`).
      rules: binds logical axis names to the mesh axes `data` and `tensor`; `nn.default_axis_rules()` by default.
      zero: 1 spreads the optimizer's state over `data` (ZeRO-1), 0 keeps a copy on each replica.

    Raises:
      ValueError: if `microbatches` is not positive.

    Example:
      >>> MpmdEngine(schedule=OneFOneB(), microbatches=8).num_stages(MeshSpec(pipe=4))
      4

    Reference:
      Xhebraj et al., arXiv 2412.14374.
    """

    schedule: Schedule = field(default_factory=OneFOneB)
    microbatches: int = 1
    timeout: float = DEFAULT_TIMEOUT
    post_validation: bool = False
    rules: AxisRules = field(default_factory=default_axis_rules)
    zero: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        if self.zero not in (0, 1):
            raise ValueError(f"zero must be 0 or 1 under MpmdEngine, got {self.zero!r}")
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}")

    @property
    def loop_microbatches(self) -> int:
        """The step's loop is the pipeline: all of them."""
        return self.microbatches

    def num_stages(self, mesh: MeshSpec) -> int:
        """Stages that the schedule wants on this mesh."""
        return self.schedule.num_stages(mesh.pipe)

    def compile(
        self,
        *,
        init: Callable[[], State],
        step: Callable[[State, Batch], tuple[State, Metrics]],
        batch: Batch,
        mesh: MeshSpec,
        batch_axes: BatchAxes | None = None,
        partition: Partition | None = None,
    ) -> "MpmdStep":
        """Trace, cut, place and compile; see `Engine.compile`."""
        options = MpmdOptions(
            mesh=mesh,
            schedule=self.schedule,
            partition=partition or Uniform(),
            donate_argnums=(0,),
            timeout=self.timeout,
            post_validation=self.post_validation,
            rules=self.rules,
            axes={1: batch_axes or (None, "batch")},
        )
        if self.zero:
            options = replace(options, respec=functools.partial(_spread_optimizer, mesh))
        function = MpmdFunction(step, options)
        return MpmdStep(function, init, batch, mesh, self)


def _spread_optimizer(
    mesh: MeshSpec, path: Any, spec: PartitionSpec, shape: tuple[int, ...]
) -> PartitionSpec:
    """ZeRO-1: leaves of the state's `opt_state` are spread over `data` too."""
    names = [getattr(part, "name", getattr(part, "key", None)) for part in path]
    return spread_over(spec, shape, "data", mesh.data) if "opt_state" in names else spec


class MpmdStep:
    """The compiled step; see `CompiledStep`.  Batches of new shapes compile when they come."""

    def __init__(
        self,
        function: MpmdFunction,
        init: Callable[[], State],
        batch: Batch,
        mesh: MeshSpec,
        engine: MpmdEngine,
    ) -> None:
        self._function = function
        self._init = init
        self._meshes = rank_meshes(mesh)
        self._structs = jax.eval_shape(init)
        self._latest = function.compile(self._structs, batch)
        self.summary = _summary(self._latest, engine, mesh, self._meshes)

    @property
    def last_timeline(self) -> Timeline | None:
        """What ran when in the latest step, in seconds."""
        return self._latest.runtime.timeline

    def plan_timeline(self, measured: Sequence[Timeline]) -> Timeline:
        """Simulate the program with the costs measured in some of its steps."""
        return simulate_program(self._latest.plan.program, measured_costs(measured))

    def init(self) -> State:
        """Create the state, each leaf on the devices that read it."""
        return create(self._init, *self._places())

    def place(self, state: State) -> State:
        """Put a state where the step reads it."""
        leaves, treedef = jax.tree.flatten(state)
        placed = [
            jax.device_put(leaf, s) for leaf, s in zip(leaves, self._places()[1], strict=True)
        ]
        return jax.tree.unflatten(treedef, placed)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step, consuming `state`."""
        self._latest = self._function.compile(state, batch)
        out: tuple[State, Metrics] = self._function(state, batch)
        return out

    def _places(self) -> tuple[list[list[Sharding]], list[Sharding]]:
        """For each leaf of the state, the sharding of each rank's copy, and the one that joins them."""
        joined = self._latest.runtime.shardings
        ranks = self._latest.plan.input_ranks()
        num_leaves = len(jax.tree.leaves(self._structs))
        specs = self._latest.plan.specs[:num_leaves]
        copies = [
            [sharding_on(self._meshes[rank], spec) for rank in sorted(homes) or [0]]
            for homes, spec in zip(ranks, specs, strict=False)
        ]
        return copies, [joined.get(i, copies[i][0]) for i in range(num_leaves)]


def _summary(
    compiled: CompiledFunction, engine: MpmdEngine, mesh: MeshSpec, meshes: Sequence[Mesh]
) -> StepSummary:
    plan = compiled.plan
    return StepSummary(
        engine="MpmdEngine",
        schedule=engine.schedule.name,
        num_ranks=mesh.pipe,
        num_microbatches=engine.microbatches,
        stages=tuple(_row(compiled, stage, meshes) for stage in range(plan.stages.num_stages)),
        planned_bubble=float(simulate_order(plan.order).bubble_fraction),
        compile_seconds=compiled.compile_seconds,
    )


def _row(compiled: CompiledFunction, stage: int, meshes: Sequence[Mesh]) -> StageRow:
    plan = compiled.plan
    tasks = {kind: task for (s, kind), task in plan.stages.tasks.items() if s == stage}
    invariant = {inner for inner, _ in plan.trace.loop.invariants}
    read = {value for task in tasks.values() for value in task.reads if value in invariant}
    rank = plan.order.placement[stage]
    return StageRow(
        stage=stage,
        rank=rank,
        devices=tuple(str(device) for device in meshes[rank].devices.flat),
        parameters=sum(value.size for value in read if jnp.issubdtype(value.dtype, jnp.inexact)),
        tasks=tuple((str(kind), len(task.operations)) for kind, task in tasks.items()),
    )
