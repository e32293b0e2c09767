"""The engine without a pipeline: the whole step as one XLA program on one device.

It is what the other engines are measured against: plain `jax.jit` of the step, compiled ahead of
time, with the state's buffers reused.  In: the Trainer's pure functions.  Out: a step that compiles
only when a batch of a new shape comes. Several devices (data parallel, FSDP, tensor parallel) are
not here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

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


@dataclass(frozen=True, slots=True)
class SingleProgramEngine:
    """Run the whole step as one program on one device.

    Attributes:
      microbatches: micro-batches a step; their gradients are accumulated in a loop inside the
        program.

    Raises:
      ValueError: if `microbatches` is not positive.

    Example:
      >>> SingleProgramEngine(microbatches=4).num_stages(MeshSpec())
      1
    """

    microbatches: int = 1

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}")

    def num_stages(self, mesh: MeshSpec) -> int:
        """Return 1: nothing is cut.

        Raises:
          ValueError: if the mesh has more than one device.
        """
        if mesh.size != 1:
            raise ValueError(
                f"SingleProgramEngine runs on one device, but the mesh is pipe={mesh.pipe} x "
                f"data={mesh.data} x tensor={mesh.tensor} = {mesh.size} devices; use a mesh of one "
                "device, or an engine that spreads the step"
            )
        return 1

    def compile(
        self,
        *,
        init: Callable[[], State],
        step: Callable[[State, Batch], tuple[State, Metrics]],
        batch: Batch,
        mesh: MeshSpec,
    ) -> "SingleProgramStep":
        """Trace and compile; see `Engine.compile`."""
        self.num_stages(mesh)
        device = rank_meshes(mesh)[0].devices.item()
        return SingleProgramStep(init, step, batch, device=device, microbatches=self.microbatches)


class SingleProgramStep:
    """The compiled step; see `CompiledStep`.  One executable for each shape of batch seen."""

    last_times: StepTimes | None = None  # one device is never idle by plan: nothing to measure

    def __init__(
        self,
        init: Callable[[], State],
        step: Callable[[State, Batch], tuple[State, Metrics]],
        batch: Batch,
        *,
        device: jax.Device,
        microbatches: int,
    ) -> None:
        began = time.perf_counter()
        self._sharding = SingleDeviceSharding(device)
        self._init = init
        self._device = device
        self._state = jax.eval_shape(init)
        self._step = jax.jit(
            step, donate_argnums=0, in_shardings=self._sharding, out_shardings=self._sharding
        )
        self._executables: dict[Any, Any] = {}
        num_equations = self._compile(batch)
        self.summary = StepSummary(
            engine="SingleProgramEngine",
            schedule="",
            num_ranks=1,
            num_microbatches=microbatches,
            stages=(_row(self._state, device, num_equations),),
            planned_bubble=0.0,
            compile_seconds=time.perf_counter() - began,
        )

    def init(self) -> State:
        """Create the state on the device, with the values that it has under every engine."""
        num_leaves = len(jax.tree.leaves(self._state))
        return create(self._init, [[self._device]] * num_leaves, [self._sharding] * num_leaves)

    def place(self, state: State) -> State:
        """Put a state on the device; what lies there already is not copied."""
        return jax.device_put(state, self._sharding)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step, consuming `state`."""
        if (shapes := _shapes(batch)) not in self._executables:
            self._compile(batch)
        out: tuple[State, Metrics] = self._executables[shapes](
            state, jax.device_put(batch, self._sharding)
        )
        return out

    def _compile(self, batch: Batch) -> int:
        """Compile for this shape of batch; return the number of equations."""
        traced = self._step.trace(self._state, jax.tree.map(jax.typeof, batch))
        self._executables[_shapes(batch)] = traced.lower().compile()
        return len(traced.jaxpr.eqns)


def _shapes(batch: Batch) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _row(state: State, device: jax.Device, num_equations: int) -> StageRow:
    parameters = jax.tree.leaves(getattr(state, "params", state))
    return StageRow(
        stage=0,
        rank=0,
        devices=(str(device),),
        parameters=sum(leaf.size for leaf in parameters),
        tasks=(("step", num_equations),),
    )
