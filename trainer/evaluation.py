"""Evaluation: a model's loss and metrics over held-out data, exact and without a trace in training.

In: a blueprint, the arrays of a model, batches of any size.  Out: sums over all tokens divided by
their number.  Forward only, in evaluation mode (no dropout), on one device: the arrays are copied
there when they lie elsewhere.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from stagewright.trainer.blueprint import Blueprint
from stagewright.trainer.step import check_loss


class Evaluator:
    """Evaluates models of one blueprint; compiles once for each shape of batch."""

    def __init__(self, blueprint: Blueprint) -> None:
        """Set up; nothing is compiled yet.

        Args:
          blueprint: what the models are.
        """

        def sums(params: nnx.State, rest: nnx.State, batch: Any) -> Any:
            return check_loss(blueprint.merge(params, rest, training=False).loss(batch))

        self._sums = jax.jit(sums)

    def __call__(
        self, params: nnx.State, rest: nnx.State, batches: Iterable[Any]
    ) -> dict[str, float]:
        """Evaluate.

        Args:
          params: parameters, all on one device.
          rest: the model's other Variables, on the same device.
          batches: batches, each as the model's `loss` takes it; sizes may differ.

        Returns:
          `loss` per token, `tokens`, and each of the model's metrics per token.

        Raises:
          ValueError: if there is no batch, or no token in any.
        """
        totals: dict[str, float] = {}
        for batch in batches:
            loss, count, metrics = self._sums(params, rest, batch)
            for name, value in {"loss": loss, "tokens": count, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + float(np.asarray(value))
        tokens = totals.pop("tokens", 0.0)
        if tokens == 0:
            raise ValueError("evaluation needs at least one batch with a token, got none")
        return {**{name: total / tokens for name, total in totals.items()}, "tokens": tokens}


def on_one_device(tree: Any, device: jax.Device) -> Any:
    """Copy a tree of arrays, wherever each of them lies, to one device; nothing is shared."""
    return jax.device_put(tree, device, may_alias=False)
