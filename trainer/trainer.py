"""The Trainer: model, optimizer, mesh, engine, data and loggers, tied together.

It owns the state and the loop over steps, and nothing of what happens within a step (`step.py`) or
where (the engine).  Values of a step are fetched while the next one runs, so that logging never
holds up the pipeline.
"""

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import SingleDeviceSharding

from stagewright.nn.partition import Partition, Uniform
from stagewright.pipelining.engines.birth import create
from stagewright.pipelining.engines.engine import CompiledStep, Engine
from stagewright.pipelining.mesh import MeshSpec, rank_meshes
from stagewright.trainer.blueprint import Blueprint, MakeModel, abstract_model, draw_blueprint
from stagewright.trainer.checkpoints import Checkpoints, restore
from stagewright.trainer.evaluation import Evaluator, on_one_device
from stagewright.trainer.interrupts import InterruptGuard
from stagewright.trainer.loggers import Logger, LoggerGroup
from stagewright.trainer.microbatches import MicrobatchSplit, leaf_names
from stagewright.trainer.profiling import StepProfile, StepProfiler
from stagewright.trainer.reports import StepReporter
from stagewright.trainer.run_info import RunInfo
from stagewright.trainer.state import TrainState
from stagewright.trainer.step import build_train_functions

Batch = Any  # a pytree of arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """What came of a `fit`.

    Attributes:
      losses: loss per token of each step, in order.
      metrics: all values of the last step, as loggers get them.
      state: the state after the last step; the next `fit` of the same Trainer consumes it.
      step: number of the last step since the run began.
      checkpoint: folder of the checkpoint written at the end, or None.
    """

    losses: list[float]
    metrics: dict[str, float]
    state: TrainState
    step: int
    checkpoint: Any = None


class Trainer:
    """Trains a model.

    Example:
      ```python
      trainer = Trainer(
          model=lambda rngs: GPT(config, rngs=rngs),
          optimizer=optax.adamw(3e-4),
          mesh=MeshSpec(pipe=2),
          engine=MpmdEngine(schedule=OneFOneB(), microbatches=8),
          loggers=[ConsoleLogger(), JsonlLogger("runs/a/metrics.jsonl")],
          checkpoints=Checkpoints("runs/a/checkpoints"),
      )
      result = trainer.fit(batches, steps=1000)
      ```
    """

    def __init__(
        self,
        *,
        model: MakeModel,
        optimizer: optax.GradientTransformation,
        engine: Engine,
        mesh: MeshSpec | None = None,
        seed: int = 0,
        partition: Partition | None = None,
        batch_axes: Mapping[str, int | None] | None = None,
        params: nnx.State | None = None,
        loggers: Sequence[Logger] = (),
        checkpoints: Checkpoints | None = None,
        settings: Mapping[str, Any] | None = None,
        profile: StepProfile | None = None,
    ) -> None:
        """Learn what the model is; nothing is allocated or compiled yet.

        Args:
          model: constructor, called with `nnx.Rngs(seed)`; its module has a method `loss(batch)`
            that returns (sum over tokens, number of tokens, metrics as sums over tokens).
          optimizer: an Optax transformation.
          engine: runs the step.
          mesh: the devices; one by default.
          seed: seed of parameters and dropout.
          partition: how layers are dealt to stages; `Uniform()` by default.
          batch_axes: batch axis of the leaves where it is not 0, by dotted name; None for a leaf
            that all micro-batches share.
          params: initial parameters in place of those that the seed gives.  They are copied, so
            yours stay usable.
          loggers: told of each step; see `loggers.py`.
          checkpoints: where to save at the end of a `fit`, or None.
          settings: the run's configuration, for loggers.
          profile: steps to draw, planned above measured, and where to; None for none.

        Raises:
          ValueError: if the engine cannot use this mesh, the layers cannot be dealt to its stages,
            or `params` does not fit the model.
          TypeError: if `model` does not make a module with a method `loss`, or a part is of another kind.
        """
        _check_parts(optimizer, engine, mesh)
        self._mesh = mesh or MeshSpec()
        self._engine = engine
        self._split = MicrobatchSplit(
            microbatches=engine.loop_microbatches,
            axes=batch_axes or {},
            data_size=self._mesh.data,
        )
        self._blueprint = _draw(model, seed, engine.num_stages(self._mesh), partition or Uniform())
        self._functions = build_train_functions(self._blueprint, optimizer, self._split)
        self._optimizer = optimizer
        self._loggers = LoggerGroup(loggers)
        self._checkpoints = checkpoints
        self._settings = dict(settings or {})
        self._profiler = None if profile is None else StepProfiler(profile)
        self._steps: dict[Any, CompiledStep] = {}
        self._compiled: CompiledStep | None = None
        self._state: TrainState | None = None
        self._lost = ""
        self._prepared = False
        self._evaluator: Evaluator | None = None
        if params is not None:
            self._state = self._first_state(params)

    # ---- training ---------------------------------------------------------------------------

    def fit(self, data: Iterable[Batch], steps: int) -> FitResult:
        """Take `steps` more steps.

        Args:
          data: batches, pytrees of arrays; leaves [global batch, ...] unless `batch_axes` says
            otherwise.  If they end early, so does training, with a warning.  A batch of a new shape
            compiles a new step by itself.
          steps: how many, at least 1.

        Raises:
          ValueError: before the first step, if a batch cannot be cut into micro-batches.
          FileExistsError: before the first step, if the checkpoint directory is in use.
          KeyboardInterrupt: after Ctrl-C, once the current step has ended and, with `checkpoints`,
            its state is saved.  A second Ctrl-C ends at once.
        """
        if steps < 1 or steps != int(steps):
            raise ValueError(f"fit needs a whole number of steps, at least 1, got {steps!r}")
        if isinstance(data, Mapping):
            raise ValueError(
                "fit needs batches, one after another, but data is a single mapping with "
                f"{list(data)[:4]}; pass [batch], or an iterator that yields batches"
            )
        batches = _at_least_one(data)
        cut = self._split(next(batches))
        self._prepare_checkpoints()
        self._compile_for(cut)
        before = self.step
        reporter = StepReporter(self._loggers.log)
        self._loggers.start(self._info(before + 1, before + steps))
        try:
            with InterruptGuard() as interrupt:
                for step, batch in enumerate(
                    itertools.islice(batches, int(steps)), start=before + 1
                ):
                    self._take_step(step, batch, reporter)
                    if interrupt.requested:
                        break
                reporter.flush()
            return self._finish(reporter, before + steps, interrupted=interrupt.requested)
        finally:
            self._loggers.close()

    def _take_step(self, step: int, batch: Batch, reporter: StepReporter) -> None:
        cut = self._split(batch)
        if _shapes(cut) not in self._steps:
            reporter.flush()
            self._compile_for(cut)
            reporter.restart_clock()
        compiled = self._compile_for(cut)
        state, self._state, self._lost = self._state, None, f"step {step} failed and took it along"
        self._state, metrics = compiled(state, cut)
        reporter.submit(step, metrics, compiled)
        if self._profiler is not None:
            self._profiler.take(step, compiled)

    def _compile_for(self, cut: Batch) -> CompiledStep:
        """The compiled step for this shape of batch, with the state placed for it."""
        compiled = self._steps.get(_shapes(cut))
        if compiled is None:
            compiled = self._engine.compile(
                init=self._functions.init,
                step=self._functions.step,
                batch=cut,
                mesh=self._mesh,
                batch_axes=self._split.axis_names,
            )
            self._steps[_shapes(cut)] = compiled
        if self._lost and self._state is None:
            raise RuntimeError(f"the train state is gone: {self._lost}; restore() a checkpoint")
        if self._state is None:
            self._state = compiled.init()
        elif compiled is not self._compiled:
            self._state = compiled.place(self._state)
        self._compiled = compiled
        return compiled

    def _prepare_checkpoints(self) -> None:
        if self._checkpoints is not None and not self._prepared:
            self._checkpoints.prepare()
            self._prepared = True

    def _finish(self, reporter: StepReporter, planned: int, *, interrupted: bool) -> FitResult:
        state, step = self.state, self.step
        path = None if self._checkpoints is None else self._checkpoints.save(state)
        if interrupted:
            saved = "" if path is None else f"; its checkpoint is {path}"
            raise KeyboardInterrupt(f"stopped after step {step}{saved}")
        if step < planned:
            message = f"the data ended at step {step}, before step {planned}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return FitResult(
            losses=reporter.losses,
            metrics=reporter.latest,
            state=state,
            step=step,
            checkpoint=path,
        )

    def _info(self, first_step: int, last_step: int) -> RunInfo:
        assert self._compiled is not None
        return RunInfo(
            summary=self._compiled.summary,
            mesh=self._mesh,
            layers_per_stage=self._blueprint.layers_per_stage or (),
            num_parameters=self._blueprint.num_parameters,
            first_step=first_step,
            last_step=last_step,
            settings=self._settings,
        )

    # ---- the state --------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The train state, each leaf where the engine has it; the next `fit` consumes it.

        Raises:
          RuntimeError: if there is none: nothing was fitted or restored, or a step failed.
        """
        if self._state is None:
            reason = self._lost or "nothing was fitted or restored yet"
            raise RuntimeError(f"there is no train state: {reason}")
        return self._state

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return 0 if self._state is None else int(np.asarray(self._state.step))

    @property
    def params(self) -> nnx.State:
        """The parameters by path: the trained ones, or the first ones before any `fit`."""
        return self.state.params if self._state is not None else self._arrays()[0]

    def model(self) -> Any:
        """A copy of the model in evaluation mode, on one device; training does not touch it."""
        return self._blueprint.merge(*self._arrays(), training=False)

    def restore(self, directory: str | os.PathLike[str], step: int | None = None) -> int:
        """Continue from a checkpoint.

        Args:
          directory: the folder of checkpoints.
          step: which one; the latest by default.

        Returns:
          The checkpoint's step.

        Raises:
          FileNotFoundError: if there is no such checkpoint.
          ValueError: if it does not fit the model and optimizer; what differs is named.
        """
        self._state = restore(directory, jax.eval_shape(self._functions.init), step)
        self._compiled = None  # wherever the next step is, the state has to be placed for it
        return self.step

    def _first_state(self, params: nnx.State) -> TrainState:
        _check_params(params, self._blueprint.params)

        def make(params: nnx.State) -> TrainState:
            fresh = self._functions.init()
            opt_state = self._optimizer.init(params)
            return dataclasses.replace(fresh, params=params, opt_state=opt_state)

        # Each leaf gets a buffer of its own: a step donates them, and the user keeps theirs.
        return on_one_device(jax.jit(make)(on_one_device(params, self._device)), self._device)

    # ---- the model in use -------------------------------------------------------------------

    def evaluate(self, data: Iterable[Batch]) -> dict[str, float]:
        """Take loss and metrics over held-out data, without a trace in training.

        Args:
          data: batches as for `fit`, but of any sizes.

        Returns:
          `loss` and the model's metrics, each per token over all the data, and `tokens`.

        Raises:
          ValueError: if there is no token in the data.
        """
        if self._evaluator is None:
            self._evaluator = Evaluator(self._blueprint)
        return self._evaluator(*self._arrays(), data)

    @property
    def _device(self) -> jax.Device:
        return rank_meshes(self._mesh)[0].devices.flat[0]

    def _arrays(self) -> tuple[nnx.State, nnx.State]:
        """Parameters and the rest, copied to one device."""
        if self._state is None and self._lost:
            raise RuntimeError(f"there is no train state: {self._lost}")
        if self._state is None:
            return self._first_arrays()
        return on_one_device((self._state.params, self._state.rest), self._device)

    def _first_arrays(self) -> tuple[nnx.State, nnx.State]:
        """What a first step would start from, to the bit."""
        num_leaves = len(jax.tree.leaves((self._blueprint.params, self._blueprint.rest)))
        place = SingleDeviceSharding(self._device)
        arrays: tuple[nnx.State, nnx.State] = create(
            self._blueprint.init, [[place]] * num_leaves, [place] * num_leaves
        )
        return arrays


