"""Which part of an array each device of a rank holds.

In: logical axis names, shapes, rules and mesh sizes.  Out: a `PartitionSpec` for each array, checked, and shardings on
real meshes.  What a rank of one device holds is whole: it needs no spec and pays for none.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from stagewright.nn.axes import AxisNames, AxisRules
from stagewright.pipelining.mesh import MeshSpec


def make_spec(
    path: str, names: AxisNames, shape: Sequence[int], rules: AxisRules, mesh: MeshSpec
) -> PartitionSpec:
    """Bind one array's axis names to the mesh, and see that its dims divide.

    Args:
      path: what messages call the array.
      names: a logical name, or None, for each dim.
      shape: its shape.
      rules: from logical names to mesh axes.
      mesh: the sizes.

    Raises:
      ValueError: if a name has no rule, two dims claim one mesh axis, a rule names an axis that the mesh does not
        have, or a dim does not divide.
    """
    try:
        spec = rules.spec(names)
    except ValueError as error:
        raise ValueError(f"{path} with axes {names}: {error}") from None
    sizes = {"data": mesh.data, "tensor": mesh.tensor}
    for dim, (size, name, entry) in enumerate(zip(shape, names, spec, strict=True)):
        axes = _axes(entry)
        for axis in axes:
            if axis not in sizes:
                raise ValueError(
                    f"{path}: the rule for {name!r} names the mesh axis {axis!r}; a pipeline rank has {list(sizes)}"
                )
        over = math.prod(sizes[axis] for axis in axes)
        if size % over:
            raise ValueError(
                f"{path} of shape {tuple(shape)}: dim {dim} ({name!r}, size {size}) does not divide over "
                f"{' x '.join(f'{a}={sizes[a]}' for a in axes)}; change the size or the mesh, or bind {name!r} to "
                f"None with rules.replace({name}=None)"
            )
    return spec


def spread_over(spec: PartitionSpec, shape: Sequence[int], axis: str, size: int) -> PartitionSpec:
    """Split one more dim over a mesh axis: the largest that divides and is whole; the spec itself if there is none.

    Args:
      spec: of the array so far.
      shape: its shape.
      axis: name of the mesh axis.
      size: devices along it.

    Reference:
      Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5: state without copies.
    """
    used = {name for entry in spec for name in _axes(entry)}
    entries = [*spec, *([None] * (len(shape) - len(spec)))]
    free = [
        (length, -dim)
        for dim, (length, entry) in enumerate(zip(shape, entries, strict=True))
        if not _axes(entry) and length and length % size == 0
    ]
    if size == 1 or axis in used or not free:
        return spec
    dim = -max(free)[1]
    return PartitionSpec(*entries[:dim], axis, *entries[dim + 1 :])


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def sharding_on(mesh: Mesh, spec: PartitionSpec) -> Sharding:
    """The sharding of an array on one rank."""
    if mesh.size == 1:
        return SingleDeviceSharding(mesh.devices.flat[0])
    return NamedSharding(mesh, spec)


def whole_on(mesh: Mesh) -> Sharding:
    """The sharding of an array that every device of a rank holds whole."""
    return sharding_on(mesh, PartitionSpec())


def spec_of(sharding: Any) -> PartitionSpec:
    """The spec behind a sharding that XLA chose for a rank's result.

    Raises:
      ValueError: if the sharding has none.
    """
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    if len(sharding.device_set) == 1 or sharding.is_fully_replicated:
        return PartitionSpec()
    raise ValueError(f"XLA chose {sharding}, which is no partition of dims over mesh axes")


def trim(spec: PartitionSpec) -> PartitionSpec:
    """The spec without trailing whole dims."""
    entries = list(spec)
    while entries and not _axes(entries[-1]):
        entries.pop()
    return PartitionSpec(*entries)
