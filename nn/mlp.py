"""The feed-forward layer of a transformer block: GELU as in GPT, SwiGLU as in Llama.

Tensor parallelism is Megatron's: `up` and `gate` are split by columns, `down` by rows; one sum over
devices ends the layer.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stagewright.nn.axes import shard_activation
from stagewright.nn.linear import Initializer, Linear, lecun_normal


class MLP(nnx.Module):
    """Widen, bend, and narrow each position by itself.

    "gelu":    down(gelu(up(x)))           with the tanh approximation, as in GPT-2 and GPT-3
    "swiglu":  down(silu(gate(x)) * up(x))

    Parameters: `up` (and `gate`) [width, hidden], `down` [hidden, width], each a `Linear`.

    Reference: Hendrycks and Gimpel, "GELU", arXiv 1606.08415; Shazeer, "GLU Variants Improve
    Transformer", arXiv 2002.05202; Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Literal["gelu", "swiglu"] = "gelu",
        use_bias: bool = True,
        kernel_init: Initializer = lecun_normal,
        out_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the parameters.

        Args:
          width: size of the input's and the output's last dim.
          hidden: size of the dim between.
          activation: "gelu" or "swiglu".
          use_bias: whether the products add a bias.
          kernel_init: of `up` and `gate`; called with (key, shape, dtype).
          out_init: of `down`; None is `kernel_init`.
          dtype: dtype of the computation and the result; None promotes input and parameters.
          param_dtype: dtype of the parameters.
          rngs: streams; `params` is drawn from.

        Raises:
          ValueError: if the activation is not known.
        """
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"MLP knows the activations 'gelu' and 'swiglu', got {activation!r}")
        self.activation = activation
        options = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        into = {"axes": ("embed", "mlp"), "kernel_init": kernel_init, **options}
        self.up = Linear(width, hidden, **into)
        if activation == "swiglu":
            self.gate = Linear(width, hidden, **into)
        out_init = kernel_init if out_init is None else out_init
        self.down = Linear(hidden, width, axes=("mlp", "embed"), kernel_init=out_init, **options)

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        """Apply to each position: float[..., width] -> float[..., width]."""
        x = shard_activation(x, "embed")
        hidden = shard_activation(self.up(x), "mlp")
        if self.activation == "swiglu":
            hidden = jax.nn.silu(shard_activation(self.gate(x), "mlp")) * hidden
        else:
            hidden = jax.nn.gelu(hidden, approximate=True)
        return shard_activation(self.down(hidden), "embed", length="norm_length")
