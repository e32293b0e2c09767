"""Recipes of the GPT-3 family: functions that return a run's configuration.

Shapes, batch sizes and learning rates are those of the paper's table 2.1, but where that does not
divide: the 1.3B model has 16 heads of 128 (printed: 24), the 13B model a width of 5120 (printed:
5140).  The vocabulary is GPT-2's 50,257, padded to 50,304 where it is split over devices.

Reference:
  Brown et al., "Language Models are Few-Shot Learners", arXiv 2005.14165, table 2.1.
"""

from collections.abc import Callable

from stagewright.recipes.gpt_config import GPTConfig
from stagewright.trainer.config import (
    DataConfig,
    EngineConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
)

VOCAB = 50_257
PADDED_VOCAB = 50_304  # divides by 8 x 8 x 3
CONTEXT = 2048


def gpt3_nano() -> RunConfig:
    """A small byte-level GPT on Python's own source text, in two pipeline stages.

    842,496 parameters; 240 steps read half a million bytes.  Without an accelerator the two devices are
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


def gpt2_125m() -> RunConfig:
    """GPT-2's smallest, 124,439,808 parameters: the shape that most reproductions start from.

    Command: `stagewright train gpt2-125m`

    Expected: not trained here; its first loss is 10.91 on 512 bytes of Python's own source (the
    logarithm of the vocabulary is 10.82).
    """
    return _run(
        GPTConfig(vocab=VOCAB, context=1024, width=768, depth=12, heads=12),
        batch=512,
        learning_rate=6e-4,
        mesh=MeshConfig(pipe=2),
        schedule="1f1b",
        microbatches=16,
    )


def gpt3_175b() -> RunConfig:
    """GPT-3 175B as in JaxPP's runs: pipe=8, tensor=8, sequence 2048, bfloat16, on 64 devices.

    More replicas with `--mesh.data N --data.batch 128*N`, up to 1024 devices with N = 16.

    Command: `stagewright train gpt3-175b`

    Expected: not run here.  The paper measured 9.53 s a step (462 TFLOP/s a device) on 64 H100 with
    its own framework: arXiv 2412.14374, table 1.
    """
    return _run(
        GPTConfig(
            vocab=PADDED_VOCAB,
            context=CONTEXT,
            width=12_288,
            depth=96,
            heads=96,
            dtype="bfloat16",
        ),
        batch=128,
        learning_rate=0.6e-4,
        mesh=MeshConfig(pipe=8, tensor=8),
        schedule="interleaved:6",
        microbatches=32,
    )


def _run(
    model: GPTConfig,
    *,
    batch: int,
    learning_rate: float,
    mesh: MeshConfig,
    schedule: str,
    microbatches: int,
) -> RunConfig:
    return RunConfig(
        model=model,
        steps=100_000,
        data=DataConfig(batch=batch, length=model.context),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2000),
        mesh=mesh,
        engine=EngineConfig(kind="mpmd", schedule=schedule, microbatches=microbatches),
    )


# name: (depth, width, heads, batch in sequences of 2048, learning rate, pipeline ranks)
_TABLE = {
    "125m": (12, 768, 12, 256, 6e-4, 2),
    "350m": (24, 1024, 16, 256, 3e-4, 2),
    "760m": (24, 1536, 16, 256, 2.5e-4, 4),
    "1.3b": (24, 2048, 16, 512, 2e-4, 4),
    "2.7b": (32, 2560, 32, 512, 1.6e-4, 8),
    "6.7b": (32, 4096, 32, 1024, 1.2e-4, 8),
    "13b": (40, 5120, 40, 1024, 1e-4, 8),
}


def _of_table(name: str) -> Callable[[], RunConfig]:
    depth, width, heads, batch, learning_rate, pipe = _TABLE[name]

    def recipe() -> RunConfig:
        model = GPTConfig(vocab=VOCAB, context=CONTEXT, width=width, depth=depth, heads=heads)
        return _run(
            model,
            batch=batch,
            learning_rate=learning_rate,
            mesh=MeshConfig(pipe=pipe),
            schedule="1f1b",
            microbatches=4 * pipe,
        )

    recipe.__name__ = f"gpt3_{name.replace('.', '_')}"
    recipe.__doc__ = f"""GPT-3 {name.upper()}: {depth} layers of width {width}, {pipe} pipeline ranks.

    Command: `stagewright train gpt3-{name}`

    Expected: not run here.
    """
    return recipe


GPT3: dict[str, Callable[[], RunConfig]] = {
    "gpt3-nano": gpt3_nano,
    "gpt2-125m": gpt2_125m,
    **{f"gpt3-{name}": _of_table(name) for name in _TABLE},
    "gpt3-175b": gpt3_175b,
}
"""The family's recipes by name."""
