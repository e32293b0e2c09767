"""The stage marks of a traced loop body: which forward mark belongs to which backward one, and which are stage edges.

In: the operations of a loop body.  Out: a `Marks`, in which each mark operation has the number of the stage edge that
it stands for, or none if the partition does not use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagewright.nn.partition import Partition
from stagewright.nn.yields import pipeline_yield_p
from stagewright.pipelining.errors import StageError
from stagewright.pipelining.graph import Operation


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """The marks of a loop body.

    Attributes:
      num_stages: stages that the kept marks part.
      edges: for each mark operation that is a stage edge, (edge, forward): edge k lies between stages k and k + 1.
    """

    num_stages: int
    edges: dict[Operation, tuple[int, bool]]


def is_mark(op: Operation) -> bool:
    """Whether the operation is a stage mark."""
    return op.operator.name == pipeline_yield_p.name


def find_marks(
    operations: Sequence[Operation], num_stages: int, partition: Partition, costs: Sequence[float]
) -> Marks:
    """Choose which marks are stage edges.

    Args:
      operations: a loop body's, in order.
      num_stages: stages wanted.
      partition: how the segments between marks are grouped when there are more of them than stages.
      costs: one cost for each segment (any unit).

    Raises:
      StageError: if there are fewer segments than stages.
    """
    forward = [op for op in operations if is_mark(op) and _params(op)["forward"]]
    num_segments = len(forward) + 1
    if num_segments < num_stages:
        raise StageError(
            f"the schedule needs {num_stages} stages, but the model has {len(forward)} stage marks and so at most "
            f"{num_segments} stages; make its layers with self.layers, call pipeline_yield between stages "
            f"({num_stages - 1} in all), or choose a schedule and mesh with "
            f"{num_segments} stages"
        )
    groups = partition.split(num_stages, num_segments, costs=costs)
    ends = [sum(groups[: stage + 1]) - 1 for stage in range(num_stages - 1)]
    kept = {forward[mark]: edge for edge, mark in enumerate(ends)}
    edges = {op: (edge, True) for op, edge in kept.items()}
    for op, twin in _pair(operations, forward):
        if twin in kept:
            edges[op] = (kept[twin], False)
    return Marks(num_stages, edges)


def _pair(
    operations: Sequence[Operation], forward: Sequence[Operation]
) -> list[tuple[Operation, Operation]]:
    """Each backward mark with its forward one: the same number; of several, the last forward one comes back first."""
    waiting: dict[int, list[Operation]] = {}
    for op in forward:
        waiting.setdefault(_params(op)["mark"], []).append(op)
    backward = [op for op in operations if is_mark(op) and not _params(op)["forward"]]
    return [(op, _take_twin(op, waiting)) for op in backward]


def _take_twin(op: Operation, waiting: Mapping[int, list[Operation]]) -> Operation:
    found = waiting.get(_params(op)["mark"])
    if not found:
        raise StageError(
            "a stage mark is differentiated twice (a gradient penalty, or two backward passes over one forward pass), "
            "so the micro-batch has no single way back through the stages; differentiate one sum of losses, once"
        )
    return found.pop()


def _params(op: Operation) -> dict[str, Any]:
    params: dict[str, Any] = op.operator.eqn.params  # type: ignore[union-attr]
    return params
