"""Every place where JAX's versions differ, or where only a private name will do.

The rest of the project sees traced programs through these functions alone: JAX 0.10 keeps constants in `ClosedJaxpr`
and describes a scan by counts, JAX 0.12 keeps them in `Jaxpr` and describes a scan by trees.  Nothing here has an
opinion about pipelines.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh

Equation = core.JaxprEqn


@dataclass(frozen=True, slots=True)
class JaxprParts:
    """A jaxpr taken apart: variables are JAX's own objects, compared by identity."""

    constvars: tuple[Any, ...]
    consts: tuple[Any, ...]
    invars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    outvars: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ScanParts:
    """A scan equation taken apart: operands are consts, then carry, then scanned-over arrays."""

    body: Any
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def jaxpr_parts(jaxpr: Any) -> JaxprParts:
    """Take a `Jaxpr` or `ClosedJaxpr` of any supported version apart."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = tuple(getattr(jaxpr, "consts", None) or ())
    return JaxprParts(
        tuple(inner.constvars), consts, tuple(inner.invars), tuple(inner.eqns), tuple(inner.outvars)
    )


def scan_parts(eqn: Equation) -> ScanParts:
    """Take a `scan` equation apart."""
    params = eqn.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].unpack()
        num_consts, num_carry = len(consts), len(carry)
    return ScanParts(
        params["jaxpr"],
        num_consts,
        num_carry,
        params["length"],
        params["reverse"],
        params["unroll"],
    )


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal."""
    return isinstance(atom, core.Literal)


def is_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr."""
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def bind_equation(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on `operands` (arrays or tracers), as JAX's own evaluator does."""
    subfuns, params = _bind_params(eqn)
    with (
        source_info_util.user_context(
            eqn.source_info.traceback,
            name_stack=source_info_util.current_name_stack() + eqn.source_info.name_stack,
        ),
        eqn.ctx.manager,
    ):
        out = eqn.primitive.bind(*subfuns, *operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind_params(eqn: Equation) -> tuple[list[Any], dict[str, Any]]:
    found = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(found, tuple):
        return list(found[0]), found[1]
    return [], found


def abstract_mesh(**axes: int) -> AbstractMesh:
    """A mesh without its devices; its axes are for XLA to propagate along (JAX 0.12's default is not).

    Args:
      axes: sizes by name, the slowest first.
    """
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_mesh(devices: Any, axes: Sequence[str]) -> Mesh:
    """The mesh of an array of devices, one dim for each axis name."""
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def source_line(eqn: Equation) -> str:
    """Where the user's code made this equation: "file.py:12 (function)"."""
    return source_info_util.summarize(eqn.source_info)


@contextlib.contextmanager
def count_compilations() -> Iterator[Callable[[], int]]:
    """Count XLA compilations inside the context; yields a function that tells how many so far."""
    counted = [0]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            counted[0] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: counted[0]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def evaluate_jaxpr(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr with other constants than its own."""
    parts = jaxpr_parts(jaxpr)
    env: dict[Any, Any] = dict(
        zip((*parts.constvars, *parts.invars), (*consts, *args), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in parts.eqns:
        results = bind_equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [
        jnp.asarray(read(atom), atom.aval.dtype) if is_literal(atom) else read(atom)
        for atom in parts.outvars
    ]


def shaped_array(struct: jax.ShapeDtypeStruct) -> Any:
    """The abstract value that an abstract-evaluation rule returns."""
    return jax.core.ShapedArray(struct.shape, struct.dtype)
