"""The engine without a pipeline: the whole step as one XLA program, on one device or a mesh of them.

It is what the other engines are measured against: plain `jax.jit` of the step, compiled ahead of
time, with the state's buffers reused.  On a mesh it is data parallel, tensor parallel and, with
`fsdp`, what the paper calls "JAX FSDP".

Reference:
  Xu et al., "GSPMD", arXiv 2105.04663; Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from stagewright.nn.axes import AxisRules, default_axis_rules
from stagewright.pipelining.engines.engine import Batch, BatchAxes, Metrics, State, StepSummary
from stagewright.pipelining.engines.one_program import (
    OneProgramLayout,
    OneProgramStep,
    batch_first,
)
from stagewright.pipelining.mesh import MeshSpec, rank_meshes


@dataclass(frozen=True, slots=True)
class SingleProgramEngine:
    """Run the whole step as one program.

    Attributes:
      microbatches: micro-batches a step; their gradients are accumulated in a loop inside the
        program.
      fsdp: spread parameters and the optimizer's state over `data` (ZeRO-3): each device holds its
        part, and XLA gathers a parameter where it is read.
      rules: binds logical axis names to the mesh axes `data` and `tensor`;
        `nn.default_axis_rules()` by default.

    Raises:
      ValueError: if `microbatches` is not positive.

    Example:
      >>> SingleProgramEngine(microbatches=4).num_stages(MeshSpec(data=2))
      1
    """

    microbatches: int = 1
    fsdp: bool = False
    rules: AxisRules = field(default_factory=default_axis_rules)

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}")

    @property
    def loop_microbatches(self) -> int:
        """The step's loop runs all of them."""
        return self.microbatches

    def num_stages(self, mesh: MeshSpec) -> int:
        """Return 1: nothing is cut.

        Raises:
          ValueError: if the mesh has more than one pipeline rank.
        """
        if mesh.pipe != 1:
            raise ValueError(
                f"SingleProgramEngine has no pipeline, but the mesh has pipe={mesh.pipe}; use "
                f"MeshSpec(data={mesh.pipe * mesh.data}, tensor={mesh.tensor}) or MpmdEngine"
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
          ValueError: if an array's axis names do not fit the rules or the mesh; it is named.
        """
        self.num_stages(mesh)
        layout = OneProgramLayout(
            rank_meshes(mesh)[0],
            mesh,
            self.rules,
            ("data",) if self.fsdp else (),
            batch_axes or batch_first,
        )
        summary = StepSummary(
            engine="SingleProgramEngine",
            schedule="",
            num_ranks=1,
            num_microbatches=self.microbatches,
            stages=(),
            planned_bubble=0.0,
            compile_seconds=0.0,
        )
        return OneProgramStep(init, step, batch, layout, summary)
