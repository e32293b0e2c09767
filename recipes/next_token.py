"""The loss of a language model: cross-entropy of each next token, with the hits beside it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stagewright import nn


def next_token_loss(
    logits: Float[Array, "batch seq vocab"], batch: Mapping[str, jax.Array]
) -> tuple[Float[Array, ""], Float[Array, ""], Mapping[str, jax.Array]]:
    """Return the cross-entropy in nats, summed, the number of tokens, and the hits.

    Args:
      logits: float[batch, seq, vocab], of each position's next token.
      batch: `targets`, int32[batch, seq]; `mask`, bool[batch, seq], optional: which of them count.
    """
    targets, mask = batch["targets"], batch.get("mask")
    total, count = nn.token_cross_entropy(logits, targets, mask)
    hits = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    correct = jnp.sum(hits if mask is None else hits * mask.astype(jnp.float32))
    return total, count, {"accuracy": correct}
