"""One train step as a pure function, and the pure function that makes its first state.

In: a model's blueprint, an Optax optimizer and the way batches are cut.  Out: `init()` and
`step(state, batch)`, which an engine traces and runs.  The loop over micro-batches is
`accumulate_grads`; what stands around it here happens once a step: the mean over all tokens, the
gradient norm, the optimizer, and the choice to skip a batch without a token. Nothing here knows of
stages, devices or schedules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from stagewright.nn.axes import mark_axes, rebind_axes, shard
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.trainer.blueprint import Blueprint
from stagewright.trainer.microbatches import MicrobatchSplit
from stagewright.trainer.state import TrainState

Batch = Any  # a pytree of arrays
Metrics = dict[str, Any]  # scalar arrays

# What a step tells of itself; a model's own metrics take other names.
STEP_METRICS = ("loss", "grad_norm", "tokens", "skipped", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFunctions:
    """What an engine compiles.

    Attributes:
      init: makes the whole state.
      step: takes the state and a batch that was cut into micro-batches to the next state and the
        step's metrics.
    """

    init: Callable[[], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def build_train_functions(
    blueprint: Blueprint, optimizer: optax.GradientTransformation, split: MicrobatchSplit
) -> TrainFunctions:
    """Build `init` and `step`.

    The model's `loss(microbatch)` returns `(sum over tokens, number of tokens, metrics)`.  With
    sums running over all micro-batches of the batch, a step

    1. takes loss = sum of losses / number of tokens, and gradients of exactly that;
    2. hands these gradients to the optimizer once, so that it counts updates, clips by the norm of
       the whole gradient and never sees a micro-batch;
    3. reports each of the model's metrics as its sum / number of tokens.

    A batch without a token changes nothing but `state.step`: loss 0, `skipped` 1.  Random keys are
    folded with `state.step` and the micro-batch's index, so that masks differ between both and
    depend on nothing else.

    Args:
      blueprint: the model.
      optimizer: any Optax transformation; where it was built with `optax.inject_hyperparams`, its
        `learning_rate` is reported.
      split: how batches were cut.

    Returns:
      The two functions.  Metrics are scalars: `loss` (float32, per token), `grad_norm` (float32,
      before clipping), `tokens` (as the model counts them), `skipped` (int32, 0 or 1),
      `learning_rate` where known, the model's own.
    """

    def init() -> TrainState:
        params, rest = blueprint.init()
        return TrainState(
            params=params,
            rest=rest,
            opt_state=optimizer.init(params),
            step=jnp.zeros((), jnp.int32),
        )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        (losses, counts, sums), grads = _accumulate(blueprint, split, state, batch)
        count = jnp.sum(counts)
        metrics, grads = _mean_over_tokens(losses, count, sums, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = _keep_unless(
            count > 0, (params, opt_state), (state.params, state.opt_state)
        )
        metrics.update(_learning_rate(opt_state))
        return TrainState(
            params=params, rest=state.rest, opt_state=opt_state, step=state.step + 1
        ), metrics

    return TrainFunctions(init=init, step=step)


def _accumulate(
    blueprint: Blueprint, split: MicrobatchSplit, state: TrainState, batch: Batch
) -> Any:
    """Losses, counts and metrics stacked [microbatches], and the gradients of the losses' sum.

    With several data-parallel replicas each takes its share of every micro-batch, and their
    gradients are summed once, behind the loop.
    """

    def share_grads(share: Batch, index: Any) -> Any:
        rest = _fold_keys(state.rest, state.step, index)

        def total(params: nnx.State) -> Any:
            model = blueprint.merge(mark_axes(params), rest, training=True)
            before = _carried(model)
            loss, count, metrics = check_loss(model.loss(share))
            _refuse_changes(before, _carried(model))
            loss, count, metrics = jax.tree.map(lambda x: shard(x, ()), (loss, count, metrics))
            return loss, (count, metrics)

        (loss, (count, metrics)), grads = jax.value_and_grad(total, has_aux=True)(state.params)
        return (loss, count, metrics), grads

    def microbatch_grads(item: tuple[Batch, Any]) -> Any:
        microbatch, index = item
        if split.data_size == 1:
            return share_grads(microbatch, index)
        shares, axes = split.shares(microbatch)
        indices = index * split.data_size + jnp.arange(split.data_size, dtype=jnp.int32)
        mapped = jax.vmap(share_grads, in_axes=(axes, 0), spmd_axis_name="data")
        with rebind_axes(batch=None):
            return mapped(shares, indices)

    items = (batch, jnp.arange(split.microbatches, dtype=jnp.int32))
    values, grads = accumulate_grads(microbatch_grads, items, in_axes=(split.in_axes(batch), 0))
    if split.data_size == 1:
        return values, grads
    return jax.tree.map(lambda v: jnp.sum(v, axis=1), values), jax.tree.map(_sum_replicas, grads)


def _sum_replicas(grad: Any) -> Any:
    """Sum up [replicas, ...] in no narrower type than float32."""
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    return jnp.sum(grad, axis=0, dtype=wide).astype(grad.dtype)


def _mean_over_tokens(
    losses: Any, count: Any, sums: Mapping[str, Any], grads: Any
) -> tuple[Metrics, Any]:
    valid = count > 0
    denominator = jnp.where(valid, count, 1).astype(jnp.float32)

    def mean(stacked: Any) -> Any:
        return jnp.where(valid, jnp.sum(stacked.astype(jnp.float32)) / denominator, 0.0)

    def divide(grad: Any) -> Any:
        wide = jnp.promote_types(grad.dtype, jnp.float32)
        return (grad.astype(wide) / denominator.astype(wide)).astype(grad.dtype)

    grads = jax.tree.map(divide, grads)
    metrics = {"loss": mean(losses), "grad_norm": _global_norm(grads), "tokens": count}
    metrics["skipped"] = jnp.logical_not(valid).astype(jnp.int32)
    return {**metrics, **{name: mean(stacked) for name, stacked in sums.items()}}, grads


def _global_norm(grads: Any) -> Any:
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in jax.tree.leaves(grads)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _keep_unless(valid: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda after, before: jnp.where(valid, after, before), new, old)


def _learning_rate(opt_state: Any) -> Metrics:
    found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
    rates = [value for _, value in found if getattr(value, "shape", None) == ()]
    return {"learning_rate": rates[0]} if len(rates) == 1 else {}


# ---- the model's side ---------------------------------------------------------------------------


def check_loss(returned: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Check what a model's `loss` returned and give it back, with metrics as a dict.

    Raises:
      TypeError: if it is not `(scalar, scalar, mapping of scalars)`, or a metric takes one of
        `STEP_METRICS`' names.
    """
    if not (isinstance(returned, tuple) and len(returned) == 3):
        got = (
            f"{len(returned)} values"
            if isinstance(returned, tuple)
            else f"a {type(returned).__name__}"
        )
        raise TypeError(
            f"loss(batch) must return (sum over tokens, number of tokens, metrics), got {got}"
        )
    loss, count, metrics = returned
    metrics = {name: jnp.asarray(value) for name, value in (metrics or {}).items()}
    loss, count = jnp.asarray(loss), jnp.asarray(count)
    for name, value in {"sum over tokens": loss, "number of tokens": count, **metrics}.items():
        if value.shape != ():
            raise TypeError(
                f"loss(batch) must return scalars, but its {name!r} has shape {value.shape}; "
                "sum it up"
            )
    if taken := sorted(set(metrics) & set(STEP_METRICS)):
        raise TypeError(
            f"the metrics {taken} are the step's own; give the model's metrics other names"
        )
    return loss, count, metrics


def _fold_keys(rest: nnx.State, step: Any, index: Any) -> nnx.State:
    """The rest with every random key made this step's and this micro-batch's own."""

    def fold(key: Any) -> Any:
        return jax.random.fold_in(jax.random.fold_in(key, step), index)

    def replace(variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable
        keys = variable.get_value()
        folded = (
            fold(keys) if keys.ndim == 0 else jax.vmap(fold)(keys.reshape(-1)).reshape(keys.shape)
        )
        return variable.replace(folded)

    return jax.tree.map(replace, rest, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _carried(model: Any) -> dict[str, Any]:
    """Arrays that a step would have to carry on, by path: no parameters, no random streams."""
    state = nnx.state(
        model,
        lambda path, value: not isinstance(value, (nnx.Param, nnx.RngState, nnx.Intermediate)),
    )
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _refuse_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, leaf in before.items():
        if after.get(name) is not leaf:
            raise NotImplementedError(
                f"loss(batch) changes the model's Variable {name}, as batch statistics do; a step "
                "keeps parameters only, so the change would be lost: use a norm without running "
                "statistics, such as LayerNorm"
            )
