"""Where each operation outside the loop runs, and where each value outside it has to be.

In: a traced step's outer operations, what the loop reads on which rank and what it leaves where.  Out: a `Placement`.
Data flow decides: an operation runs where its operands live, so nothing that belongs to one stage's parameters leaves
its rank.  Four kinds of values meet here:

- *local*: belongs to one rank (a gradient, and all that is computed from it); small or large;
- *shared*: a small result of several ranks or of the loss (a global norm, a token count), made on one rank and sent
  to those who read it; what is computed from shared values alone is computed again by each reader;
- *floating*: bound to no rank (a step counter, a learning rate, an untouched moment): made or kept wherever it is
  read, on one rank only if it is large;
- *inputs*: small ones lie on every rank that reads them, large ones have one owner, the first rank that reads them,
  which sends copies to the others once a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stagewright.pipelining.graph import Atom, Operation, Value
from stagewright.pipelining.primitives import SMALL

Ranks = frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where things are.

    Attributes:
      runs: for each live operation, the ranks that run it.
      homes: for each value, the ranks on which it is made or (inputs, loop results) lies from the start.
      needs: for each value, the ranks that read it or on which it must lie at the end.
      final: for each result, the ranks on which the caller gets it.
    """

    runs: Mapping[Operation, Ranks]
    homes: Mapping[Value, Ranks]
    needs: Mapping[Value, Ranks]
    final: Mapping[Value, Ranks]


