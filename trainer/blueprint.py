"""A model before it exists: its graph, and pure functions to make its arrays and put them back.

In: the user's constructor, a seed and the layers of each stage.  Out: a `Blueprint`, made without
allocating one array. Training, evaluation and generation all get their models from here, so that
they cannot disagree on what the model is.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

MakeModel = Callable[[nnx.Rngs], Any]  # Any: an nnx.Module with `loss(batch)`


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model's graph for training and for evaluation, and the way to its arrays.

    Attributes:
      make: constructor of the model.
      seed: seed of all its random streams.
      layers_per_stage: how many layers each stage has, or None to leave the model's own marks as
        they are.
      graphdef: the graph in training mode.
      eval_graphdef: the graph in evaluation mode (no dropout).
      params: shapes and dtypes of the parameters, by path.
      rest: shapes and dtypes of all other Variables, by path.
    """

    make: MakeModel
    seed: int
    layers_per_stage: tuple[int, ...] | None
    graphdef: nnx.GraphDef[Any]
    eval_graphdef: nnx.GraphDef[Any]
    params: nnx.State
    rest: nnx.State

    def init(self) -> tuple[nnx.State, nnx.State]:
        """Make the parameters and the rest; the same seed gives the same bits for any stages."""
        _, params, rest = _split(_build(self.make, self.seed, self.layers_per_stage))
        return params, rest

    def merge(self, params: nnx.State, rest: nnx.State, *, training: bool) -> Any:
        """A model that holds these arrays, and shares no Variable with the states given."""
        return nnx.merge(self.graphdef if training else self.eval_graphdef, params, rest, copy=True)

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements; a tied one counts once."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def draw_blueprint(
    make: MakeModel, *, seed: int, layers_per_stage: Sequence[int] | None = None
) -> Blueprint:
    """Learn what a model is, without making its arrays.

    Args:
      make: constructor of the model, called with `nnx.Rngs(seed)`.
      seed: seed of all random streams.
      layers_per_stage: handed to the model's `set_stages`, or None to leave its marks alone.

    Raises:
      TypeError: if `make` does not return an NNX module with a method `loss`.
    """
    stages = None if layers_per_stage is None else tuple(layers_per_stage)
    model = abstract_model(make, seed=seed)
    if stages is not None:
        model.set_stages(stages)
    graphdef, params, rest = _split(model)
    model.eval()
    return Blueprint(
        make=make,
        seed=seed,
        layers_per_stage=stages,
        graphdef=graphdef,
        eval_graphdef=_split(model)[0],
        params=params,
        rest=rest,
    )


def abstract_model(make: MakeModel, *, seed: int) -> Any:
    """The model with shapes in place of arrays.

    Raises:
      TypeError: if `make` does not return an NNX module with a method `loss`.
    """
    if isinstance(make, nnx.Module) or not callable(make):
        raise TypeError(
            f"model must be a constructor, called with nnx.Rngs, got {type(make).__name__}; write "
            "model=lambda rngs: Net(rngs=rngs), so that parameters are born on their own stage"
        )
    if isinstance(make, type) and _wants_rngs_by_name(make):
        raise TypeError(
            f"model is called as model(rngs), but {make.__name__} takes rngs by name; write "
            f"model=lambda rngs: {make.__name__}(rngs=rngs)"
        )
    model = nnx.eval_shape(lambda: make(nnx.Rngs(seed)))
    if not isinstance(model, nnx.Module) or not callable(getattr(model, "loss", None)):
        raise TypeError(
            "the model constructor must return an nnx.Module with a method loss(batch) -> (sum "
            f"over tokens, number of tokens, metrics), got {type(model).__name__}"
        )
    return model


def _wants_rngs_by_name(make: type) -> bool:
    constructor: Any = vars(make).get(
        "__init__", make
    )  # a metaclass hides the class's own signature
    parameter = inspect.signature(constructor).parameters.get("rngs")
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _build(make: MakeModel, seed: int, layers_per_stage: tuple[int, ...] | None) -> Any:
    model = make(nnx.Rngs(seed))
    if layers_per_stage is not None:
        model.set_stages(layers_per_stage)
    return model


def _split(model: Any) -> tuple[nnx.GraphDef[Any], nnx.State, nnx.State]:
    parts: Any = nnx.split(model, nnx.Param, ...)
    graphdef, params, rest = parts
    return graphdef, params, rest
