"""The shape of a GPT, as plain data; `gpt.py` has the model.

Kept apart so that recipes and the command line's help need no JAX.
"""

from dataclasses import dataclass
from typing import Any, Literal

from stagewright.trainer.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A GPT in GPT-3's style: pre-norm, learned positions, GELU, tied head."""

    vocab: int = 256
    """Different tokens; 256 for bytes."""

    context: int = 128
    """Longest sequence, tokens."""

    width: int = 128
    """Size of the residual stream."""

    depth: int = 4
    """Layers."""

    heads: int = 4
    """Attention heads; width divides by them."""

    dropout: float = 0.0
    """Share of activations dropped in training, 0 to 1."""

    remat: Literal["none", "full", "dots"] = "none"
    """What a layer recomputes in its backward pass: nothing, all, or all but its products."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What layers compute in; parameters, norms' statistics and the loss stay in float32."""

    def build(self, rngs: Any) -> Any:
        """Make the model.

        Raises:
          ValueError: if the width does not divide by the heads.
        """
        from stagewright.recipes.gpt import GPT

        return GPT(self, rngs=rngs)
