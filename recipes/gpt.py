"""The GPT of the GPT-3 recipes: pre-norm blocks, learned positions, GELU, and a tied head.

In: a `GPTConfig`.  Out: a `PipelinedModule` that any engine can train: each block is a possible
stage edge; the embedding goes to the first stage, the last norm and the loss to the last one, and
the token table is read by both.

Reference:
  Brown et al., "Language Models are Few-Shot Learners", arXiv 2005.14165, section 2.1; Radford et
  al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3 (initial weights).
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stagewright import nn
from stagewright.recipes.gpt_config import GPTConfig
from stagewright.recipes.next_token import next_token_loss


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Make the block.

        Args:
          config: the model's shape.
          rngs: streams; `params` and `dropout` are used.
        """
        width = config.width
        normal = nnx.initializers.normal(0.02)
        # The residual stream sums up 2 * depth results: smaller ones keep its variance in bounds.
        out = nnx.initializers.normal(0.02 / math.sqrt(2 * config.depth))
        dtype = jnp.dtype(config.dtype)
        inits: Any = {"kernel_init": normal, "out_init": out}
        self.attention_norm = nn.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nn.Attention(width, config.heads, dtype=dtype, rngs=rngs, **inits)
        self.mlp_norm = nn.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.mlp = nn.MLP(width, 4 * width, dtype=dtype, rngs=rngs, **inits)
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Run the block."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.PipelinedModule):
    """A decoder-only transformer."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Make the model.

        Args:
          config: its shape.
          rngs: streams; `params` and `dropout` are used.
        """
        dtype = jnp.dtype(config.dtype)
        self.embed = nn.Embed(config.vocab, config.width, dtype=dtype, rngs=rngs)
        self.positions = nn.PositionEmbed(config.context, config.width, dtype=dtype, rngs=rngs)
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)
        remat = None if config.remat == "none" else config.remat
        self.blocks = self.layers(
            lambda r: Block(config, rngs=r), config.depth, rngs=rngs, remat=remat
        )
        self.norm = nn.LayerNorm(config.width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
        """Return the logits of each position's next token."""
        x = self.dropout(self.embed(tokens) + self.positions(tokens.shape[1]))
        return self.embed.attend(self.norm(self.blocks(x)))

    def loss(
        self, batch: Mapping[str, jax.Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""], Mapping[str, jax.Array]]:
        """Return the cross-entropy in nats, summed, the number of tokens, and the hits.

        Args:
          batch: `inputs` and `targets`, int32[batch, seq]; `mask`, bool[batch, seq], optional:
            which targets count.
        """
        return next_token_loss(self(batch["inputs"]), batch)
