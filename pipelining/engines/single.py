"""The engine without a pipeline: the whole step as one XLA program, on one device or a mesh of them.

It is what the other engines are measured against: plain `jax.jit` of the step, compiled ahead of
time, with the state's buffers reused.  On a mesh it is data parallel, tensor parallel and, with
`fsdp`, what the paper calls "JAX FSDP".  In: the Trainer's pure functions.  Out: a step that
compiles only when a batch of a new shape comes.

Reference:
  Xu et al., "GSPMD", arXiv 2105.04663; Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from stagewright.nn.axes import AxisRules, bind_axes, default_axis_rules, leaf_axes
from stagewright.pipelining import jax_seams
from stagewright.pipelining.engines.birth import create
from stagewright.pipelining.engines.engine import (
    Batch,
    BatchAxes,
    Metrics,
    StageRow,
    State,
    StepSummary,
    StepTimes,
)
from stagewright.pipelining.mesh import MeshSpec, rank_meshes
from stagewright.pipelining.specs import make_spec, sharding_on, spread_over_data, whole_on


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
    ) -> "SingleProgramStep":
        """Trace and compile; see `Engine.compile`.

        Raises:
          ValueError: if an array's axis names do not fit the rules or the mesh; it is named.
        """
        self.num_stages(mesh)
        return SingleProgramStep(init, step, batch, mesh, self, batch_axes or _batch_first)


def _batch_first(batch: Batch) -> Any:
    return jax.tree.map(lambda leaf: (None, "batch", *[None] * leaf.ndim)[: leaf.ndim], batch)


class SingleProgramStep:
    """The compiled step; see `CompiledStep`.  One executable for each shape of batch seen."""

    last_times: StepTimes | None = None  # one program is never idle by plan: nothing to measure

    def __init__(
        self,
        init: Callable[[], State],
        step: Callable[[State, Batch], tuple[State, Metrics]],
        batch: Batch,
        mesh: MeshSpec,
        engine: SingleProgramEngine,
        batch_axes: BatchAxes,
    ) -> None:
        began = time.perf_counter()
        self._init = init
        self._step = step
        self._state = jax.eval_shape(init)
        self._layout = _Layout(mesh, engine, batch_axes)
        self._shardings = self._layout.of_state(self._state)
        self._executables: dict[Any, Any] = {}
        num_equations = self._compile(batch)
        self.summary = StepSummary(
            engine="SingleProgramEngine",
            schedule="",
            num_ranks=1,
            num_microbatches=engine.microbatches,
            stages=(_row(self._state, self._layout.mesh, num_equations),),
            planned_bubble=0.0,
            compile_seconds=time.perf_counter() - began,
        )

    def init(self) -> State:
        """Create the state where it belongs, with the values that it has under every engine."""
        leaves = jax.tree.leaves(self._shardings)
        return create(self._init, [[sharding] for sharding in leaves], leaves)

    def place(self, state: State) -> State:
        """Put a state where the step reads it; what lies there already is not copied."""
        return jax.device_put(state, self._shardings)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step, consuming `state`."""
        if (shapes := _shapes(batch)) not in self._executables:
            self._compile(batch)
        placed = jax.device_put(batch, self._layout.of_batch(batch))
        out: tuple[State, Metrics] = self._executables[shapes](state, placed)
        return out

    def _compile(self, batch: Batch) -> int:
        """Compile for this shape of batch; return the number of equations."""
        step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self._shardings, self._layout.of_batch(batch)),
            out_shardings=(self._shardings, whole_on(self._layout.mesh)),
        )
        with self._layout.bound():
            traced = step.trace(self._state, jax.tree.map(jax.typeof, batch))
            self._executables[_shapes(batch)] = traced.lower().compile()
        return len(traced.jaxpr.eqns)


class _Layout:
    """Where the arrays of a step lie."""

    def __init__(self, spec: MeshSpec, engine: SingleProgramEngine, batch_axes: BatchAxes) -> None:
        self.mesh: Mesh = rank_meshes(spec)[0]
        self._spec = spec
        self._engine = engine
        self._batch_axes = batch_axes

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """The context in which to trace the step."""
        if self._spec.size == 1:
            return contextlib.nullcontext()
        return bind_axes(
            self._engine.rules, jax_seams.abstract_mesh(self._spec.data, self._spec.tensor)
        )

    def of_state(self, state: State) -> Any:
        """A sharding for each leaf of the state."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(state)
        shardings = [
            self._sharding(f"state{jax.tree_util.keystr(path)}", names, leaf, state=True)
            for (path, leaf), names in zip(paths, leaf_axes(state), strict=True)
        ]
        return jax.tree.unflatten(treedef, shardings)

    def of_batch(self, batch: Batch) -> Any:
        """A sharding for each leaf of a batch."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
        names = jax.tree.leaves(self._batch_axes(batch), is_leaf=lambda x: isinstance(x, tuple))
        shardings = [
            self._sharding(f"batch{jax.tree_util.keystr(path)}", axes, leaf, state=False)
            for (path, leaf), axes in zip(paths, names, strict=True)
        ]
        return jax.tree.unflatten(treedef, shardings)

    def _sharding(self, path: str, names: Any, leaf: Any, *, state: bool) -> Sharding:
        if self._spec.size == 1:
            return whole_on(self.mesh)
        spec = make_spec(path, names, leaf.shape, self._engine.rules, self._spec)
        if state and self._engine.fsdp:
            spec = spread_over_data(spec, leaf.shape, self._spec)
        return sharding_on(self.mesh, spec)


def _shapes(batch: Batch) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _row(state: State, mesh: Mesh, num_equations: int) -> StageRow:
    parameters = jax.tree.leaves(getattr(state, "params", state))
    return StageRow(
        stage=0,
        rank=0,
        devices=tuple(str(device) for device in mesh.devices.flat),
        parameters=sum(leaf.size for leaf in parameters),
        tasks=(("step", num_equations),),
    )
