"""The public face: every public name of Stagewright, and nothing else.

`import stagewright as sw` gives the names of `__all__`. Each is imported from its home at first
use (PEP 562), so the import itself is quick and brings in neither JAX nor wandb, TensorFlow
Datasets or Orbax. A name that is not here is private, wherever it lies.

No code lives in this room. A new public name is one line in `_HOMES`, one under `TYPE_CHECKING`
for type checkers, and one in `__all__`; `tests/test_packaging.py` holds the three together.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagewright import nn, recipes
    from stagewright.nn.axes import AxisRules, shard
    from stagewright.nn.module import PipelinedModule
    from stagewright.nn.partition import Balanced, Explicit, Uniform
    from stagewright.nn.yields import pipeline_yield
    from stagewright.pipelining.accumulate import accumulate_grads
    from stagewright.pipelining.drawing import draw_order
    from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine, SpmdEngine
    from stagewright.pipelining.mesh import MeshSpec
    from stagewright.pipelining.mpmd_jit import mpmd_jit
    from stagewright.pipelining.reductions import Max, Mean, Stack, Sum
    from stagewright.pipelining.schedules import (
        ZBH1,
        ZBH2,
        ZBV,
        Auto,
        DualPipeV,
        Eager1F1B,
        GPipe,
        GridSchedule,
        HanayoWaves,
        Interleaved1F1B,
        LoopedBFS,
        LoopedDFS,
        OneFOneB,
        Schedule,
        VHalf,
        VMin,
    )
    from stagewright.pipelining.schedules.generated import schedule
    from stagewright.trainer.checkpoints import Checkpoints
    from stagewright.trainer.loggers import ConsoleLogger, JsonlLogger
    from stagewright.trainer.trainer import Trainer

__version__ = "0.1.0"  # pyproject.toml reads it from here

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Auto",
    "AxisRules",
    "Balanced",
    "Checkpoints",
    "ConsoleLogger",
    "DualPipeV",
    "Eager1F1B",
    "Explicit",
    "GPipe",
    "GridSchedule",
    "HanayoWaves",
    "Interleaved1F1B",
    "JsonlLogger",
    "LoopedBFS",
    "LoopedDFS",
    "Max",
    "Mean",
    "MeshSpec",
    "MpmdEngine",
    "OneFOneB",
    "PipelinedModule",
    "Schedule",
    "SingleProgramEngine",
    "SpmdEngine",
    "Stack",
    "Sum",
    "Trainer",
    "Uniform",
    "VHalf",
    "VMin",
    "accumulate_grads",
    "draw_order",
    "mpmd_jit",
    "nn",
    "pipeline_yield",
    "recipes",
    "schedule",
    "shard",
]

# Submodules that are public as a whole: `from stagewright import nn`.
_SUBMODULES = ("nn", "recipes")

# Public name -> the module that defines it.
_HOMES = {
    # The functional layer
    "accumulate_grads": "stagewright.pipelining.accumulate",
    "mpmd_jit": "stagewright.pipelining.mpmd_jit",
    "pipeline_yield": "stagewright.nn.yields",
    "shard": "stagewright.nn.axes",
    "AxisRules": "stagewright.nn.axes",
    "MeshSpec": "stagewright.pipelining.mesh",
    # Reductions over micro-batches
    "Max": "stagewright.pipelining.reductions",
    "Mean": "stagewright.pipelining.reductions",
    "Stack": "stagewright.pipelining.reductions",
    "Sum": "stagewright.pipelining.reductions",
    # Models
    "Balanced": "stagewright.nn.partition",
    "Explicit": "stagewright.nn.partition",
    "PipelinedModule": "stagewright.nn.module",
    "Uniform": "stagewright.nn.partition",
    # Schedules
    "GPipe": "stagewright.pipelining.schedules",
    "GridSchedule": "stagewright.pipelining.schedules",
    "draw_order": "stagewright.pipelining.drawing",
    "schedule": "stagewright.pipelining.schedules.generated",
    "Interleaved1F1B": "stagewright.pipelining.schedules",
    "OneFOneB": "stagewright.pipelining.schedules",
    "Schedule": "stagewright.pipelining.schedules",
    "ZBH1": "stagewright.pipelining.schedules",
    "Auto": "stagewright.pipelining.schedules",
    "DualPipeV": "stagewright.pipelining.schedules",
    "Eager1F1B": "stagewright.pipelining.schedules",
    "HanayoWaves": "stagewright.pipelining.schedules",
    "LoopedBFS": "stagewright.pipelining.schedules",
    "LoopedDFS": "stagewright.pipelining.schedules",
    "VHalf": "stagewright.pipelining.schedules",
    "VMin": "stagewright.pipelining.schedules",
    "ZBH2": "stagewright.pipelining.schedules",
    "ZBV": "stagewright.pipelining.schedules",
    # Engines
    "MpmdEngine": "stagewright.pipelining.engines",
    "SingleProgramEngine": "stagewright.pipelining.engines",
    "SpmdEngine": "stagewright.pipelining.engines",
    # Training
    "Checkpoints": "stagewright.trainer.checkpoints",
    "ConsoleLogger": "stagewright.trainer.loggers",
    "JsonlLogger": "stagewright.trainer.loggers",
    "Trainer": "stagewright.trainer.trainer",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        value: object = import_module(f"stagewright.{name}")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(
            f"module 'stagewright' has no public name {name!r}",
            name=name,
            obj=import_module(__name__),
        )
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
