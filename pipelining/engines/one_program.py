"""A step that is one XLA program: what `SingleProgramEngine` and `SpmdEngine` compile to.

In: the Trainer's pure functions, and a layout: where arrays lie, and in which context the step is
traced.  Out: a compiled step, which compiles again only when a batch of a new shape comes.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from stagewright.nn.axes import AxisRules, bind_axes, leaf_axes
from stagewright.pipelining import jax_seams
from stagewright.pipelining.engines.birth import create
from stagewright.pipelining.engines.engine import (
    Batch,
    BatchAxes,
    Metrics,
    StageRow,
    State,
    StepSummary,
)
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.specs import make_spec, sharding_on, spread_over, whole_on
from stagewright.pipelining.timeline import Timeline


@dataclass(frozen=True, slots=True)
class OneProgramLayout:
    """Where the arrays of a step lie.

    Attributes:
      mesh: the devices.
      spec: its sizes.
      rules: from logical axis names to mesh axes.
      spread: mesh axes over which the state is spread beyond what the rules say.
      batch_axes: tells the logical names of a batch's dims.
    """

    mesh: Mesh
    spec: MeshSpec
    rules: AxisRules
    spread: tuple[str, ...]
    batch_axes: BatchAxes

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """The context in which to trace the step."""
        if self.spec.size == 1:
            return contextlib.nullcontext()
        return bind_axes(self.rules, self.abstract_mesh())

    def abstract_mesh(self) -> Any:
        """The mesh without its devices."""
        return jax_seams.abstract_mesh(**self.mesh.shape)

    def of_state(self, state: State) -> Any:
        """A sharding for each leaf of the state."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(state)
        shardings = [
            self._sharding(f"state{jax.tree_util.keystr(path)}", names, leaf, self.spread)
            for (path, leaf), names in zip(paths, leaf_axes(state), strict=True)
        ]
        return jax.tree.unflatten(treedef, shardings)

    def of_batch(self, batch: Batch) -> Any:
        """A sharding for each leaf of a batch."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
        names = jax.tree.leaves(self.batch_axes(batch), is_leaf=lambda x: isinstance(x, tuple))
        shardings = [
            self._sharding(f"batch{jax.tree_util.keystr(path)}", axes, leaf, ())
            for (path, leaf), axes in zip(paths, names, strict=True)
        ]
        return jax.tree.unflatten(treedef, shardings)

    def _sharding(self, path: str, names: Any, leaf: Any, spread: tuple[str, ...]) -> Sharding:
        if self.spec.size == 1:
            return whole_on(self.mesh)
        spec = make_spec(path, names, leaf.shape, self.rules, self.spec)
        for axis in spread:
            spec = spread_over(spec, leaf.shape, axis, self.mesh.shape[axis])
        return sharding_on(self.mesh, spec)


def batch_first(batch: Batch) -> Any:
    """The names of a batch's dims where nobody says otherwise: [micro-batches, "batch", ...]."""
    return jax.tree.map(lambda leaf: (None, "batch", *[None] * leaf.ndim)[: leaf.ndim], batch)


class OneProgramStep:
    """The compiled step; see `CompiledStep`.  One executable for each shape of batch seen.

    Args:
      init: makes the whole state.
      step: changes it.
      batch: the batch, or shapes like it.
      layout: where things lie.
      summary: of the plan; stages and compile time are filled in here.
      context: further contexts to trace in.
    """

    last_timeline: Timeline | None = None  # one program: what runs when is XLA's own affair

    def __init__(
        self,
        init: Callable[[], State],
        step: Callable[[State, Batch], tuple[State, Metrics]],
        batch: Batch,
        layout: OneProgramLayout,
        summary: StepSummary,
        context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        began = time.perf_counter()
        self._init = init
        self._step = step
        self._state = jax.eval_shape(init)
        self._layout = layout
        self._context = context
        self._shardings = layout.of_state(self._state)
        self._executables: dict[Any, Any] = {}
        num_equations = self._compile(batch)
        self.summary = replace(
            summary,
            stages=(_row(self._state, layout.mesh, num_equations),),
            compile_seconds=time.perf_counter() - began,
        )

    def plan_timeline(self, measured: Sequence[Timeline]) -> Timeline | None:
        """None: there is no plan."""
        del measured
        return None

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

    @property
    def executables(self) -> tuple[Any, ...]:
        """What was compiled, for those who want to read it."""
        return tuple(self._executables.values())

    def _compile(self, batch: Batch) -> int:
        """Compile for this shape of batch; return the number of equations."""
        step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self._shardings, self._layout.of_batch(batch)),
            out_shardings=(self._shardings, whole_on(self._layout.mesh)),
        )
        with self._layout.bound(), self._context():
            traced = step.trace(self._state, jax.tree.map(jax.typeof, batch))
            self._executables[_shapes(batch)] = traced.lower().compile()
        return len(traced.jaxpr.eqns)


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
