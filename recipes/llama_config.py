"""The shape of a Llama, as plain data; `llama.py` has the model.

Kept apart so that recipes and the command line's help need no JAX.
"""

from dataclasses import dataclass
from typing import Any, Literal

from stagewright.trainer.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A Llama 2: pre-norm (RMS), rotary positions, SwiGLU, grouped-query attention, untied head."""

    vocab: int = 256
    """Different tokens; 256 for bytes."""

    context: int = 128
    """Longest sequence, tokens."""

    width: int = 128
    """Size of the residual stream."""

    hidden: int = 344
    """Size of the MLP's inner dim."""

    depth: int = 4
    """Layers."""

    heads: int = 4
    """Query heads; width divides by them."""

    kv_heads: int = 4
    """Heads of keys and values; heads divide by them."""

    remat: Literal["none", "full", "dots"] = "none"
    """What a layer recomputes in its backward pass: nothing, all, or all but its products."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What layers compute in; parameters, norms' statistics and the loss stay in float32."""

    def build(self, rngs: Any) -> Any:
        """Make the model.

        Raises:
          ValueError: if the width does not divide by the heads, or the heads by the kv heads.
        """
        from stagewright.recipes.llama import Llama

        return Llama(self, rngs=rngs)
