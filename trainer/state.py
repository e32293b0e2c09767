"""The train state: everything that a step changes, as one pytree of arrays.

What is not an array (the model's graph, the optimizer's functions) is not here: `step.py` holds it.
The state knows nothing of stages or devices; an engine decides where each leaf lives.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, the model's other state, the optimizer's memory, and how far the run is.

    Attributes:
      params: the model's `nnx.Param`s, by path.  A parameter with two names (tied weights) stands
        here once.
      rest: all other Variables of the model, by path: RNG keys and counts.  Steps read them and
        leave them as they are.
      opt_state: state of the Optax optimizer; it counts updates.
      step: int32 scalar, batches taken so far, those without a valid token included.
    """

    params: nnx.State
    rest: nnx.State
    opt_state: optax.OptState
    step: Any
