"""Stage marks: the one thing a model says about pipelining.

`pipeline_yield` is the identity on any pytree.  It leaves a mark in the traced program, "a stage may end here", and
differentiating it leaves the matching mark in the backward pass.  How many stages there are, where they run and in
what order is not said here: `stagewright.pipelining` reads the marks and decides.
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")

source_info_util.register_exclusion(__file__)  # messages name the user's line, not ours

# Operands: any number of arrays.  Parameters: `mark`, the identity of the forward mark (its backward twin carries the
# same number); `forward`, False for the mark that transposition makes.
pipeline_yield_p = Primitive("pipeline_yield")
pipeline_yield_p.multiple_results = True

_marks = itertools.count()


def pipeline_yield(tree: Tree) -> Tree:
    """Mark the end of a pipeline stage; return `tree` unchanged.

    The arrays in `tree` are what the next stage is handed.  Values that later stages read without passing them
    through a mark (a skip connection) are found by data flow and sent straight to their readers, so listing them
    here is allowed but never needed.  Leaves that are not arrays (`None`, strings, Python numbers and flags) stay
    static and come back as they are.

    Args:
      tree: any pytree with at least one array leaf, of any shapes and dtypes (integers, booleans and PRNG keys too).

    Returns:
      The same tree.

    Raises:
      ValueError: if no leaf is an array: there would be nothing to hand to the next stage.

    Example:
      >>> import jax.numpy as jnp
      >>> float(pipeline_yield(jnp.float32(2.0)))
      2.0

    Reference:
      Xhebraj et al., "Scaling Deep Learning Training with MPMD Pipeline Parallelism", arXiv 2412.14374, section 3.1.
    """
    leaves, treedef = jax.tree.flatten(tree)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
    if not positions:
        raise ValueError(
            f"pipeline_yield expects at least one array to hand to the next stage, got {treedef} without any; "
            "mark the activations, not the settings"
        )
    marked = pipeline_yield_p.bind(*(leaves[i] for i in positions), mark=next(_marks), forward=True)
    for i, value in zip(positions, marked, strict=True):
        leaves[i] = value
    return jax.tree.unflatten(treedef, leaves)


def _identity(*values: Any, **_: Any) -> list[Any]:
    return list(values)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    primals_out = pipeline_yield_p.bind(*primals, **params)
    return primals_out, _bind_nonzero(tangents, **params)


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    del operands
    return _bind_nonzero(cotangents, **{**params, "forward": False})


def _bind_nonzero(values: Sequence[Any], **params: Any) -> list[Any]:
    """Mark the values that are not symbolic zeros; leave the zeros symbolic."""
    positions = [i for i, value in enumerate(values) if not isinstance(value, ad.Zero)]
    out = list(values)
    if positions:
        marked = pipeline_yield_p.bind(*(values[i] for i in positions), **params)
        for i, value in zip(positions, marked, strict=True):
            out[i] = value
    return out


def _batch(
    values: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], Sequence[Any]]:
    return pipeline_yield_p.bind(*values, **params), dims


pipeline_yield_p.def_impl(_identity)
pipeline_yield_p.def_abstract_eval(_identity)
ad.primitive_jvps[pipeline_yield_p] = _jvp
ad.primitive_transposes[pipeline_yield_p] = _transpose
batching.primitive_batchers[pipeline_yield_p] = _batch
mlir.register_lowering(pipeline_yield_p, lambda ctx, *values, **params: list(values))
