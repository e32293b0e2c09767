"""Losses as a sum and a count.

A mean taken for each micro-batch and averaged afterwards weighs a token by how few others its
micro-batch has.  So a loss is handed on as (sum over tokens, number of tokens), both are added up
over micro-batches and devices, and `token_mean` divides once, at the end.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


def token_cross_entropy(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | Num[Array, "*tokens"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the cross-entropy in nats, summed over tokens, and the number of tokens.

    Computed in float32 whatever the dtype of the logits.  The target's logit is found by comparing,
    not by indexing: its gradient is no scatter, and under a vocabulary split over devices it needs
    no exchange but a sum.

    Args:
      logits: float[..., vocab].
      targets: int[...], ids from 0 to vocab - 1.  Where the mask is 0 any value will do (-100,
        say); an id outside that counts gives NaN, so that it shows.
      mask: bool[...] or number[...], 0 for tokens that do not count, 1 for those that do; None
        counts all.  Other values weigh.

    Returns:
      total: float32[]; 0 if no token counts, with gradient 0.
      count: float32[], the sum of the mask; exact up to 2**24 tokens a call.

    Raises:
      ValueError: if the shapes do not fit.
    """
    if targets.shape != logits.shape[:-1] or (mask is not None and mask.shape != targets.shape):
        raise ValueError(
            "token_cross_entropy expects logits [..., vocab], targets [...] and a mask [...], got "
            f"{logits.shape}, {targets.shape}" + ("" if mask is None else f" and {mask.shape}")
        )
    weight = jnp.ones(targets.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    nats = jnp.where(weight != 0, _cross_entropy(logits.astype(jnp.float32), targets), 0.0)
    return jnp.sum(nats * weight), jnp.sum(weight)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    is_target = ids == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    in_range = (targets >= 0) & (targets < logits.shape[-1])
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(in_range, picked, jnp.nan)


def token_mean(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """Return total / count, or 0 where nothing was counted.

    Args:
      total: float32[], a loss summed over the tokens of a global batch.
      count: float32[], the number of those tokens.

    Returns:
      float32[]; never NaN for a count of 0, and neither is its gradient.
    """
    return total / jnp.where(count == 0, 1.0, count)
