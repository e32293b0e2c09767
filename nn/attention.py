"""Self-attention: multi-head, grouped-query, causal or not, with rotary positions or none.

Tensor parallelism is Megatron's: the query, key and value products are split by columns (heads),
the output product by rows, so that each device attends over its own heads and one sum over devices
ends the layer.  The marks below say so, and nothing else here knows of it.

Legend: B batch, L length, D width, N query heads, K key/value heads, H head_dim.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from stagewright.nn.axes import shard, shard_activation
from stagewright.nn.linear import Initializer, Linear, lecun_normal


class Attention(nnx.Module):
    """Let each position read from those that it may see.

    Parameters: `query` [D, N*H], `key` and `value` [D, K*H], `out` [N*H, D], each a `Linear`.
    Scores and softmax are computed in float32, whatever the compute dtype.

    Reference: Vaswani et al., arXiv 1706.03762, section 3.2; Ainslie et al., "GQA", arXiv
    2305.13245; Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.  Computed by
    `jax.nn.dot_product_attention`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        rotary: Callable[..., jax.Array] | None = None,
        use_bias: bool = True,
        kernel_init: Initializer = lecun_normal,
        out_init: Initializer | None = None,
        implementation: Literal["xla", "cudnn"] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the parameters.

        Args:
          width: size of the input's and the output's last dim.
          num_heads: number of query heads.
          num_kv_heads: number of key and value heads, each read by num_heads / num_kv_heads query
            heads; None is `num_heads`.
          head_dim: size of each head; None is width / num_heads.
          causal: whether a position sees only itself and those before it.
          rotary: called as rotary(x_BLNH, positions) on queries and keys, see
            `stagewright.nn.Rotary`; None for models that add positions to the embeddings.
          use_bias: whether the four products add a bias.
          kernel_init: of query, key and value; called with (key, shape, dtype).
          out_init: of the output product; None is `kernel_init`.
          implementation: of `jax.nn.dot_product_attention`; "cudnn" is flash attention on GPUs.
          dtype: dtype of the computation and the result; None promotes input and parameters.
          param_dtype: dtype of the parameters.
          rngs: streams; `params` is drawn from.

        Raises:
          ValueError: if heads do not divide evenly; both numbers are given.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} kv heads")
        if head_dim is None and width % num_heads:
            raise ValueError(f"a width of {width} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = width // num_heads if head_dim is None else head_dim
        self.causal = causal
        self.rotary = rotary
        self.implementation = implementation
        options = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        into = {"kernel_init": kernel_init, **options}
        q_dim, kv_dim = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.query = Linear(width, q_dim, axes=("embed", "heads"), **into)
        self.key = Linear(width, kv_dim, axes=("embed", "kv_heads"), **into)
        self.value = Linear(width, kv_dim, axes=("embed", "kv_heads"), **into)
        out_init = kernel_init if out_init is None else out_init
        self.out = Linear(q_dim, width, axes=("heads", "embed"), kernel_init=out_init, **options)

    def __call__(
        self,
        x_BLD: Float[Array, "batch length width"],
        *,
        positions: Int[Array, "rows length"] | None = None,
        mask: Bool[Array, "rows heads length length"] | None = None,
    ) -> Float[Array, "batch length width"]:
        """Attend.

        Args:
          x_BLD: float[batch, length, width].
          positions: int32[batch or 1, length], for rotary embeddings; None counts from 0.
          mask: bool[batch or 1, heads or 1, length, length], True where the position of dim 2 may
            read from that of dim 3, beside the causal mask; for packed documents, say.

        Returns:
          float[batch, length, width].
        """
        x_BLD = shard_activation(x_BLD, "embed")
        q_BLNH = self._heads(self.query(x_BLD), self.num_heads, "heads")
        k_BLKH = self._heads(self.key(x_BLD), self.num_kv_heads, "kv_heads")
        v_BLKH = self._heads(self.value(x_BLD), self.num_kv_heads, "kv_heads")
        if self.rotary is not None:
            q_BLNH, k_BLKH = self.rotary(q_BLNH, positions), self.rotary(k_BLKH, positions)
        read_BLNH = jax.nn.dot_product_attention(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            mask=mask,
            is_causal=self.causal,
            implementation=self.implementation,
        )
        read_BLX = shard_activation(read_BLNH.reshape(*x_BLD.shape[:2], -1), "heads")
        return shard_activation(self.out(read_BLX), "embed", length="norm_length")

    def _heads(self, x_BLX: jax.Array, num_heads: int, name: str) -> jax.Array:
        split = x_BLX.reshape(*x_BLX.shape[:2], num_heads, self.head_dim)
        return shard(split, ("batch", "length", name, "head_dim"))
