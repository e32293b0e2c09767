"""A run from its configuration: build everything, train, evaluate, write and show the results.

In: a `RunConfig`.  Out: a folder with `config.json`, `metrics.jsonl` and `checkpoints/`, and lines
on the console.  The command line ends here; a program that wants more than this uses the `Trainer`.
"""

import dataclasses
import datetime
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from stagewright.pipelining.mesh import rank_meshes
from stagewright.trainer.checkpoints import Checkpoints
from stagewright.trainer.config import RunConfig
from stagewright.trainer.corpus import Corpus, read_corpus
from stagewright.trainer.data import TextBatches, heldout_batches
from stagewright.trainer.generate import generate
from stagewright.trainer.loggers import ConsoleLogger, JsonlLogger
from stagewright.trainer.optimizers import build_optimizer
from stagewright.trainer.profiling import StepProfile
from stagewright.trainer.trainer import FitResult, Trainer


def run(config: RunConfig, *, recipe: str, changed: Mapping[str, tuple[Any, Any]]) -> FitResult:
    """Run a configuration from start to end.

    Args:
      config: the run.
      recipe: name of the recipe it came from.
      changed: what differs from the recipe, as (recipe's value, value) by dotted name.

    Returns:
      What came of the training.

    Raises:
      ValueError: if the parts do not fit together.
      FileExistsError: if the run's folder is in use.
    """
    console = Console(highlight=False, soft_wrap=True)
    _check(config)
    corpus = read_corpus(
        config.data.path,
        max_bytes=config.data.max_bytes,
        heldout_fraction=config.data.heldout_fraction,
    )
    batches = TextBatches(
        corpus.training, batch=config.data.batch, length=config.data.length, seed=config.seed
    )
    folder = _run_folder(config, recipe)
    trainer = _build_trainer(config, folder, recipe)
    _claim(folder, overwrite=config.overwrite)
    _write_config(folder, config, recipe, changed)
    for name, (before, now) in changed.items():
        console.print(f"changed   {name}: {before} -> {now}", markup=False)
    console.print(f"text      {corpus.source}", markup=False)
    if config.optimizer.warmup_steps >= config.steps:
        console.print(
            f"warm-up   cut from {config.optimizer.warmup_steps} to {config.steps - 1} steps, for "
            f"the run has {config.steps}"
        )
    console.print("compiling the step ...")
    began = time.perf_counter()
    result = trainer.fit(batches, config.steps)
    console.print(f"trained   {len(result.losses)} steps in {time.perf_counter() - began:.1f} s")
    _show_results(console, config, trainer, corpus, result, folder)
    return result


def _build_trainer(config: RunConfig, folder: pathlib.Path, recipe: str) -> Trainer:
    return Trainer(
        model=config.model.build,
        optimizer=build_optimizer(config.optimizer, config.steps),
        mesh=config.mesh.build(),
        engine=config.engine.build(),
        seed=config.seed,
        loggers=(ConsoleLogger(config.log_every), JsonlLogger(folder / "metrics.jsonl")),
        checkpoints=Checkpoints(folder / "checkpoints", overwrite=config.overwrite),
        settings={"recipe": recipe, **dataclasses.asdict(config)},
        profile=StepProfile.parse(config.profile_steps, folder / "profile")
        if config.profile_steps
        else None,
    )


def _check(config: RunConfig) -> None:
    vocab, context = getattr(config.model, "vocab", 256), getattr(config.model, "context", None)
    if vocab < 256:
        raise ValueError(f"--model.vocab must be at least 256 for bytes, got {vocab}")
    if context is not None and config.data.length > context:
        raise ValueError(
            f"--data.length is {config.data.length} bytes, but the model's --model.context is "
            f"{context}; make the one shorter or the other longer"
        )
    if config.engine.microbatches < 1:
        raise ValueError(
            f"--engine.microbatches must be at least 1, got {config.engine.microbatches}"
        )
    if config.sample.temperature < 0:
        raise ValueError(f"--sample.temperature must be 0 or more, got {config.sample.temperature}")
    if config.sample.length and not config.sample.prompt:
        raise ValueError("--sample.prompt needs at least one byte; or set --sample.length 0")
    rank_meshes(config.mesh.build())  # refuses more devices than there are
    if config.data.batch % config.engine.microbatches:
        raise ValueError(
            f"--data.batch {config.data.batch} does not divide into --engine.microbatches "
            f"{config.engine.microbatches}"
        )


# ---- the run's folder ---------------------------------------------------------------------------


def _run_folder(config: RunConfig, recipe: str) -> pathlib.Path:
    if config.run_dir is not None:
        return pathlib.Path(config.run_dir).expanduser().absolute()
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return pathlib.Path("runs", f"{recipe}-{now}").absolute()


def _claim(folder: pathlib.Path, *, overwrite: bool) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise FileExistsError(
                f"{folder} is not empty; choose another --run-dir, or say --overwrite to replace "
                "the run in it"
            )
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _write_config(
    folder: pathlib.Path, config: RunConfig, recipe: str, changed: Mapping[str, tuple[Any, Any]]
) -> None:
    record = {
        "recipe": recipe,
        "changed": {name: now for name, (_, now) in changed.items()},
        "config": dataclasses.asdict(config),
    }
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


# ---- what came of it ----------------------------------------------------------------------------


def _show_results(
    console: Console,
    config: RunConfig,
    trainer: Trainer,
    corpus: Corpus,
    result: FitResult,
    folder: pathlib.Path,
) -> None:
    loss = sum(result.losses[-10:]) / len(result.losses[-10:])
    last = f"last {min(10, len(result.losses))} steps"
    console.print(f"loss      {result.losses[0]:.3f} -> {loss:.3f} nats per byte ({last})")
    heldout = list(
        heldout_batches(
            corpus.heldout,
            batch=config.data.batch,
            length=config.data.length,
            limit=config.eval_batches,
        )
    )
    if config.eval_batches and not heldout:
        console.print("held out  nothing: the text is too short for a batch of it")
    if heldout:
        console.print(f"held out  {trainer.evaluate(heldout)['loss']:.3f} nats per byte")
    if config.sample.length:
        _show_sample(console, config, trainer)
    console.print(f"metrics     {folder / 'metrics.jsonl'}", markup=False)
    console.print(f"config      {folder / 'config.json'}", markup=False)
    console.print(f"checkpoint  {result.checkpoint}", markup=False)


def _show_sample(console: Console, config: RunConfig, trainer: Trainer) -> None:
    text = generate(
        trainer.model(),
        config.sample.prompt.encode(),
        length=config.sample.length,
        context=config.data.length,
        temperature=config.sample.temperature,
        seed=config.seed,
    )
    shown = text.decode(errors="replace")
    printable = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in shown
    )
    console.rule("sample") if console.is_terminal else console.print("--- sample ---")
    console.print(printable, markup=False)
    console.rule() if console.is_terminal else console.print("--------------")