def _check_parts(optimizer: Any, engine: Any, mesh: Any) -> None:
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer must be an Optax transformation such as optax.adamw(3e-4), got "
            f"{getattr(optimizer, '__name__', type(optimizer).__name__)}"
        )
    if isinstance(engine, type) or not isinstance(engine, Engine):
        raise TypeError(f"engine must be an engine such as MpmdEngine(), got {engine!r}")
    if mesh is not None and not isinstance(mesh, MeshSpec):
        raise TypeError(f"mesh must be a MeshSpec such as MeshSpec(pipe=2), got {mesh!r}")


def _draw(make: MakeModel, seed: int, num_stages: int, partition: Partition) -> Blueprint:
    model = abstract_model(make, seed=seed)
    if not getattr(model, "num_layers", 0):
        return draw_blueprint(make, seed=seed)  # it marks its stages itself, if at all
    layers_per_stage = partition.split(num_stages, model.num_layers)
    return draw_blueprint(make, seed=seed, layers_per_stage=layers_per_stage)


def _at_least_one(data: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the first batch twice: once to look at, once to use."""
    batches = iter(data)
    try:
        first = next(batches)
    except StopIteration:
        raise ValueError("fit needs at least one batch, but the data is empty") from None
    return itertools.chain((first, first), batches)


def _shapes(batch: Batch) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((np.shape(leaf), _dtype(leaf)) for leaf in leaves)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)


def _check_params(params: nnx.State, wanted: nnx.State) -> None:
    have = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    want = dict(zip(leaf_names(wanted), jax.tree.leaves(wanted), strict=True))
    if missing := sorted(set(want) ^ set(have)):
        raise ValueError(f"params does not fit the model: only one of the two has {missing[:8]}")
    for name, leaf in want.items():
        if have[name].shape != leaf.shape:
            raise ValueError(
                f"params does not fit the model: {name} has shape {have[name].shape}, the model "
                f"wants {leaf.shape}"
            )
