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
    """A small byte-level GPT on Python's own source text, in two pipeline stages.

    842,496 parameters; half a million bytes of text.  Without an accelerator the two devices are
    simulated on the CPU.

    Command: `stagewright train gpt3-nano`

    Expected: the loss falls from 5.35 nats per byte to about 2.25 (mean of the last ten steps),
    2.39 on held-out text.
    """
    return RunConfig(
        model=GPTConfig(width=128, depth=4, heads=4, context=128),
        steps=240,
        data=DataConfig(batch=16, length=128),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
        mesh=MeshConfig(pipe=2),
        engine=EngineConfig(kind="mpmd", schedule="1f1b", microbatches=8),
    )
