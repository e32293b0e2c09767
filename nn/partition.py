"""Partitions: how many layers each stage gets.

A partition is asked `split(num_stages, num_layers, costs, before, after)` and answers with the
number of layers of each stage, in order; the answer goes to `PipelinedModule.set_stages`.  `costs`
are the layers' costs (seconds, FLOPs: any unit, the same for all), `before` is the cost of what
runs ahead of the first layer (the embedding), `after` of what follows the last (norm, head, loss).

`group_segments` answers the same question for code without layers: which of the pieces between
stage marks go together.

Pure Python; not here: where costs come from.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol


class Partition(Protocol):
    """What an engine asks of a partition; `Uniform`, `Balanced` and `Explicit` answer."""

    def split(
        self,
        num_stages: int,
        num_layers: int,
        costs: Sequence[float] | None = None,
        before: float = 0.0,
        after: float = 0.0,
    ) -> tuple[int, ...]:
        """Return the number of layers of each stage.

        Args:
          num_stages: number of stages, at least 1.
          num_layers: number of layers.
          costs: one cost a layer, in any one unit; None if not known.
          before: cost of what runs before the first layer, in the same unit.
          after: cost of what runs after the last layer, in the same unit.

        Returns:
          `num_stages` numbers that sum to `num_layers`.

        Raises:
          ValueError: if the layers cannot be split so; both numbers are given.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Uniform:
    """Split as evenly as the numbers allow; costs are ignored.

    Where stages must differ, by one layer, the short ones lie at the ends: the last stage first (it
    also has the head and the loss), then the first (it has the embedding, and keeps the activations
    of most micro-batches), then the last but one, and so on inwards.

    Example:
      >>> Uniform().split(4, 10)
      (2, 3, 3, 2)
      >>> Uniform().split(2, 5)
      (3, 2)
    """

    def split(
        self,
        num_stages: int,
        num_layers: int,
        costs: Sequence[float] | None = None,
        before: float = 0.0,
        after: float = 0.0,
    ) -> tuple[int, ...]:
        """See `Partition.split`; each stage gets at least one layer."""
        del costs, before, after
        _check_stages(num_stages, num_layers, f"{num_layers} layers")
        size, num_long = divmod(num_layers, num_stages)
        ends_first = (i // 2 if i % 2 else num_stages - 1 - i // 2 for i in range(num_stages))
        short = set(itertools.islice(ends_first, num_stages - num_long))
        return tuple(size if stage in short else size + 1 for stage in range(num_stages))


@dataclasses.dataclass(frozen=True, slots=True)
class Balanced:
    """Split so that the costliest stage costs as little as possible.

    Exact, by dynamic programming over the layers' costs; among the splits with that largest cost
    the one with the least sum of squares is taken, so that the other stages are even too.  The
    first stage also bears `before` and the last one `after`, and either may be left with that
    alone, if it costs something.

    Attributes:
      costs: one cost a layer, in any one unit; None takes those that `split` is given, and if it is
        given none either, all layers cost the same.

    Example:
      >>> Balanced().split(2, 4, costs=(1.0, 1.0, 1.0, 3.0))
      (3, 1)
      >>> Balanced().split(2, 6, costs=(1.0,) * 6, after=2.0)
      (4, 2)
    """

    costs: tuple[float, ...] | None = None

    def split(
        self,
        num_stages: int,
        num_layers: int,
        costs: Sequence[float] | None = None,
        before: float = 0.0,
        after: float = 0.0,
    ) -> tuple[int, ...]:
        """See `Partition.split`; also refuses a negative cost and costs of another number."""
        known = self.costs if self.costs is not None else costs
        known = (1.0,) * num_layers if known is None else tuple(known)
        if len(known) != num_layers:
            raise ValueError(
                f"Balanced got {len(known)} costs for {num_layers} layers; give one cost a layer"
            )
        _check_stages(num_stages, num_layers + bool(before) + bool(after), f"{num_layers} layers")
        items = ((before,) if before else ()) + known + ((after,) if after else ())
        sizes = list(group_segments(items, num_stages))
        sizes[0] -= bool(before)
        sizes[-1] -= bool(after)
        return tuple(sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Explicit:
    """Split as given.

    Attributes:
      layers_per_stage: number of layers of each stage.  The first may be 0 (a stage with only the
        embedding) and so may the last (only the head).

    Raises:
      ValueError: for a negative number, or a 0 between the first and the last stage.

    Example:
      >>> Explicit((3, 5, 0)).split(3, 8)
      (3, 5, 0)
    """

    layers_per_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the numbers by themselves."""
        object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        if any(n < 0 for n in self.layers_per_stage) or 0 in self.layers_per_stage[1:-1]:
            raise ValueError(
                f"Explicit expects positive numbers of layers, or 0 for the first or the last "
                f"stage only, got {self.layers_per_stage}"
            )

    def split(
        self,
        num_stages: int,
        num_layers: int,
        costs: Sequence[float] | None = None,
        before: float = 0.0,
        after: float = 0.0,
    ) -> tuple[int, ...]:
        """See `Partition.split`; refuses another number of stages or of layers."""
        del costs, before, after
        given = self.layers_per_stage
        if len(given) != num_stages or sum(given) != num_layers:
            raise ValueError(
                f"Explicit{given} is for {len(given)} stages and {sum(given)} layers, "
                f"but there are {num_stages} stages and {num_layers} layers"
            )
        return given


def group_segments(costs: Sequence[float], num_groups: int) -> tuple[int, ...]:
    """Group consecutive segments so that the costliest group costs as little as possible.

    A program with L stage marks has L + 1 segments; this says which of them make up each stage.
    Exact; ties are broken as in `Balanced`.

    Args:
      costs: one cost a segment, in any one unit, none negative.
      num_groups: number of groups, at least 1.

    Returns:
      The number of segments of each group: `num_groups` positive numbers that sum to `len(costs)`.

    Raises:
      ValueError: if there are more groups than segments (both numbers are given), or a cost is
        negative or not a number.

    Example:
      >>> group_segments((4.0, 1.0, 1.0, 2.0), 2)
      (1, 3)
    """
    _check_stages(num_groups, len(costs), f"{len(costs)} segments")
    if not all(cost >= 0 and math.isfinite(cost) for cost in costs):
        raise ValueError(f"costs must be finite numbers, none negative, got {tuple(costs)}")
    sums = list(itertools.accumulate(costs, initial=0.0))
    worst, _ = _best_groups(sums, num_groups, max, lambda cost: cost)
    # A group may cost `worst`, no more; the slack is for sums that round differently.
    limit = worst * (1 + 1e-9)
    _, ends = _best_groups(
        sums, num_groups, sum, lambda cost: cost * cost if cost <= limit else math.inf
    )
    return tuple(stop - start for start, stop in itertools.pairwise((0, *ends)))


def _best_groups(
    sums: Sequence[float],
    num_groups: int,
    join: Callable[[tuple[float, float]], float],
    price: Callable[[float], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the least joined price of `num_groups` groups, and where each group ends.

    `best[n]` is the answer for the first n segments and the groups seen so far.
    """
    num = len(sums) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for group in range(1, num_groups + 1):
        best = {
            stop: min(
                (join((total, price(sums[stop] - sums[start]))), (*ends, stop))
                for start, (total, ends) in best.items()
                if start < stop
            )
            for stop in range(group, num - num_groups + group + 1)
        }
    return best[num]


def _check_stages(num_stages: int, most: int, what: str) -> None:
    if not 1 <= num_stages <= most:
        raise ValueError(
            f"cannot split {what} into {num_stages} stages; ask for a number from 1 to {most}"
        )
