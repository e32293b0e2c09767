"""The engines behind one protocol: who runs the train step, and how it is spread over devices."""

from stagewright.pipelining.engines.engine import (
    CompiledStep,
    Engine,
    StageRow,
    StepSummary,
)
from stagewright.pipelining.engines.mpmd import MpmdEngine
from stagewright.pipelining.engines.single import SingleProgramEngine
from stagewright.pipelining.engines.spmd import SpmdEngine

__all__ = [
    "CompiledStep",
    "Engine",
    "MpmdEngine",
    "SingleProgramEngine",
    "SpmdEngine",
    "StageRow",
    "StepSummary",
]
