"""The engine of this project: MPMD pipeline stages, each rank with programs of its own.

In: the Trainer's pure functions, a schedule and a number of micro-batches.  Out: a compiled step that `mpmd_jit` made.
What is here is only the fitting: where the state is born, and what the start-up panel is told.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from stagewright.nn.partition import Partition, Uniform
from stagewright.pipelining.engines.birth import create
from stagewright.pipelining.engines.engine import (
    Batch,
    Metrics,
    StageRow,
    State,
    StepSummary,
    StepTimes,
)
from stagewright.pipelining.mesh import MeshSpec, rank_meshes
from stagewright.pipelining.mpmd_jit import CompiledFunction, MpmdFunction
from stagewright.pipelining.runtime.local import DEFAULT_TIMEOUT
from stagewright.pipelining.schedules import OneFOneB, Schedule
from stagewright.pipelining.timeline import simulate_order


@dataclass(frozen=True, slots=True)
class MpmdEngine:
    """Run the step as an MPMD pipeline.

    Attributes:
      schedule: in which order the ranks run their tasks, and how many stages there are.
      microbatches: micro-batches a step.
      timeout: seconds that a rank waits for another one before the step fails.
      post_validation: update before the global norm is known and validate afterwards (see `mpmd_jit`).

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

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}")

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
        partition: Partition | None = None,
    ) -> "MpmdStep":
        """Trace, cut, place and compile; see `Engine.compile`."""
        function = MpmdFunction(
            step,
            mesh,
            self.schedule,
            partition or Uniform(),
            donate_argnums=(0,),
            static_argnums=(),
            static_argnames=(),
            timeout=self.timeout,
            post_validation=self.post_validation,
        )
        return MpmdStep(function, init, batch, mesh, self)


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
        self._devices = [rank_mesh.devices.flat[0] for rank_mesh in rank_meshes(mesh)]
        self._structs = jax.eval_shape(init)
        self._latest = function.compile(self._structs, batch)
        self.summary = _summary(self._latest, engine, mesh, self._devices)

    @property
    def last_times(self) -> StepTimes | None:
        """Times of the latest step."""
        spans = self._latest.runtime.spans
        if not spans:
            return None
        busy = [0.0] * len(self._devices)
        for span in spans:
            busy[span.rank] += span.end - span.begin
        wall = max(span.end for span in spans) - min(span.begin for span in spans)
        return StepTimes(wall=wall, busy=tuple(busy))

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

    def _places(self) -> tuple[list[list[Any]], list[Any]]:
        """For each leaf of the state, its devices and the sharding that joins them."""
        shardings = self._latest.runtime.shardings
        alone = jax.sharding.SingleDeviceSharding(self._devices[0])
        joined = [shardings.get(i, alone) for i in range(len(jax.tree.leaves(self._structs)))]
        order = {device: rank for rank, device in enumerate(self._devices)}
        return [sorted(s.device_set, key=order.__getitem__) for s in joined], joined


def _summary(
    compiled: CompiledFunction, engine: MpmdEngine, mesh: MeshSpec, devices: list[Any]
) -> StepSummary:
    plan = compiled.plan
    return StepSummary(
        engine="MpmdEngine",
        schedule=engine.schedule.name,
        num_ranks=mesh.pipe,
        num_microbatches=engine.microbatches,
        stages=tuple(_row(compiled, stage, devices) for stage in range(plan.stages.num_stages)),
        planned_bubble=float(simulate_order(plan.order).bubble_fraction),
        compile_seconds=compiled.compile_seconds,
    )


def _row(compiled: CompiledFunction, stage: int, devices: list[Any]) -> StageRow:
    plan = compiled.plan
    tasks = {kind: task for (s, kind), task in plan.stages.tasks.items() if s == stage}
    invariant = {inner for inner, _ in plan.trace.loop.invariants}
    read = {value for task in tasks.values() for value in task.reads if value in invariant}
    rank = plan.order.placement[stage]
    return StageRow(
        stage=stage,
        rank=rank,
        devices=(str(devices[rank]),),
        parameters=sum(value.size for value in read if jnp.issubdtype(value.dtype, jnp.inexact)),
        tasks=tuple((str(kind), len(task.operations)) for kind, task in tasks.items()),
    )
