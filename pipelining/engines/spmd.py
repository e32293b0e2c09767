"""The SPMD pipeline of GSPMD, Praxis and MaxText: the baseline that MPMD is measured against.

One XLA program runs on all devices.  The model's layers are stacked, stage by stage over the mesh
axis `pipe`, and run side by side under `vmap` while activations rotate (`nn/spmd.py`).  At rest the
state has its usual paths, spread over `pipe` along whatever dim divides, so that checkpoints and
optimizers know nothing of stages; a step gathers each stage's layers where they run.

What it cannot do, it refuses by name: layers of several kinds, stages of several sizes, micro-batches
that are not a multiple of the stages.  Dropout masks differ by micro-batch and layer, but are not
those of the other engines, whose masks are drawn for one micro-batch at a time.

Reference:
  Xu et al., "GSPMD", arXiv 2105.04663, section 3.3; the paper's baseline, arXiv 2412.14374,
  section 5.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stagewright.nn.axes import AxisRules, default_axis_rules
from stagewright.nn.spmd import SpmdPlan, run_layers_as_spmd
from stagewright.pipelining.engines.engine import Batch, BatchAxes, Metrics, State, StepSummary
from stagewright.pipelining.engines.one_program import (
    OneProgramLayout,
    OneProgramStep,
    batch_first,
)
from stagewright.pipelining.mesh import MeshSpec, whole_mesh


@dataclass(frozen=True, slots=True)
class SpmdEngine:
    """Run the step as an SPMD pipeline.

    Attributes:
      repeat: circular repeats: how many runs of layers each rank holds.
      microbatches: micro-batches a step, a multiple of the pipeline ranks.
      rules: binds logical axis names to the mesh axes `data` and `tensor`;
        `nn.default_axis_rules()` by default.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> SpmdEngine(repeat=2, microbatches=8).loop_microbatches
      1
    """

    repeat: int = 1
    microbatches: int = 1
    rules: AxisRules = field(default_factory=default_axis_rules)

    def __post_init__(self) -> None:
        if min(self.repeat, self.microbatches) < 1:
            raise ValueError(
                f"repeat and microbatches must be at least 1, got {self.repeat} and "
                f"{self.microbatches}"
            )

    @property
    def loop_microbatches(self) -> int:
        """The model sees the whole batch, and its layers cut it into micro-batches."""
        return 1

    def num_stages(self, mesh: MeshSpec) -> int:
        """Return 1: the program is whole, without stage marks.

        Raises:
          ValueError: if the micro-batches are not a multiple of the pipeline ranks.
        """
        if self.microbatches % mesh.pipe:
            raise ValueError(
                f"an SPMD pipeline streams its input over its stages: {self.microbatches} "
                f"micro-batches are not a multiple of pipe={mesh.pipe}"
            )
        return 1

    def compile(
        self,
        *,
        init: Callable[[], State],
        step: Callable[[State, Batch], tuple[State, Metrics]],
        batch: Batch,
        mesh: MeshSpec,
        batch_axes: BatchAxes | None = None,
    ) -> OneProgramStep:
        """Trace and compile; see `Engine.compile`.

        Raises:
          ValueError: if the layers are not equal, do not divide into stages, or the batch does not
            divide into micro-batches.
        """
        self.num_stages(mesh)
        layout = OneProgramLayout(
            whole_mesh(mesh), mesh, self.rules, ("pipe",), batch_axes or batch_first
        )
        plan = SpmdPlan(mesh.pipe, self.repeat, self.microbatches, layout.abstract_mesh())
        ticks = self.microbatches * self.repeat + mesh.pipe - 1
        summary = StepSummary(
            engine="SpmdEngine",
            schedule=f"circular:{self.repeat}",
            num_ranks=mesh.pipe,
            num_microbatches=self.microbatches,
            stages=(),
            planned_bubble=(mesh.pipe - 1) / ticks,
            compile_seconds=0.0,
        )
        return OneProgramStep(init, step, batch, layout, summary, lambda: _traced_as(plan))


@contextlib.contextmanager
def _traced_as(plan: SpmdPlan) -> Iterator[None]:
    if plan.stages == 1:
        yield
        return
    with run_layers_as_spmd(plan):
        yield
