"""Loggers: where a run's numbers go.

A logger is told of the run once, of each step a step late, and of the end.  Values are Python
numbers by then.  `LoggerGroup` keeps a run going when one of them fails.  Here are the console and
the JSON-lines file, which need nothing that is not installed; `wandb_logger.py` has the third.
"""

import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stagewright.trainer.panel import startup_panel, step_line
from stagewright.trainer.run_info import RunInfo


@runtime_checkable
class Logger(Protocol):
    """What the Trainer asks of a logger."""

    def start(self, info: RunInfo) -> None:
        """Hear what the run is.  Called before the first step of every `fit`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's values.

        Args:
          step: number of the step, from 1.
          values: Python numbers by name: `loss` (per token), `grad_norm`, `tokens`, `skipped`,
            `learning_rate` where known, `step_seconds`, `tokens_per_second`, `bubble_planned`,
            `bubble` (0 to 1, where measured) and its parts `bubble_fill`, `bubble_drain`, ... by
            cause (`stagewright.pipelining.bubbles`), and the model's own metrics.
        """

    def close(self) -> None:
        """Write what is left.  Called at the end of every `fit`, however it ends."""


class ConsoleLogger:
    """Prints the start-up panel and a line every few steps; on a terminal also a progress bar.

    In a pipe there are plain lines only, each complete and flushed.
    """

    def __init__(self, every: int = 10, *, file: IO[str] | None = None) -> None:
        """Set up.

        Args:
          every: steps from one line to the next; the first and the last step always get one.
          file: where to print; standard output by default.

        Raises:
          ValueError: if `every` is not positive.
        """
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self._every = every
        self._console = Console(file=file, highlight=False)
        self._steps = (1, 1)
        self._progress: Progress | None = None

    def start(self, info: RunInfo) -> None:
        """Print the panel; start the bar on a terminal."""
        terminal = self._console.is_terminal
        self._console.print(startup_panel(info, framed=terminal), soft_wrap=not terminal)
        self._steps = (info.first_step, info.last_step)
        if terminal:
            self._start_bar()
        self._console.file.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print a line if it is time for one; move the bar."""
        first, last = self._steps
        if step % self._every == 0 or step in (first, last):
            self._console.print(step_line(step, last, values), soft_wrap=True, markup=False)
            self._console.file.flush()
        if self._progress is not None:
            done = step - first + 1
            loss = f"{values['loss']:.4f}"
            self._progress.update(self._progress.task_ids[0], completed=done, loss=loss)

    def close(self) -> None:
        """Take the bar down."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start_bar(self) -> None:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        loss = TextColumn("loss {task.fields[loss]}")
        self._progress = Progress(*columns, loss, console=self._console, transient=True)
        first, last = self._steps
        self._progress.add_task("", total=last - first + 1, loss="-")
        self._progress.start()


class JsonlLogger:
    """Appends one JSON object a step to a file: `{"step": 1, "loss": 5.54, ...}`.

    Each line is valid JSON and complete when the next step ends.  Numbers that are not finite are
    the strings "NaN", "Infinity" and "-Infinity", which Python's `float` reads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Set up.

        Args:
          path: the file; it and its folders are made at the start of the run.
        """
        self.path = pathlib.Path(path).expanduser().absolute()
        self._file: IO[str] | None = None

    def start(self, info: RunInfo) -> None:
        """Open the file."""
        del info
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        assert self._file is not None, "start() comes before log()"
        record = {"step": step, **{name: _json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LoggerGroup:
    """Hands everything to several loggers; one that fails is named once, and the run goes on.

    A logger that fails to start gets nothing more; one that fails later is tried again.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        """Set up.

        Args:
          loggers: whom to tell, in this order.
        """
        self._loggers = list(loggers)
        self._silent: set[int] = set()
        self._warned: set[int] = set()

    def start(self, info: RunInfo) -> None:
        """Tell all of the run."""
        self._silent.clear()
        for logger in self._loggers:
            if not self._try(logger, "at the start", partial(logger.start, info)):
                self._silent.add(id(logger))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all of a step."""
        for logger in self._loggers:
            if id(logger) not in self._silent:
                self._try(logger, f"at step {step}", partial(logger.log, step, values))

    def close(self) -> None:
        """Tell all of the end."""
        for logger in self._loggers:
            if id(logger) not in self._silent:
                self._try(logger, "at the end", logger.close)

    def _try(self, logger: Logger, when: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # any failure of a logger is less than the run
            if id(logger) not in self._warned:
                self._warned.add(id(logger))
                name, kind = type(logger).__name__, type(error).__name__
                message = f"{name} failed {when} ({kind}: {error}); training goes on"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            return False
        return True


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
