"""Dropout: zero a random part of the activations while training."""

from flax import nnx


class Dropout(nnx.Dropout):
    """Zero each value with probability `rate`, scale the others by 1 / (1 - rate).

    It keeps its own stream of keys, forked from `rngs.dropout`.  `model.eval()` switches it off and
    `model.train()` on.  With rate 0 it keeps no stream, but forks all the same, so that what is
    made after it has the same initial weights at any rate.  For masks inside `layers` see
    `stagewright.nn.Layers`.

    Reference: Srivastava et al., JMLR 15 (2014); flax.nnx.Dropout, whose `__call__` this is:
    float[...] -> float[...].
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        """Keep the rate and fork a stream.

        Args:
          rate: probability with which a value is zeroed, from 0 to 1.
          rngs: streams; `dropout` is forked.

        Raises:
          ValueError: if the rate lies outside.
        """
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"Dropout expects a rate from 0 to 1, got {rate}")
        super().__init__(rate, rngs=rngs)
        if rate == 0.0:
            self.rngs = nnx.data(None)
