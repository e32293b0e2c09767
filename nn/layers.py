"""`Layers`: a run of layers, cut into stages from outside.

The layers are separate Modules in a list, so each has its own Variables and its own path
(`blocks/layers/3/mlp/up/kernel`): optimizer masks, checkpoints and initial weights know nothing of
stages.  Only the call does.  `PipelinedModule.set_stages` tells each container where stages end;
there the call leaves a `pipeline_yield`, and between two marks equal layers run as one
`jax.lax.scan` over their stacked states, so that a program grows with the number of different
layers and not with the depth.

    x -> [ scan of layers 0..3 ] -> yield -> [ scan of layers 4..7 ] -> x

The stacking is part of the call; a compiler that runs it for many micro-batches does it once.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from stagewright.nn.pure import call_pure, has_random_keys
from stagewright.nn.spmd import SpmdPlan, run_pipelined, spmd_plan
from stagewright.nn.yields import pipeline_yield

Carry = TypeVar("Carry")
Remat: TypeAlias = Literal["full", "dots"] | Callable[..., Any] | None


class Layers(nnx.Module):
    """Run layers one after another: each maps the carry to a carry of the same structure.

    Usually made with `PipelinedModule.layers`, which also numbers the layers for `set_stages`.

    Random streams inside the layers (dropout) depend only on the keys and counts in the state and
    on the layer's number in the model: the masks differ from layer to layer, even where layers
    share a stream, and are the same whether layers are scanned or not, rematerialised or not, and
    however they are cut into stages.  A call does not advance the layers' counts: calling twice
    gives the same masks.  Whoever runs many micro-batches or steps folds their numbers into the
    keys, as the Trainer does; by hand, `nnx.reseed` does it.

    Layers must not carry other state from call to call (batch statistics, caches, sown values).

    A container may run once in a forward pass; running it twice leaves its stage marks twice.

    Attributes:
      layers: the layers, in an `nnx.List`.
      remat: what is kept for the backward pass, see `__init__`.
      first: the number of the first layer among all the layers of the model.
      edges: where stages end: positions from 0 (before the first layer) to `len(layers)` (after the
        last), in order; at each the call marks a stage's end.
    """

    def __init__(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        count: int,
        *,
        rngs: nnx.Rngs,
        remat: Remat = None,
    ):
        """Make the layers.

        Args:
          make: makes one layer; called `count` times in order with `rngs`, so that the initial
            weights differ by layer and depend on nothing else.
          count: number of layers.
          rngs: the random streams handed to `make`.
          remat: what each layer keeps for its backward pass.  None: what automatic differentiation
            keeps.  "full": its input only; all else is computed again.  "dots": also the results of
            its products with weights (products without a batch dim), not those between activations
            (attention scores).  Or a policy of `jax.checkpoint_policies`.

        Raises:
          ValueError: if `count` is negative or `remat` is a word not known.
        """
        if count < 0:
            raise ValueError(f"the number of layers must not be negative, got {count}")
        if not (remat in (None, "full", "dots") or callable(remat)):
            raise ValueError(
                f"remat must be None, 'full', 'dots' or a policy of jax.checkpoint_policies, "
                f"got {remat!r}"
            )
        self.layers = nnx.List([make(rngs) for _ in range(count)])
        self.remat = remat
        self.first = 0
        self.edges: tuple[int, ...] = ()

    def __call__(self, carry: Carry, *args: Any, **kwargs: Any) -> Carry:
        """Run the layers on a carry.

        Args:
          carry: any pytree of arrays: the activations, and whatever rides along (an auxiliary
            loss).  All of it crosses every stage's end.
          *args: further arguments of every layer, the same for all.
          **kwargs: further keyword arguments of every layer.

        Returns:
          What the last layer returned.

        Raises:
          ValueError: if a layer returns another structure, shape or dtype than it was given, or
            changes its own state.
        """
        carry = jax.tree.map(jnp.asarray, carry)
        plan = spmd_plan()
        if plan is not None and self.layers:
            return self._run_spmd(plan, carry, args, kwargs)
        bounds = (0, *self.edges, len(self.layers))
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if stage > 0:
                carry = pipeline_yield(carry)
            for run in self._equal_runs(range(start, stop)):
                carry = self._run(run, carry, args, kwargs)
        return carry

    def _run_spmd(
        self, plan: SpmdPlan, carry: Carry, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Carry:
        """Run all layers, which must be equal, as one SPMD pipeline."""
        runs = list(self._equal_runs(range(len(self.layers))))
        if len(runs) > 1:
            raise ValueError(
                f"an SPMD pipeline needs equal layers, but layers/{runs[1][0].index} differs from "
                f"layers/{runs[0][0].index}; use MpmdEngine for layers of several kinds"
            )
        (run,) = runs
        first = run[0]

        def call(state: Any, number: Any, carry: Carry) -> Carry:
            number = number if first.has_keys() else None
            path = f"layers/{first.index}"
            return call_pure(first.graphdef, state, number, carry, args, kwargs, path)

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(part.state for part in run))
        numbers = jnp.arange(len(run), dtype=jnp.uint32) + jnp.uint32(self.first)
        call = _rematerialised(call, self.remat, scanned=True)
        out: Carry = run_pipelined(call, stacked, numbers, carry, plan)
        return out

    def _equal_runs(self, indices: range) -> Iterator[list["_Part"]]:
        """Split layers into their parts; yield together equal ones that follow each other."""
        parts = [_Part(index, *nnx.split(self.layers[index])) for index in indices]
        for _, run in itertools.groupby(parts, key=_Part.kind):
            yield list(run)

    def _run(
        self, run: list["_Part"], carry: Carry, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Carry:
        """Run equal layers: one by itself, several as a scan."""
        first = run[0]

        def call(carry: Carry, part: tuple[Any, Any]) -> tuple[Carry, None]:
            state, number = part
            path = f"layers/{first.index}"
            return call_pure(first.graphdef, state, number, carry, args, kwargs, path), None

        numbers = jnp.arange(len(run), dtype=jnp.uint32) + jnp.uint32(self.first + first.index)
        if len(run) == 1:
            number = numbers[0] if first.has_keys() else None
            return _rematerialised(call, self.remat, scanned=False)(carry, (first.state, number))[0]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(part.state for part in run))
        call = _rematerialised(call, self.remat, scanned=True)
        return jax.lax.scan(call, carry, (stacked, numbers if first.has_keys() else None))[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One layer, split."""

    index: int
    graphdef: Any
    state: nnx.State

    def kind(self) -> tuple[Any, ...]:
        """Return what layers must share to run in one scan."""
        leaves = jax.tree.leaves(self.state)
        return self.graphdef, [(leaf.shape, leaf.dtype) for leaf in leaves]

    def has_keys(self) -> bool:
        """Return whether the layer draws random numbers."""
        return has_random_keys(self.state)


def _rematerialised(call: Callable[..., Any], remat: Remat, scanned: bool) -> Callable[..., Any]:
    if remat is None:
        return call
    policies = {
        "full": None,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    policy = policies[remat] if isinstance(remat, str) else remat
    # Inside a scan the forward and the backward are two loops, which nothing can merge.
    return jax.checkpoint(call, policy=policy, prevent_cse=not scanned)
