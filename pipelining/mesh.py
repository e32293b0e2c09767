"""Meshes: how many devices, and which of them belong to which pipeline rank.

`MeshSpec` is what a user writes; `RankMeshes` is what it becomes on real devices: one `jax.sharding.Mesh` with the axes
`data` and `tensor` for each pipeline rank.  Which parts of a model go where is decided elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from stagewright.pipelining import jax_seams


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Sizes of the device mesh's axes.

    Attributes:
      pipe: pipeline ranks.
      data: data-parallel replicas of each rank.
      tensor: tensor-parallel devices of each replica.
      devices: ids of the devices to use, in mesh order (`pipe` varies slowest), or None for the first ones.

    Raises:
      ValueError: if a size is not positive, or `devices` does not fill the mesh or names one twice.
    """

    pipe: int = 1
    data: int = 1
    tensor: int = 1
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for axis in ("pipe", "data", "tensor"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {axis!r} must be a positive integer, got {size!r}")
        if self.devices is not None:
            if len(self.devices) != self.size:
                raise ValueError(
                    f"a mesh of pipe={self.pipe} x data={self.data} x tensor={self.tensor} needs {self.size} "
                    f"device ids, got {len(self.devices)}: {self.devices}"
                )
            if len(set(self.devices)) != len(self.devices):
                raise ValueError(f"each device may stand once in a mesh, got {self.devices}")

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.pipe * self.data * self.tensor


def rank_meshes(spec: MeshSpec, devices: Sequence[Any] | None = None) -> tuple[Mesh, ...]:
    """One mesh with axes ("data", "tensor") for each pipeline rank.

    Args:
      spec: the sizes.
      devices: the devices to choose from; `jax.devices()` by default.

    Raises:
      ValueError: if there are fewer devices than the mesh needs, or an id does not exist.
    """
    grid = _grid(spec, devices)
    return tuple(jax_seams.make_mesh(grid[rank], ("data", "tensor")) for rank in range(spec.pipe))


def whole_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> Mesh:
    """One mesh of all devices, with axes ("pipe", "data", "tensor"), for programs that span the ranks.

    Raises:
      ValueError: as `rank_meshes`.
    """
    return jax_seams.make_mesh(_grid(spec, devices), ("pipe", "data", "tensor"))


def _grid(spec: MeshSpec, devices: Sequence[Any] | None) -> Any:
    available = list(jax.devices() if devices is None else devices)
    chosen = np.array(_choose(spec, available), dtype=object)
    return chosen.reshape(spec.pipe, spec.data, spec.tensor)


def _choose(spec: MeshSpec, available: list[Any]) -> list[Any]:
    if spec.devices is None:
        if len(available) < spec.size:
            raise ValueError(
                f"a mesh of pipe={spec.pipe} x data={spec.data} x tensor={spec.tensor} needs {spec.size} devices, "
                f"but JAX sees {len(available)}; use a smaller mesh, or simulate devices on CPU with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={spec.size} set before JAX starts"
            )
        return available[: spec.size]
    by_id = {device.id: device for device in available}
    missing = [i for i in spec.devices if i not in by_id]
    if missing:
        raise ValueError(f"no device has the ids {missing}; JAX sees {sorted(by_id)}")
    return [by_id[i] for i in spec.devices]
