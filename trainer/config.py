"""The configuration of a run: frozen dataclasses, whose field docstrings are the manual.

In: nothing; out: nothing that is not plain data.  A recipe returns a `RunConfig`, the command line
overrides its fields, and `run.py` builds the run from it.  Importing this brings in no JAX, so that
`--help` is quick; the `build` methods import what they need.
"""

import abc
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


class ModelConfig(abc.ABC):
    """What a recipe's model is; each family of models has its own, a frozen dataclass."""

    @abc.abstractmethod
    def build(self, rngs: Any) -> Any:
        """Make the model from its random streams, an `nnx.Rngs`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to learn from, and how it is cut into batches."""

    path: str | None = None
    """A text file, or a folder of them; by default the source of Python's standard library."""

    batch: int = 32
    """Examples in a batch; a multiple of the micro-batches."""

    length: int = 128
    """Bytes in an example."""

    max_bytes: int = 16_000_000
    """Read at most so many bytes."""

    heldout_fraction: float = 0.02
    """Share of the text, 0 to 1, that is kept for evaluation."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, with a warm-up, a cosine decay, and clipping by the norm of the whole gradient."""

    learning_rate: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""

    warmup_steps: int = 20
    """Steps in which the learning rate rises from 0 in a straight line."""

    final_fraction: float = 0.1
    """Learning rate of the last step as a share of the highest one, 0 to 1."""

    b1: float = 0.9
    """Decay of the gradient's running mean."""

    b2: float = 0.95
    """Decay of the squared gradient's running mean."""

    weight_decay: float = 0.1
    """Weight decay, for parameters of two dims and more: no biases and no norms."""

    clip_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it; 0 turns this off."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The devices."""

    pipe: int = 1
    """Pipeline ranks: the model's layers are dealt to so many devices or groups of them."""

    data: int = 1
    """Data-parallel replicas of each rank."""

    tensor: int = 1
    """Tensor-parallel devices of each replica."""

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.pipe * self.data * self.tensor

    def build(self) -> Any:
        """Make the `MeshSpec`."""
        from stagewright.pipelining.mesh import MeshSpec

        return MeshSpec(pipe=self.pipe, data=self.data, tensor=self.tensor)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What runs the step."""

    kind: Literal["mpmd", "spmd", "single"] = "mpmd"
    """mpmd: a pipeline, one program for each stage; spmd: a pipeline that is one program, the usual
    baseline; single: no pipeline."""

    schedule: str = "1f1b"
    """mpmd: order of the pipeline's work; `stagewright schedule --compare all` lists the names."""

    microbatches: int = 8
    """Micro-batches that each batch is cut into."""

    repeat: int = 1
    """spmd: circular repeats, runs of layers on each rank."""

    zero: Literal[0, 1, 3] = 0
    """Spread over data: 0 nothing, 1 the optimizer's state (mpmd), 3 the parameters too (single)."""

    post_validation: bool = False
    """mpmd: update before the norm of all stages' gradients is known, and validate afterwards; same
    numbers, one more copy of the state while a step ends."""

    def build(self) -> Any:
        """Make the engine.

        Raises:
          ValueError: if there is no such schedule, or the kind cannot do what is asked.
        """
        from stagewright.pipelining import engines
        from stagewright.pipelining.schedules import by_name

        if self.kind == "single":
            self._refuse("single", {1: "3, or kind mpmd"})
            return engines.SingleProgramEngine(self.microbatches, fsdp=self.zero == 3)
        if self.kind == "spmd":
            self._refuse("spmd", {1: "0", 3: "0"})
            return engines.SpmdEngine(repeat=self.repeat, microbatches=self.microbatches)
        self._refuse("mpmd", {3: "1, or kind single"})
        return engines.MpmdEngine(
            schedule=by_name(self.schedule),
            microbatches=self.microbatches,
            post_validation=self.post_validation,
            zero=1 if self.zero else 0,
        )

    def _refuse(self, kind: str, instead: dict[int, str]) -> None:
        if self.zero in instead:
            raise ValueError(
                f"--engine.kind {kind} cannot do --engine.zero {self.zero}; use --engine.zero "
                f"{instead[self.zero]}"
            )


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that is generated at the end of the run."""

    length: int = 256
    """Bytes to generate; 0 for none."""

    prompt: str = "def "
    """What the text starts with."""

    temperature: float = 0.7
    """0: always the likeliest byte; 1: as the model thinks."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    model: ModelConfig
    """The model."""

    steps: int = 100
    """Optimizer updates to take."""

    seed: int = 0
    """Seed of the parameters, of dropout, and of the order of the data."""

    run_dir: str | None = None
    """Where metrics, configuration and checkpoint go; by default runs/RECIPE-DATE-TIME."""

    overwrite: bool = False
    """Write into run_dir even if it holds an earlier run, and replace that run's files."""

    log_every: int = 10
    """Print a line every so many steps."""

    profile_steps: str | None = None
    """Draw these steps, as 10:13 (10, 11 and 12): what was planned above what was measured, in the
    run's folder under profile/."""

    eval_batches: int = 8
    """Batches of held-out text to evaluate on at the end; 0 for none."""

    data: DataConfig = field(default_factory=DataConfig)
    """The text."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The devices."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """What runs the step."""

    sample: SampleConfig = field(default_factory=SampleConfig)
    """The generated text."""


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """List a configuration's plain values by dotted name, as the command line spells them.

    Example:
      >>> flatten_config(MeshConfig(pipe=2))
      {'pipe': 2, 'data': 1, 'tensor': 1}
    """
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), prefix + item.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            flat.update(flatten_config(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def changed_fields(config: Any, base: Any) -> dict[str, tuple[Any, Any]]:
    """Find what differs from another configuration of the same kind: (before, now) by name."""
    now, before = flatten_config(config), flatten_config(base)
    return {name: (before[name], value) for name, value in now.items() if before[name] != value}
