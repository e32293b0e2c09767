"""`PipelinedModule`: the base class of models that can be cut into stages.

A model says where it may be cut, an engine says where it is.  The model makes its layers with
`self.layers(...)`, and each place between two of them is a possible stage edge; before tracing, the
engine calls `set_stages((3, 3, 2))`.  Between the two lies only a count of layers, so that the same
model runs on any number of stages, with the same parameters, paths and initial weights.

What a model does before its first layer belongs to the first stage, what it does after its last one
to the last stage.

To mark stages by hand, call `stagewright.nn.pipeline_yield(x)` where a stage ends, in `__call__`.
A model that does so without `self.layers` has `num_layers == 0` and as many stages as marks + 1.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.module import ModuleMeta

from stagewright.nn.layers import Layers, Remat


class _NumberLayers(ModuleMeta):
    """Number the layers of a model when its constructor has ended.

    Only then are all containers in place, those of nested modules too, and only then does the order
    of attributes tell the order of creation: NNX sorts them by name when it merges a module.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - a metaclass
        module = super().__call__(*args, **kwargs)
        first = 0
        for container in _attached(module, set()):
            container.first = first
            first += len(container.layers)
        return module


class PipelinedModule(nnx.Module, metaclass=_NumberLayers):
    """Base class of models that can be cut into pipeline stages.

    A subclass makes its layers with `layers`, and defines `__call__` and `loss`.

    Example:
      >>> class MLP(PipelinedModule):
      ...     def __init__(self, *, rngs: nnx.Rngs):
      ...         self.blocks = self.layers(lambda r: nnx.Linear(8, 8, rngs=r), 6, rngs=rngs)
      ...
      ...     def __call__(self, x):
      ...         return self.blocks(x)
      >>> model = MLP(rngs=nnx.Rngs(0))
      >>> model.num_layers
      6
      >>> model.set_stages((2, 2, 2))
    """

    def layers(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        count: int,
        *,
        rngs: nnx.Rngs,
        remat: Remat = None,
    ) -> Layers:
        """Make a run of layers, each a possible stage edge.

        Args:
          make: makes one layer; called `count` times in order with `rngs`.  Each layer maps a
            pytree of arrays to one of the same structure, shapes and dtypes.
          count: number of layers.
          rngs: the random streams handed to `make`.
          remat: what a layer keeps for its backward pass: None, "full", "dots", or a policy of
            `jax.checkpoint_policies`; see `Layers`.

        Returns:
          A `Layers` container, to be kept as an attribute and called.
        """
        return Layers(make, count, rngs=rngs, remat=remat)

    @property
    def num_layers(self) -> int:
        """Number of layers in all `Layers` of this model and of the modules in it.

        Layers within a layer are part of that layer and not counted.
        """
        return sum(len(container.layers) for container in _containers(self))

    def set_stages(self, layers_per_stage: Sequence[int]) -> None:
        """Cut the model into stages; an engine calls this before it traces the model.

        All layers of the model are numbered one after another in the order in which their
        containers were attached.  A stage that ends at layer p ends right before layer p, whichever
        container holds it; at 0 that is before the first layer, and at `num_layers` after the last.

        Changes static attributes only (`Layers.edges`), and so the `nnx.GraphDef` but no state.

        Args:
          layers_per_stage: number of layers of each stage, in order; `(num_layers,)` undoes the
            cut.  See `stagewright.nn.partition` for how to come by it.

        Raises:
          ValueError: if a number is negative or they do not sum to `num_layers`.
        """
        stages, total = tuple(layers_per_stage), self.num_layers
        if not stages or min(stages) < 0 or sum(stages) != total:
            raise ValueError(
                f"set_stages got {stages}, which sums to {sum(stages)}, for a model with {total} "
                "layers; give each stage's number of layers, none negative"
            )
        edges = tuple(itertools.accumulate(stages))[:-1]
        containers = _containers(self)
        if edges and not containers:
            raise ValueError(
                f"set_stages got {stages} for a model that has no layers to cut between"
            )
        for container in containers:
            _set_edges(container, edges, is_last=container is containers[-1])

    def loss(self, batch: Any) -> tuple[jax.Array, jax.Array, Mapping[str, jax.Array]]:
        """Return the loss of one micro-batch, as a sum and a count.

        A subclass defines this.  The Trainer divides the sum over all micro-batches by the count
        over all micro-batches, so that the loss is the mean over the tokens of the global batch
        however it is divided: see `stagewright.nn.token_cross_entropy`, which returns both.

        Args:
          batch: one micro-batch, as the data source yields it.

        Returns:
          total: float32[], the loss summed over the micro-batch's tokens; differentiated.
          count: float32[], the number of those tokens.
          metrics: scalars by name, for the log.

        Raises:
          NotImplementedError: if the subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define loss(self, batch) -> (sum, count, metrics)"
        )


def _set_edges(container: Layers, edges: Sequence[int], *, is_last: bool) -> None:
    stop = container.first + len(container.layers)
    mine = range(container.first, stop + 1 if is_last else stop)
    container.edges = tuple(edge - container.first for edge in edges if edge in mine)


def _containers(module: nnx.Module) -> list[Layers]:
    """Return the containers of a model in the order of their layers' numbers."""
    containers = sorted(_attached(module, set()), key=lambda container: container.first)
    ends = itertools.accumulate((len(container.layers) for container in containers), initial=0)
    for container, end in zip(containers, ends, strict=False):
        if container.first != end:
            raise ValueError(
                f"a `Layers` of {type(module).__name__} starts at layer {container.first}, not at "
                f"{end}: it was attached after the constructor had numbered the layers; attach "
                "every `Layers` in `__init__`"
            )
    return containers


def _attached(node: Any, seen: set[int]) -> Iterator[Layers]:
    """Yield each container once, in the order of attributes; not those inside a layer."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, Layers):
        yield node
        return
    children: Iterable[Any] = vars(node).values() if isinstance(node, nnx.Pytree) else ()
    children = node if isinstance(node, (list, tuple)) else children
    children = node.values() if isinstance(node, dict) else children
    for child in children:
        yield from _attached(child, seen)
