"""Compile the codes of a program with XLA: all of them, in parallel threads, before the first task runs.

In: codes and the device of each rank.  Out: one executable for each code.  Codes that lower to the same StableHLO for
the same device (equal stages of one rank) share one executable.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import numpy as np

from stagewright.pipelining.program import Code

Executable: TypeAlias = Callable[..., Sequence[jax.Array]]


def compile_codes(codes: Sequence[Code], devices: Sequence[Any]) -> tuple[Executable, ...]:
    """Compile every code for the device of its rank.

    Args:
      codes: the codes of a program.
      devices: one device a rank.
    """
    # Whether this thread has 64-bit numbers switched on; a pool's threads do not inherit it.
    wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

    def lower(code: Code) -> Any:
        with jax.enable_x64(wide):
            return _lower(code, devices[code.rank])

    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        lowered = list(pool.map(lower, codes))
        keys = [
            (_fingerprint(low), code.rank, code.donate)
            for low, code in zip(lowered, codes, strict=True)
        ]
        unique = dict(zip(keys, lowered, strict=True))
        compiled = dict(
            zip(unique, pool.map(lambda low: low.compile(), unique.values()), strict=True)
        )
    return tuple(compiled[key] for key in keys)


def _lower(code: Code, device: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    structs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in code.inputs]
    jitted = jax.jit(
        strongly_typed(code.function), donate_argnums=code.donate, out_shardings=sharding
    )
    return jitted.lower(*structs)


def strongly_typed(function: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """The function with results that carry no weak type, so that any task may read them."""

    def call(*args: Any) -> list[Any]:
        return [_strong(out) for out in function(*args)]

    return call


def _strong(out: Any) -> Any:
    array = jax.numpy.asarray(out)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def _fingerprint(lowered: Any) -> str:
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()
