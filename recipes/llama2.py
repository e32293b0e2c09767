"""Recipes of the Llama 2 family: functions that return a run's configuration.

Reference:
  Touvron et al., "Llama 2", arXiv 2307.09288, section 2.2 and table 1.
"""

from collections.abc import Callable

from stagewright.recipes.llama_config import LlamaConfig
from stagewright.trainer.config import (
    DataConfig,
    EngineConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
)

VOCAB = 32_000
CONTEXT = 4096


def llama2_nano() -> RunConfig:
    """A small byte-level Llama on Python's own source text, in two pipeline stages.

    791,680 parameters, two query heads to each head of keys and values.

    Command: `stagewright train llama2-nano`

    Expected: the loss falls from 5.60 nats per byte to about 1.91 (mean of the last ten steps),
    2.08 on held-out text.
    """
    return RunConfig(
        model=LlamaConfig(width=128, hidden=344, depth=4, heads=4, kv_heads=2, context=128),
        steps=240,
        data=DataConfig(batch=16, length=128),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
        mesh=MeshConfig(pipe=2),
        engine=EngineConfig(kind="mpmd", schedule="zbh1", microbatches=8),
    )


def llama2_7b() -> RunConfig:
    """Llama 2 7B, 6,738,415,616 parameters: four pipeline ranks.

    Command: `stagewright train llama2-7b`

    Expected: not run here.
    """
    model = LlamaConfig(
        vocab=VOCAB, context=CONTEXT, width=4096, hidden=11_008, depth=32, heads=32, kv_heads=32
    )
    return _run(model, batch=1024, learning_rate=3e-4, mesh=MeshConfig(pipe=4), microbatches=32)


def llama2_13b() -> RunConfig:
    """Llama 2 13B, 13,015,864,320 parameters: eight pipeline ranks.

    Command: `stagewright train llama2-13b`

    Expected: not run here.
    """
    model = LlamaConfig(
        vocab=VOCAB, context=CONTEXT, width=5120, hidden=13_824, depth=40, heads=40, kv_heads=40
    )
    return _run(model, batch=1024, learning_rate=3e-4, mesh=MeshConfig(pipe=8), microbatches=64)


def llama2_70b() -> RunConfig:
    """Llama 2 70B as in JaxPP's run: pipe=4, tensor=8, data=2, sequence 4096, bfloat16, 64 devices.

    68,976,648,192 parameters, eight query heads to each head of keys and values.

    Command: `stagewright train llama2-70b`

    Expected: not run here.  The paper measured 8.42 s a step (432 TFLOP/s a device) on 64 H100 with
    its own framework: arXiv 2412.14374.
    """
    model = LlamaConfig(
        vocab=VOCAB,
        context=CONTEXT,
        width=8192,
        hidden=28_672,
        depth=80,
        heads=64,
        kv_heads=8,
        dtype="bfloat16",
    )
    mesh = MeshConfig(pipe=4, tensor=8, data=2)
    return _run(model, batch=128, learning_rate=1.5e-4, mesh=mesh, microbatches=16)


def _run(
    model: LlamaConfig, *, batch: int, learning_rate: float, mesh: MeshConfig, microbatches: int
) -> RunConfig:
    return RunConfig(
        model=model,
        steps=500_000,
        data=DataConfig(batch=batch, length=model.context),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2000),
        mesh=mesh,
        engine=EngineConfig(kind="mpmd", schedule="interleaved:2", microbatches=microbatches),
    )


LLAMA2: dict[str, Callable[[], RunConfig]] = {
    "llama2-nano": llama2_nano,
    "llama2-7b": llama2_7b,
    "llama2-13b": llama2_13b,
    "llama2-70b": llama2_70b,
}
"""The family's recipes by name."""
