"""Normalisation over the last dim.

Both layers compute in float32 whatever comes in, and give back the input's dtype unless told
otherwise, so that a bfloat16 residual stream stays bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stagewright.nn.axes import AxisName, axes_metadata


class LayerNorm(nnx.LayerNorm):
    """Subtract the mean, divide by the standard deviation, scale and shift.

    Parameters: `scale` [width] and `bias` [width], named `axes`.

    Reference: Ba et al., "Layer Normalization", arXiv 1607.06450; computed by flax.nnx.LayerNorm,
    with the variance as the mean of squared distances (safe where the mean is large).
    """

    def __init__(
        self,
        width: int,
        *,
        axes: Sequence[AxisName] = ("embed",),
        epsilon: float = 1e-5,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the parameters.

        Args:
          width: size of the last dim.
          axes: the logical name of that dim.
          epsilon: added to the variance.
          use_bias: whether to shift.
          dtype: dtype of the result; None is the input's.
          param_dtype: dtype of the parameters.
          rngs: streams; none of the parameters is random.
        """
        super().__init__(
            width,
            epsilon=epsilon,
            use_bias=use_bias,
            use_fast_variance=False,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            scale_metadata=axes_metadata(axes),
            bias_metadata=axes_metadata(axes),
            rngs=rngs,
        )
        self.result_dtype = dtype

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "... width"]
    ) -> Float[Array, "... width"]:
        """Normalise: float[..., width] -> float[..., width]."""
        return super().__call__(x).astype(self.result_dtype or x.dtype)


class RMSNorm(nnx.RMSNorm):
    """Divide by the root of the mean square, and scale.

    Parameters: `scale` [width], named `axes`.

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467;
    computed by flax.nnx.RMSNorm.
    """

    def __init__(
        self,
        width: int,
        *,
        axes: Sequence[AxisName] = ("embed",),
        epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the parameters.

        Args:
          width: size of the last dim.
          axes: the logical name of that dim.
          epsilon: added to the mean square.
          dtype: dtype of the result; None is the input's.
          param_dtype: dtype of the parameters.
          rngs: streams; the parameters are not random.
        """
        super().__init__(
            width,
            epsilon=epsilon,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            scale_metadata=axes_metadata(axes),
            rngs=rngs,
        )
        self.result_dtype = dtype

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "... width"]
    ) -> Float[Array, "... width"]:
        """Normalise: float[..., width] -> float[..., width]."""
        return super().__call__(x).astype(self.result_dtype or x.dtype)
