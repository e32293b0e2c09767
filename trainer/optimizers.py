"""From an `OptimizerConfig` to an Optax transformation."""

import jax
import optax

from stagewright.trainer.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Build AdamW with clipping and a schedule counted in updates.

    Args:
      config: the numbers.
      steps: updates of the whole run: where the cosine ends.

    Returns:
      The transformation; its state shows the learning rate of the latest update, which the step
      reports.

    Raises:
      ValueError: if a number is out of range.
    """
    _check(config, steps)
    warmup = min(config.warmup_steps, steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_fraction,
    )
    learning_rate = optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=schedule)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.scale_by_adam(b1=config.b1, b2=config.b2),
        optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
        learning_rate,
    )


def _is_matrix(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _check(config: OptimizerConfig, steps: int) -> None:
    for name, low, high in (
        ("learning_rate", 0.0, float("inf")),
        ("warmup_steps", 0, float("inf")),
        ("final_fraction", 0.0, 1.0),
        ("b1", 0.0, 1.0),
        ("b2", 0.0, 1.0),
        ("weight_decay", 0.0, float("inf")),
        ("clip_norm", 0.0, float("inf")),
    ):
        if not low <= getattr(config, name) <= high:
            raise ValueError(
                f"optimizer.{name} must be {low} to {high}, got {getattr(config, name)}"
            )
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
