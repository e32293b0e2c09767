"""Rotary position embeddings: queries and keys turned by angles that grow with the position.

The product of a query at position m with a key at n then depends on m - n only.

Legend: B batch, L length, N heads, H head_dim.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, slots=True)
class Rotary:
    """Turn each pair (h, h + H/2) of a head's dims by position * base ** (-2h / H).

    The halves are paired, as in GPT-NeoX and the Hugging Face Llama; Meta's own Llama pairs
    neighbours, which is the same up to a permutation of the query's and the key's columns.

    Attributes:
      base: the longest wavelength is about 2 pi * base positions.

    Reference: Su et al., "RoFormer", arXiv 2104.09864, section 3.2; base of Touvron et al., Llama.
    """

    base: float = 10_000.0

    def __call__(
        self,
        x_BLNH: Float[Array, "batch length heads head_dim"],
        positions: Int[Array, "rows length"] | None = None,
    ) -> Float[Array, "batch length heads head_dim"]:
        """Turn queries or keys.

        Args:
          x_BLNH: queries or keys of any float dtype; turned in float32.
          positions: int32[batch, length] or [1, length]; None counts from 0.

        Returns:
          An array of the shape and dtype of `x_BLNH`.

        Raises:
          ValueError: if head_dim is odd.
        """
        length, head_dim = x_BLNH.shape[1], x_BLNH.shape[3]
        if head_dim % 2:
            raise ValueError(f"rotary embeddings turn pairs of dims, but head_dim is {head_dim}")
        if positions is None:
            positions = jnp.arange(length, dtype=jnp.int32)[None]
        angle_BL1h = self._angles(positions, head_dim)[:, :, None, :]
        cos, sin = jnp.cos(angle_BL1h), jnp.sin(angle_BL1h)
        left, right = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=3)
        turned = jnp.concatenate((left * cos - right * sin, right * cos + left * sin), axis=3)
        return turned.astype(x_BLNH.dtype)

    def _angles(
        self, positions: Int[Array, "rows length"], head_dim: int
    ) -> Float[Array, "rows length half"]:
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        frequencies = jnp.float32(self.base) ** -exponents
        return positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
