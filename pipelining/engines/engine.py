"""The protocol between the Trainer and whatever runs its train step.

In: two pure functions (how the state is born, how one step changes it) and a mesh.  Out: a compiled step.  An engine
decides where and in what order things run; it never decides what is computed: every engine gives the numbers of plain
`jax.jit(step)`.  The engines themselves live one a file beside this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.timeline import Timeline

State = Any  # a pytree of arrays
Batch = Any  # a pytree of arrays [microbatches, microbatch, ...]
Metrics = Any  # a pytree of arrays
BatchAxes = Callable[
    [Batch], Any
]  # a batch -> the same tree with a tuple of logical axis names for each leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One row of the stage table.

    Attributes:
      stage: index of the (virtual) stage, in the order of the data.
      rank: the pipeline rank that runs it.
      devices: names of that rank's devices.
      parameters: number of parameter elements that the stage's tasks read (a tied one counts at each reader).
      tasks: size of each task, as (kind, number of equations), such as (("F", 41), ("B", 97)).
    """

    stage: int
    rank: int
    devices: tuple[str, ...]
    parameters: int
    tasks: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What an engine tells of its plan before the first step.

    Attributes:
      engine: name of the engine.
      schedule: name of the schedule, or "" where there is none.
      num_ranks: pipeline ranks.
      num_microbatches: micro-batches a step.
      stages: the stage table.
      planned_bubble: idle fraction of the ranks' time, 0 to 1, for unit task costs.
      compile_seconds: wall time of tracing and compiling, seconds.
    """

    engine: str
    schedule: str
    num_ranks: int
    num_microbatches: int
    stages: tuple[StageRow, ...]
    planned_bubble: float
    compile_seconds: float


class CompiledStep(Protocol):
    """A step that will compile nothing more."""

    @property
    def summary(self) -> StepSummary:
        """The plan, for the start-up panel."""

    @property
    def last_timeline(self) -> Timeline | None:
        """What ran when in the latest finished step, in seconds, or None where that is not measured."""

    def plan_timeline(self, measured: Sequence[Timeline]) -> Timeline | None:
        """What the plan makes of the costs measured in some of its steps, or None where there is no plan."""

    def init(self) -> State:
        """Create the state, each leaf on the devices that will read it."""

    def place(self, state: State) -> State:
        """Put an existing state (a restored one) where the step reads it."""

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step.  `state` is consumed: its buffers are reused for the new one."""


@runtime_checkable
class Engine(Protocol):
    """Turns a train step into a compiled one on a mesh."""

    @property
    def microbatches(self) -> int:
        """Micro-batches a step."""

    @property
    def loop_microbatches(self) -> int:
        """Micro-batches that the step's own loop runs: `microbatches`, or 1 where the model's layers see to them."""

    def num_stages(self, mesh: MeshSpec) -> int:
        """How many stages the model must be cut into (1: no marks wanted).

        Raises:
          ValueError: if the engine cannot use this mesh.
        """

    def compile(
        self,
        *,
        init: Callable[[], State],
        step: Callable[[State, Batch], tuple[State, Metrics]],
        batch: Batch,
        mesh: MeshSpec,
        batch_axes: BatchAxes | None = None,
    ) -> CompiledStep:
        """Trace, place and compile.

        Args:
          init: pure function without arguments that makes the whole state; never run as a whole where leaves have
            several homes.
          step: pure function; uses `accumulate_grads` once.
          batch: the batch, or `jax.ShapeDtypeStruct`s like it: leaves [microbatches, microbatch, ...].
          mesh: the devices to use.
          batch_axes: tells the logical axis names of a batch's dims; by default (None, "batch") for every leaf.
        """
