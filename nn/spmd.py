"""The SPMD pipeline: all stages at once, as one program that rotates activations over a mesh axis.

In: equal layers with their states stacked, and a batch of activations.  Out: what the layers make
of it.  Stage s of every repeat lies on part s of the mesh axis `pipe`; a scan over ticks runs all
stages side by side under `jax.vmap`, each on another micro-batch, and then hands every stage's
result to the next one by a rotation, which XLA makes a collective permute.  In the ticks that fill
and drain the pipeline, stages without a micro-batch compute on what happens to lie there, and
nobody reads it.

    tick          0    1    2    3    4    5
    stage 0      m0   m1   m0'  m1'  -    -        two micro-batches, two repeats (' is the second)
    stage 1      -    m0   m1   m0'  m1'  -

This is the baseline that an MPMD pipeline is measured against; `SpmdEngine` runs it.

Reference:
  Xu et al., "GSPMD", arXiv 2105.04663, section 3.3 (vectorised stages, shifted by a rotation);
  circular repeats and streamed inputs as in Praxis and MaxText.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

_WEIGHTS = "spmd_weights"

# An `SpmdPlan`, or None.  JAX's caches know of it, as of `bind_axes`.
_plan: Any = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True, slots=True)
class SpmdPlan:
    """How `Layers` are to be run as an SPMD pipeline.

    Attributes:
      stages: parts of the mesh axis `pipe`.
      repeat: how often the pipeline goes round: each part holds so many runs of layers.
      microbatches: parts that the batch is cut into; a multiple of `stages`.
      mesh: the abstract mesh, with an axis `pipe`.
    """

    stages: int
    repeat: int
    microbatches: int
    mesh: Any


@contextlib.contextmanager
def run_layers_as_spmd(plan: SpmdPlan) -> Iterator[None]:
    """Within, `Layers` run as an SPMD pipeline.  For engines, around tracing."""
    with _plan(plan):
        yield


def spmd_plan() -> SpmdPlan | None:
    """The plan that layers are traced under, if any."""
    plan: SpmdPlan | None = _plan.value
    return plan


def run_pipelined(
    call: Callable[[Any, Any, Any], Any],
    stacked: Any,
    numbers: jax.Array,
    carry: Any,
    plan: SpmdPlan,
) -> Any:
    """Run stacked layers as an SPMD pipeline.

    Args:
      call: (layer's state, layer's number, carry) -> carry.
      stacked: pytree of arrays [layers, ...].
      numbers: uint32[layers]: told to `call`, plus a multiple of 2**16 that differs by micro-batch.
      carry: pytree of arrays [batch, ...].
      plan: how.

    Raises:
      ValueError: if the layers do not divide into stages, the batch into micro-batches, or the
        micro-batches by the stages.
    """
    _check(numbers.shape[0], carry, plan)
    per_stage = numbers.shape[0] // (plan.stages * plan.repeat)
    shape = (plan.repeat, plan.stages, per_stage)
    weights = jax.tree.map(
        lambda leaf: _on_pipe(leaf.reshape(*shape, *leaf.shape[1:]), plan, dim=1),
        (stacked, numbers),
    )
    columns = plan.microbatches // plan.stages
    stream = jax.tree.map(
        lambda leaf: _on_pipe(leaf.reshape(plan.stages, columns, -1, *leaf.shape[1:]), plan), carry
    )
    return _Pipeline(call, weights, plan).run(stream)


def _check(num_layers: int, carry: Any, plan: SpmdPlan) -> None:
    if num_layers % (plan.stages * plan.repeat):
        raise ValueError(
            f"an SPMD pipeline has equal stages: {num_layers} layers do not divide into "
            f"{plan.stages} stages x {plan.repeat} repeats; change the depth, pipe or repeat, or "
            "use MpmdEngine"
        )
    if plan.microbatches % plan.stages:
        raise ValueError(
            f"an SPMD pipeline streams its input over its stages: {plan.microbatches} "
            f"micro-batches are not a multiple of {plan.stages} stages"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        if leaf.ndim == 0 or leaf.shape[0] % plan.microbatches:
            raise ValueError(
                "an SPMD pipeline cuts what its layers pass on into micro-batches, but "
                f"carry{jax.tree_util.keystr(path)} of shape {leaf.shape} does not divide into "
                f"{plan.microbatches} along its first dim; use another batch size, or MpmdEngine"
            )


def _on_pipe(leaf: jax.Array, plan: SpmdPlan, dim: int = 0) -> jax.Array:
    """Constrain one dim to lie over `pipe`; the others are as XLA likes."""
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * leaf.ndim
    entries[dim] = "pipe"
    sharding = NamedSharding(plan.mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(leaf, sharding)


class _Pipeline:
    """The loop over ticks.  Arrays named `by_stage` are [stages, micro-batch, ...]."""

    def __init__(self, call: Callable[[Any, Any, Any], Any], weights: Any, plan: SpmdPlan) -> None:
        self._call = call
        self._weights = weights
        self._plan = plan
        self._stage = jnp.arange(plan.stages, dtype=jnp.int32)

    def run(self, stream: Any) -> Any:
        """Stream [stages, columns, micro-batch, ...] in and out; returns [batch, ...]."""
        plan = self._plan
        inputs = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:, 0]), stream)
        stored = None
        if plan.repeat > 1:
            stored = jax.tree.map(
                lambda leaf: jnp.zeros(
                    (plan.stages, plan.microbatches, *leaf.shape[1:]), leaf.dtype
                ),
                inputs,
            )
        ticks = jnp.arange(plan.microbatches * plan.repeat + plan.stages - 1, dtype=jnp.int32)
        (_, stream, _), _ = jax.lax.scan(self._tick, (inputs, stream, stored), ticks)
        return jax.tree.map(self._in_order, stream)

    def _tick(self, state: Any, tick: jax.Array) -> tuple[Any, None]:
        inputs, stream, stored = state
        plan = self._plan
        column = tick % (plan.microbatches // plan.stages)
        arriving = jax.tree.map(lambda leaf: _take(leaf, column), stream)
        fresh = arriving
        if stored is not None:
            again = jax.tree.map(lambda leaf: _take(leaf, tick % plan.microbatches), stored)
            fresh = _where(tick < plan.microbatches, arriving, again)
        outputs = self._run_stages(_where(self._is(0), fresh, inputs), tick)
        rotated = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), outputs)
        leaving = jax.tree.map(lambda leaf: jnp.roll(leaf, -1, axis=0), arriving)
        leaving = _where(self._is(plan.stages - 1), outputs, leaving)
        stream = jax.tree.map(lambda leaf, new: _put(leaf, new, column), stream, leaving)
        if stored is not None:
            made = (tick - plan.stages + 1) % plan.microbatches
            stored = jax.tree.map(lambda leaf, new: _put(leaf, new, made), stored, rotated)
        return (rotated, stream, stored), None

    def _run_stages(self, by_stage: Any, tick: jax.Array) -> Any:
        """Each stage on its own micro-batch, with the weights of the repeat that it is in."""
        plan = self._plan
        ago = tick - self._stage
        repeat = jnp.clip(ago // plan.microbatches, 0, plan.repeat - 1)
        microbatch = (ago % plan.microbatches).astype(jnp.uint32)

        def stage(weights: Any, repeat: Any, microbatch: Any, carry: Any) -> Any:
            own, numbers = jax.tree.map(
                lambda leaf: checkpoint_name(_pick(leaf, repeat), _WEIGHTS), weights
            )
            numbers = numbers + microbatch * jnp.uint32(2**16)

            def layer(carry: Any, part: Any) -> tuple[Any, None]:
                return self._call(part[0], part[1], carry), None

            return jax.lax.scan(layer, carry, (own, numbers))[0]

        # A stage's weights are picked again in the backward pass, not kept for every tick.
        policy = jax.checkpoint_policies.save_anything_except_these_names(_WEIGHTS)
        kept = jax.checkpoint(stage, policy=policy, prevent_cse=False) if plan.repeat > 1 else stage
        mapped = jax.vmap(kept, in_axes=(1, 0, 0, 0), spmd_axis_name="pipe")
        return mapped(self._weights, repeat, microbatch, by_stage)

    def _is(self, stage: int) -> jax.Array:
        return self._stage == stage

    def _in_order(self, stream: jax.Array) -> jax.Array:
        """Undo the rotation of the columns and join the micro-batches."""
        ordered = jnp.roll(stream, 1 - self._plan.stages, axis=1)
        return ordered.reshape(-1, *ordered.shape[3:])


def _pick(leaf: jax.Array, index: jax.Array) -> jax.Array:
    """leaf[index]; without an index there is only one."""
    if leaf.shape[0] == 1:
        return leaf[0]
    return jax.lax.dynamic_index_in_dim(leaf, index, axis=0, keepdims=False)


def _take(leaf: jax.Array, column: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, column, axis=1, keepdims=False)


def _put(leaf: jax.Array, new: jax.Array, column: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, new, column, axis=1)


def _where(condition: jax.Array, chosen: Any, other: Any) -> Any:
    """Choose by a scalar or by stage."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(
            condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b
        )

    return jax.tree.map(pick, chosen, other)
