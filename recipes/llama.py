"""The Llama of the Llama 2 recipes: RMS norms, rotary positions, SwiGLU, grouped-query attention.

In: a `LlamaConfig`.  Out: a `PipelinedModule` that any engine can train: each block is a possible
stage edge; the embedding goes to the first stage, the last norm, the head and the loss to the last.

Reference:
  Touvron et al., "Llama 2", arXiv 2307.09288, section 2.2 and table 1; Ainslie et al., "GQA",
  arXiv 2305.13245.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stagewright import nn
from stagewright.recipes.llama_config import LlamaConfig
from stagewright.recipes.next_token import next_token_loss


class LlamaBlock(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Make the block.

        Args:
          config: the model's shape.
          rngs: streams; `params` is used.
        """
        width, dtype = config.width, jnp.dtype(config.dtype)
        options: Any = {
            "use_bias": False,
            "kernel_init": nnx.initializers.normal(0.02),
            "dtype": dtype,
            "rngs": rngs,
        }
        self.attention_norm = nn.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nn.Attention(
            width, config.heads, num_kv_heads=config.kv_heads, rotary=nn.Rotary(), **options
        )
        self.mlp_norm = nn.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.mlp = nn.MLP(width, config.hidden, activation="swiglu", **options)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Run the block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.PipelinedModule):
    """A decoder-only transformer."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Make the model.

        Args:
          config: its shape.
          rngs: streams; `params` is used.
        """
        width, dtype = config.width, jnp.dtype(config.dtype)
        self.embed = nn.Embed(config.vocab, width, dtype=dtype, rngs=rngs)
        remat = None if config.remat == "none" else config.remat
        self.blocks = self.layers(
            lambda r: LlamaBlock(config, rngs=r), config.depth, rngs=rngs, remat=remat
        )
        self.norm = nn.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = nn.Linear(
            width,
            config.vocab,
            axes=("embed", "vocab"),
            use_bias=False,
            kernel_init=nnx.initializers.normal(0.02),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
        """Return the logits of each position's next token."""
        x = self.norm(self.blocks(self.embed(tokens)))
        return nn.shard(self.head(x), ("batch", "length", "vocab"))

    def loss(
        self, batch: Mapping[str, jax.Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""], Mapping[str, jax.Array]]:
        """Return the cross-entropy in nats, summed, the number of tokens, and the hits.

        Args:
          batch: `inputs` and `targets`, int32[batch, seq]; `mask`, bool[batch, seq], optional:
            which targets count.
        """
        return next_token_loss(self(batch["inputs"]), batch)
