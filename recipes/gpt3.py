"""Recipes of the GPT-3 family (Brown et al. 2020): functions that return a run's configuration."""

from stagewright.recipes.gpt_config import GPTConfig
from stagewright.trainer.config import (
    DataConfig,
    EngineConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
)


def gpt3_nano() -> RunConfig:
    """A byte-level GPT on the source text of Python's standard library, in two pipeline stages.

    Command: `stagewright train gpt3-nano`.  Without an accelerator the two devices are simulated on
    the CPU.
    """
    return RunConfig(
        model=GPTConfig(width=128, depth=4, heads=4, context=128),
        steps=300,
        data=DataConfig(batch=32, length=128),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        mesh=MeshConfig(pipe=2),
        engine=EngineConfig(kind="mpmd", schedule="1f1b", microbatches=8),
    )
