"""Group the outer operations into few programs a rank, with transfers between them.

In: placed operations, before or after the loop.  Out: `Segment`s in an order in which they can run: all of a rank's
operations that need no more transfers than those before run as one.  A segment's level is the number of transfers that
must have happened before it, or more for what makes way for others (see `Detour`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagewright.pipelining.graph import Operation, Value
from stagewright.pipelining.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Operations that one rank runs at once."""

    rank: int
    level: int
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Detour:
    """Work that is done while something else is on its way.

    Attributes:
      operations: the work; segments of their own, before all others of their level.
      behind: what has to be on its way before: they stand on a later level than these on any rank.
    """

    operations: frozenset[Operation] = frozenset()
    behind: frozenset[Operation] = frozenset()


def group_segments(
    operations: Sequence[Operation], placement: Placement, detour: Detour
) -> tuple[Segment, ...]:
    """Segments by level, in each level those of the detour first, then by rank.

    The detour's operations stand behind those that it has to let pass.
    """
    level: dict[tuple[Operation, int], int] = {}
    maker: dict[Value, Operation] = {}
    members: dict[tuple[int, bool, int], list[Operation]] = {}
    passed = 0
    for op in operations:
        maker.update(dict.fromkeys(op.outputs, op))
        for rank in sorted(placement.runs.get(op, ())):
            found = max(
                (_level_of(v, rank, maker, level, placement) for v in op.values_in), default=0
            )
            if op in detour.behind:
                passed = max(passed, found)
            if op in detour.operations:
                found = max(found, passed + 1)
            level[op, rank] = found
            members.setdefault((found, op not in detour.operations, rank), []).append(op)
    return tuple(Segment(key[2], key[0], tuple(members[key])) for key in sorted(members))


def _level_of(
    value: Value,
    rank: int,
    maker: Mapping[Value, Operation],
    level: Mapping[tuple[Operation, int], int],
    placement: Placement,
) -> int:
    """How many transfers lie before a value is on a rank."""
    op = maker.get(value)
    if op is None:
        return 0
    runs = placement.runs[op]
    return level[op, rank] if rank in runs else level[op, min(runs)] + 1
