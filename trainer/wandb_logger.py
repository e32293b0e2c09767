"""Weights & Biases: a logger that never asks and never stops a run.

wandb is imported at the start of the run.  Without a key, and wherever `mode` says so, it writes
its files offline, to be sent later with `wandb sync`.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from stagewright.trainer.run_info import RunInfo


class WandbLogger:
    """Sends each step's values to Weights & Biases, or keeps them in local files without a key."""

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        directory: str | os.PathLike[str] = ".",
        mode: str | None = None,
    ) -> None:
        """Set up; nothing is imported yet.

        Args:
          project: name of the project.
          name: name of the run; wandb makes one up by default.
          directory: where wandb keeps its files.
          mode: "online", "offline" or "disabled"; by default online where a key is found, offline
            elsewhere.
        """
        self._project, self._name, self._mode = project, name, mode
        self._directory = pathlib.Path(directory).expanduser().absolute()
        self._run: Any = None

    def start(self, info: RunInfo) -> None:
        """Begin the run.

        Raises:
          ImportError: if wandb is not installed; the message says what to do.
        """
        try:
            import wandb
        except ImportError as error:
            raise ImportError("WandbLogger needs `pip install wandb`") from error
        if self._run is not None:
            return  # a further fit of the same Trainer continues the run
        self._directory.mkdir(parents=True, exist_ok=True)
        mode: Any = self._mode or ("online" if _has_key(wandb) else "offline")
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            dir=str(self._directory),
            mode=mode,
            config=dict(info.settings),
            settings=wandb.Settings(silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step's values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left and end the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _has_key(wandb: Any) -> bool:
    """Whether wandb can log in without asking anybody."""
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # an older wandb, which cannot be told not to ask
        return bool(wandb.api.api_key)
