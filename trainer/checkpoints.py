"""Checkpoints: the train state on disk, by parameter path and free of pipeline layout.

In: a `TrainState` whose leaves lie on any devices, each on its own.  Out: an Orbax checkpoint that
holds one array under each leaf's dotted name ("params.blocks.0.kernel"), and the way back, checked
name by name.  Names are strings here and turn into the tree's own keys on the way back, so that
integer keys stay integers.  Orbax is imported when the first checkpoint is written or read.

For now one checkpoint is written at the end of a run; writing in the background, every so many
steps, is not here yet.
"""

import logging
import os
import pathlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagewright.trainer.microbatches import leaf_names
from stagewright.trainer.state import TrainState


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where a run's checkpoints go, and whether older ones may be replaced.

    Attributes:
      directory: a folder; each checkpoint is a folder in it, named by its step.  A relative path is
        taken from the current directory.
      overwrite: delete the checkpoints that lie in `directory` when the run starts.
    """

    directory: str | os.PathLike[str]
    overwrite: bool = False

    @property
    def path(self) -> pathlib.Path:
        """The folder's absolute path."""
        return pathlib.Path(self.directory).expanduser().absolute()

    def prepare(self) -> None:
        """Make the folder, before the first step.

        Raises:
          FileExistsError: if it holds anything and `overwrite` is off.
        """
        if self.path.exists() and any(self.path.iterdir()):
            if not self.overwrite:
                raise FileExistsError(
                    f"{self.path} is not empty; choose another directory, or say overwrite=True to "
                    "replace the checkpoints in it"
                )
            with _manager(self.path) as manager:
                for step in manager.all_steps():
                    manager.delete(step)
        self.path.mkdir(parents=True, exist_ok=True)

    def save(self, state: TrainState) -> pathlib.Path:
        """Write a checkpoint and wait until it is complete.

        Args:
          state: the state; its own `step` names the checkpoint.

        Returns:
          The checkpoint's folder.

        Raises:
          OSError: if it cannot be written.
        """
        import orbax.checkpoint as ocp

        step = int(state.step)
        with _manager(self.path) as manager:
            arrays = {name: _storable(leaf) for name, leaf in _named(state).items()}
            if not manager.save(step, args=ocp.args.PyTreeSave(arrays)):
                raise OSError(f"Orbax did not write a checkpoint for step {step} to {self.path}")
        return self.path / str(step)


def restore(
    directory: str | os.PathLike[str], like: TrainState, step: int | None = None
) -> TrainState:
    """Read a checkpoint.

    Args:
      directory: the folder that holds the checkpoints.
      like: a state, or its shapes: what is wanted.
      step: which checkpoint; the latest by default.

    Returns:
      The state, its leaves as NumPy arrays (random keys as JAX's), the same bits that were saved.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if an array is missing, left over, or of another shape or dtype; by name.
    """
    import orbax.checkpoint as ocp

    path = pathlib.Path(directory).expanduser().absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint directory {path}")
    with _manager(path) as manager:
        chosen = manager.latest_step() if step is None else step
        if chosen not in manager.all_steps():
            raise FileNotFoundError(
                f"{path} holds no checkpoint of step {chosen}; it has steps {manager.all_steps()}"
            )
        wanted = _named(like)
        _check(dict(manager.item_metadata(chosen)), wanted, path / str(chosen))
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
        args = ocp.args.PyTreeRestore(restore_args=as_numpy)
        found = manager.restore(chosen, args=args)
    leaves = [_revived(found[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _manager(path: pathlib.Path) -> Any:
    """Orbax's manager of a folder; to be closed."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of what we check ourselves
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    return ocp.CheckpointManager(path, options=options, item_handlers=ocp.PyTreeCheckpointHandler())


def _named(state: TrainState) -> dict[str, Any]:
    """The state's leaves by dotted name, in order."""
    names = [name.removesuffix(".value") for name in leaf_names(state)]
    named = dict(zip(names, jax.tree.leaves(state), strict=True))
    assert len(named) == len(names), f"two leaves of the state share a name: {sorted(names)}"
    return named


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _revived(array: Any, leaf: Any) -> Any:
    if not _is_key(leaf):
        return array
    impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
    return jax.random.wrap_key_data(array, impl=impl)


def _check(saved: dict[str, Any], wanted: dict[str, Any], path: pathlib.Path) -> None:
    stored = {name: jax.eval_shape(_storable, leaf) for name, leaf in wanted.items()}
    wrong = [f"missing {name}" for name in stored if name not in saved]
    wrong += [f"left over {name}" for name in saved if name not in stored]
    for name in [name for name in stored if name in saved]:
        have, want = saved[name], stored[name]
        if (tuple(have.shape), np.dtype(have.dtype)) != (want.shape, want.dtype):
            wrong.append(
                f"{name} is {have.dtype}{list(have.shape)}, wanted {want.dtype}{list(want.shape)}"
            )
    if wrong:
        more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        listed = "\n  ".join(wrong[:8])
        raise ValueError(f"checkpoint {path} does not fit this run:\n  {listed}{more}")
