"""Tables: token embeddings, which may serve as the head too, and learned positions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stagewright.nn.axes import AxisName, axes_metadata, shard_activation
from stagewright.nn.linear import Initializer

normal: Initializer = nnx.initializers.normal(0.02)


class Embed(nnx.Embed):
    """Map token ids to vectors, and vectors back to one score a token (`attend`: a tied head).

    Parameters: `embedding` [vocab, width], named `axes`.

    Reference: flax.nnx.Embed.  Here the rows are cast after they are looked up, not the whole table
    before, so that gradients of rows that occur often are summed in the table's dtype.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        axes: Sequence[AxisName] = ("vocab", "embed"),
        embedding_init: Initializer = normal,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the table.

        Args:
          vocab: number of tokens.
          width: size of each vector.
          axes: logical names of the two dims.
          embedding_init: called with (key, shape, dtype); the default is GPT-2's.
          dtype: dtype of the vectors and of `attend`; None is the table's.
          param_dtype: dtype of the table.
          rngs: streams; `params` is drawn from.
        """
        super().__init__(
            vocab,
            width,
            embedding_init=embedding_init,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_metadata=axes_metadata(axes),
            rngs=rngs,
        )

    def __call__(  # type: ignore[override]
        self, tokens: Int[Array, "..."]
    ) -> Float[Array, "... width"]:
        """Look tokens up.

        Args:
          tokens: ids from 0 to vocab - 1; an id outside gives a vector of NaN, so that it shows.

        Returns:
          float[..., width], of `dtype`.

        Raises:
          ValueError: if `tokens` are not integers.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"Embed expects integer token ids, got {tokens.dtype}")
        rows = self.embedding[...].at[tokens]
        vectors = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return shard_activation(vectors.astype(self.dtype), "embed", length="norm_length")

    def attend(  # type: ignore[override]
        self, x: Float[Array, "... width"]
    ) -> Float[Array, "... vocab"]:
        """Score each token of the vocabulary: the product with the table's transpose.

        Args:
          x: float[..., width].

        Returns:
          float[..., vocab], of `dtype`: logits.

        Reference:
          Press and Wolf, "Using the Output Embedding to Improve Language Models", arXiv 1608.05859.
        """
        x, table = x.astype(self.dtype), self.embedding[...].astype(self.dtype)
        return shard_activation(jnp.einsum("...D,VD->...V", x, table), "vocab")


class PositionEmbed(nnx.Module):
    """A learned vector for each position, to be added to the token embeddings.

    Parameters: `embedding` [max_length, width], named `axes`.

    Reference: Vaswani et al., arXiv 1706.03762, section 3.5 (learned variant); GPT-2 and GPT-3.
    """

    def __init__(
        self,
        max_length: int,
        width: int,
        *,
        axes: Sequence[AxisName] = ("positions", "embed"),
        embedding_init: Initializer = normal,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the table.

        Args:
          max_length: number of positions.
          width: size of each vector.
          axes: logical names of the two dims.
          embedding_init: called with (key, shape, dtype).
          dtype: dtype of the vectors; None is the table's.
          param_dtype: dtype of the table.
          rngs: streams; `params` is drawn from.
        """
        table = embedding_init(rngs.params(), (max_length, width), param_dtype)
        self.embedding = nnx.Param(table, **axes_metadata(axes))
        self.dtype = dtype or param_dtype

    def __call__(self, length: int) -> Float[Array, "1 length width"]:
        """Return the vectors of the first `length` positions.

        Args:
          length: number of positions (a Python int: `tokens.shape[1]`).

        Returns:
          float[1, length, width], of `dtype`, ready to be added to a batch.

        Raises:
          ValueError: if the table has fewer positions.
        """
        max_length = self.embedding.shape[0]
        if length > max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {max_length} learned positions"
            )
        return jax.lax.slice_in_dim(self.embedding[...], 0, length)[None].astype(self.dtype)