@dataclass(frozen=True, slots=True, eq=False)
class Anchors:
    """Which rank values are bound to.

    Attributes:
      local: values of one rank.
      shared: small values of all ranks, with the rank that makes them.
    """

    local: dict[Value, int] = field(default_factory=dict)
    shared: dict[Value, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Borders:
    """What the loop and the caller ask of the outer program.

    Attributes:
      inputs: the step's arguments and constants.
      loop_reads: for each outer value that the loop reads, the ranks that read it.
      loop_gradients: accumulators that the loop leaves, with their rank.
      loop_values: accumulators of losses and aux, with their rank.
      outputs: the step's results.
      same_home: result values that must lie where an argument lies, so that the next step finds them there.
      combined: sums over several ranks' partials, with the rank that makes them.
    """

    inputs: Sequence[Value]
    loop_reads: Mapping[Value, Ranks]
    loop_gradients: Mapping[Value, int]
    loop_values: Mapping[Value, int]
    outputs: Sequence[Atom]
    same_home: Sequence[tuple[Value, Value]]
    combined: Mapping[Value, int] = field(default_factory=dict)


def place(operations: Sequence[Operation], borders: Borders) -> Placement:
    """Place the outer operations, given in an order in which they can run."""
    anchors = anchor_all(operations, borders)
    carried: dict[Value, Ranks] = {}
    while True:
        runs, needs = _demand(operations, borders, anchors, carried)
        homes = _homes(borders, anchors, runs, needs)
        wanted = {
            new: homes[old] | carried.get(new, frozenset())
            for new, old in borders.same_home
            if homes.get(old)
        }
        if wanted == carried:
            results = {
                atom
                for atom in borders.outputs
                if isinstance(atom, Value) and atom not in set(borders.inputs)
            }
            final = {v: carried.get(v, frozenset({min(homes[v])})) for v in results}
            return Placement(runs, homes, needs, final)
        carried = wanted


def _is_small(atom: Atom) -> bool:
    return atom.size <= SMALL


# ---- anchors --------------------------------------------------------------------------------------------------------


def anchor_all(operations: Sequence[Operation], borders: Borders) -> Anchors:
    """Bind values to ranks, forwards; inputs that only bound operations read are bound too, and then once more."""
    bound = {
        v: min(ranks)
        for v, ranks in borders.loop_reads.items()
        if len(ranks) == 1 or not _is_small(v)
    }
    start = {v: rank for v, rank in bound.items() if v in set(borders.inputs)}
    for _ in range(3):
        anchors = Anchors({**start, **borders.loop_gradients}, {})
        for value, rank in borders.loop_values.items():
            (anchors.shared if _is_small(value) else anchors.local)[value] = rank
        for op in operations:
            _anchor(op, anchors, borders.combined)
        more = _bound_by_readers(operations, borders, anchors)
        if more.keys() <= start.keys():
            break
        start = {**more, **start}
    return anchors


def _anchor(op: Operation, anchors: Anchors, combined: Mapping[Value, int]) -> None:
    if op.outputs and op.outputs[0] in combined:
        _bind(op, anchors.shared, combined[op.outputs[0]])
        return
    local = [(value.size, anchors.local[value]) for value in op.values_in if value in anchors.local]
    if not local:
        return
    large = [rank for size, rank in local if size > SMALL]
    ranks = {rank for _, rank in local}
    if large:
        _bind(op, anchors.local, min(large))
    elif len(ranks) == 1:
        _bind(op, anchors.local, min(ranks))
    else:
        _bind(op, anchors.shared, min(ranks))


def _bind(op: Operation, table: dict[Value, int], rank: int) -> None:
    table.update(dict.fromkeys(op.outputs, rank))


def _bound_by_readers(
    operations: Sequence[Operation], borders: Borders, anchors: Anchors
) -> dict[Value, int]:
    """Inputs that bound operations of exactly one rank read (optimizer moments)."""
    free = set(borders.inputs) - set(anchors.local) - set(borders.loop_reads)
    readers: dict[Value, set[int]] = {}
    for op in operations:
        rank = anchors.local.get(op.outputs[0]) if op.outputs else None
        for value in op.values_in:
            if value in free and rank is not None:
                readers.setdefault(value, set()).add(rank)
    return {value: min(ranks) for value, ranks in readers.items() if len(ranks) == 1}


# ---- demand ---------------------------------------------------------------------------------------------------------


def _demand(
    operations: Sequence[Operation],
    borders: Borders,
    anchors: Anchors,
    carried: Mapping[Value, Ranks],
) -> tuple[dict[Operation, Ranks], dict[Value, Ranks]]:
    """Walk back from what is wanted: where each operation runs and where its operands are needed."""
    needs: dict[Value, Ranks] = dict(borders.loop_reads)
    _want_outputs(needs, borders, anchors, carried)
    runs: dict[Operation, Ranks] = {}
    for op in reversed(operations):
        wanted = frozenset().union(*(needs.get(value, frozenset()) for value in op.outputs))
        if op.has_effects:
            runs[op] = frozenset({_rank_of_effect(op, wanted, anchors)})
        elif wanted:
            runs[op] = _where(op, wanted, anchors)
        else:
            continue
        for value in op.values_in:
            needs[value] = needs.get(value, frozenset()) | runs[op]
    return runs, needs


def _want_outputs(
    needs: dict[Value, Ranks], borders: Borders, anchors: Anchors, carried: Mapping[Value, Ranks]
) -> None:
    given = set(borders.inputs)
    for atom in borders.outputs:
        if not isinstance(atom, Value) or atom in given:
            continue
        home = anchors.local.get(atom, anchors.shared.get(atom))
        default = frozenset({home if home is not None else _any_source(needs.get(atom))})
        needs[atom] = needs.get(atom, frozenset()) | carried.get(atom, default)


def _any_source(ranks: Ranks | None) -> int:
    return min(ranks) if ranks else 0


def _where(op: Operation, wanted: Ranks, anchors: Anchors) -> Ranks:
    bound = anchors.local.get(op.outputs[0], anchors.shared.get(op.outputs[0]))
    if bound is not None:
        return frozenset({bound})
    repeats_cheaply = all(_is_small(value) for value in op.values_in) or all(
        _is_small(v) for v in op.outputs
    )
    return wanted if repeats_cheaply else frozenset({min(wanted)})


def _rank_of_effect(op: Operation, wanted: Ranks, anchors: Anchors) -> int:
    """One rank, for an effect happens once: where most of what it reads lies."""
    sizes: dict[int, int] = {}
    for value in op.values_in:
        rank = anchors.local.get(value, anchors.shared.get(value))
        if rank is not None:
            sizes[rank] = sizes.get(rank, 0) + value.size
    return max(sizes, key=lambda rank: sizes[rank]) if sizes else min(wanted, default=0)


def _homes(
    borders: Borders,
    anchors: Anchors,
    runs: Mapping[Operation, Ranks],
    needs: Mapping[Value, Ranks],
) -> dict[Value, Ranks]:
    homes: dict[Value, Ranks] = {value: ranks for op, ranks in runs.items() for value in op.outputs}
    for value, rank in (*borders.loop_gradients.items(), *borders.loop_values.items()):
        homes[value] = frozenset({rank})
    for value in borders.inputs:
        needed = needs.get(value, frozenset())
        bound = anchors.local.get(value)
        if not needed or _is_small(value):
            homes[value] = needed
        else:
            homes[value] = frozenset({bound if bound is not None else min(needed)})
    return homes
