"""Create a state leaf by leaf, each on the device where it will live.

In: a pure function that makes a whole state, and a place for each leaf.  Out: the leaves.  The function is traced, not
run: each device evaluates, operation by operation, only what its own leaves need, and forgets what they do not need
any more, so the whole state never exists in one place.  Every operation is a program of its own, the same one on every
device, so the values do not depend on how the leaves are spread.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from stagewright.pipelining import jax_seams

Places = Sequence[Sequence[Sharding]]  # for each leaf, one sharding for each copy


def create(init: Callable[[], Any], places: Places, shardings: Sequence[Sharding]) -> Any:
    """Run `init`, each leaf where it belongs.

    Args:
      init: makes a pytree of arrays; no arguments.
      places: for each leaf, the sharding of each of its copies: one for each rank that reads it.
      shardings: for each leaf, the sharding that joins its copies.

    Returns:
      The pytree.
    """
    closed, out = jax.make_jaxpr(init, return_shape=True)()
    by_device: dict[Any, list[int]] = {}
    for i, copies in enumerate(places):
        for place in copies:
            by_device.setdefault(_first_device(place), []).append(i)
    made = {device: _evaluate(closed, wanted, device) for device, wanted in by_device.items()}
    leaves = [
        _join(
            [jax.device_put(made[_first_device(place)][i], place) for place in copies], shardings[i]
        )
        for i, copies in enumerate(places)
    ]
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def _first_device(sharding: Sharding) -> Any:
    devices: list[Any] = list(sharding.device_set)
    return min(devices, key=lambda device: device.id)


def _join(copies: Sequence[jax.Array], sharding: Sharding) -> jax.Array:
    if len(copies) == 1:
        placed: jax.Array = jax.device_put(copies[0], sharding)
        return placed
    parts = [shard.data for copy in copies for shard in copy.addressable_shards]
    return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, parts)


def _evaluate(closed: Any, wanted: Sequence[int], device: Any) -> dict[int, jax.Array]:
    """The wanted results, made on `device`."""
    parts = jax_seams.jaxpr_parts(closed)
    targets = {i: parts.outvars[i] for i in wanted}
    eqns, last = _needed(parts.eqns, list(targets.values()))
    env: dict[Any, Any] = dict(zip(parts.constvars, parts.consts, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if jax_seams.is_literal(atom) else env[atom]

    with jax.default_device(device):
        for position, eqn in enumerate(eqns):
            results = jax_seams.bind_equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
            for var in last.get(position, ()):
                env.pop(var, None)
        return {
            i: jax.device_put(jnp.array(read(atom), atom.aval.dtype), device)
            for i, atom in targets.items()
        }


def _needed(eqns: Sequence[Any], targets: Sequence[Any]) -> tuple[list[Any], dict[int, list[Any]]]:
    """The equations that the targets need, and after which of them each other variable may go."""
    needed = {atom for atom in targets if not jax_seams.is_literal(atom)}
    kept = []
    for eqn in reversed(eqns):
        if any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(atom for atom in eqn.invars if not jax_seams.is_literal(atom))
    kept.reverse()
    final = {atom for atom in targets if not jax_seams.is_literal(atom)}
    uses: dict[Any, int] = {}
    for position, eqn in enumerate(kept):
        for var in (*eqn.outvars, *eqn.invars):
            if not jax_seams.is_literal(var) and var not in final:
                uses[var] = position
    last: dict[int, list[Any]] = {}
    for var, position in uses.items():
        last.setdefault(position, []).append(var)
    return kept, last
