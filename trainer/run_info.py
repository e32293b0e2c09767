"""What a run is, told once at its start: the loggers' first message."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stagewright.pipelining.engines.engine import StepSummary
from stagewright.pipelining.mesh import MeshSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What loggers are told before the first step.

    Attributes:
      summary: the engine's plan: stages, schedule, planned bubble, compile time.
      mesh: the devices.
      layers_per_stage: layers of each stage, or () for a model that sets its own marks.
      num_parameters: parameter elements of the model; tied ones count once.
      first_step: number of the first step of this `fit`, from 1.
      last_step: number of its last step.
      settings: the run's configuration, as plain values; empty if there is none.
    """

    summary: StepSummary
    mesh: MeshSpec
    layers_per_stage: tuple[int, ...]
    num_parameters: int
    first_step: int
    last_step: int
    settings: Mapping[str, Any] = field(default_factory=dict)
