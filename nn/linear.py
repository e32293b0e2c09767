"""Products with a weight matrix, over the last dim."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from stagewright.nn.axes import AxisName, axes_metadata

Initializer: TypeAlias = Callable[..., jax.Array]

lecun_normal: Initializer = nnx.initializers.lecun_normal()
zeros: Initializer = nnx.initializers.zeros_init()


class Linear(nnx.Linear):
    """y = x W + b over the last dim: `nnx.Linear` whose parameters carry logical axis names.

    Parameters: `kernel` [in_dim, out_dim], named `axes`; `bias` [out_dim], named `axes[1:]`.

    Reference: flax.nnx.Linear, whose `__call__` this is: float[..., in_dim] -> float[..., out_dim].
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        axes: Sequence[AxisName],
        use_bias: bool = True,
        kernel_init: Initializer = lecun_normal,
        bias_init: Initializer = zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the parameters.

        Args:
          in_dim: size of the input's last dim.
          out_dim: size of the output's last dim.
          axes: logical names of the input and the output dim, as in ("embed", "mlp").
          use_bias: whether to add a bias.
          kernel_init: called with (key, shape, dtype).
          bias_init: called with (key, shape, dtype).
          dtype: dtype of the computation and of the result; None promotes input and parameters.
          param_dtype: dtype of the parameters.
          rngs: streams; `params` is drawn from.

        Raises:
          ValueError: if `axes` does not hold two names.
        """
        if len(axes) != 2:
            raise ValueError(f"Linear expects axes for (in_dim, out_dim), got {tuple(axes)}")
        super().__init__(
            in_dim,
            out_dim,
            use_bias=use_bias,
            kernel_init=kernel_init,
            bias_init=bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_metadata=axes_metadata(axes),
            bias_metadata=axes_metadata(axes[1:]),
            rngs=rngs,
        )
