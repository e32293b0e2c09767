"""Turn drafts into a program: number the slots, free each value after its last use, donate what a run may overwrite.

In: drafts, which name values; what the caller gives and wants.  Out: a `Program`.  A buffer may be donated to a run if
nothing reads it afterwards, if it was made by the program itself (or given away by the caller), if no transfer may
still be reading it, and if the code that runs can use it in every micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.pipelining.assemble import (
    INDEX,
    OUTSIDE,
    Draft,
    DraftRun,
    Drafts,
    DraftTransfer,
    Key,
    index_constant,
)
from stagewright.pipelining.graph import Literal, Value
from stagewright.pipelining.outer import struct_of
from stagewright.pipelining.placement import Placement
from stagewright.pipelining.program import (
    Code,
    Free,
    Instruction,
    Program,
    RankProgram,
    Recv,
    Run,
    Send,
)


@dataclass(frozen=True, slots=True, eq=False)
class Interface:
    """The step's border.

    Attributes:
      inputs: the arguments.
      donated: indices of arguments that the caller gives away.
      constants: closed-over arrays, with their values.
      outputs: the results.
    """

    inputs: Sequence[Value]
    donated: frozenset[int]
    constants: Sequence[tuple[Value, Any]]
    outputs: Sequence[Value | Literal]


def allocate(drafts: Drafts, placement: Placement, interface: Interface) -> Program:
    """Number slots, insert frees, choose donations."""
    constants, constant_of = _constants(drafts, interface)
    ranks = [
        _Rank(rank, draft, placement, interface, constant_of)
        for rank, draft in enumerate(drafts.ranks)
    ]
    codes = _choose_donations(drafts.codes, ranks)
    return Program(
        ranks=tuple(rank.program(codes) for rank in ranks),
        codes=codes,
        arguments=tuple(value.struct for value in interface.inputs),
        constants=constants,
        passed=_passed(interface),
        literals=_literals(interface),
        structs=tuple(struct_of(atom) for atom in interface.outputs),
    )


def _constants(drafts: Drafts, interface: Interface) -> tuple[tuple[Any, ...], dict[Key, int]]:
    """The arrays that stay: what the step closes over, and micro-batch indices."""
    arrays = [array for _, array in interface.constants]
    number: dict[Key, int] = {
        (value, OUTSIDE): i for i, (value, _) in enumerate(interface.constants)
    }
    for draft in drafts.ranks:
        for item in draft:
            for key in item.inputs if isinstance(item, DraftRun) else ():
                if key[0] is INDEX and key not in number:
                    number[key] = len(arrays)
                    arrays.append(index_constant(key[1]))
    return tuple(arrays), number


def _passed(interface: Interface) -> tuple[tuple[int, int], ...]:
    position = {value: i for i, value in enumerate(interface.inputs)}
    return tuple(
        (i, position[a])
        for i, a in enumerate(interface.outputs)
        if isinstance(a, Value) and a in position
    )


def _literals(interface: Interface) -> tuple[tuple[int, Any], ...]:
    """Results that are constants: written in the program, or arrays that the step closes over."""
    constant = dict(interface.constants)
    found: list[tuple[int, Any]] = []
    for i, atom in enumerate(interface.outputs):
        if isinstance(atom, Literal):
            found.append((i, atom.value))
        elif atom in constant:
            found.append((i, constant[atom]))
    return tuple(found)


class _Rank:
    """One rank's drafts with what liveness knows of them."""

    def __init__(
        self,
        rank: int,
        drafts: Sequence[Draft],
        placement: Placement,
        interface: Interface,
        constant_of: Mapping[Key, int],
    ) -> None:
        self.rank = rank
        self.drafts = drafts
        self.slots: dict[Key, int] = {}
        self.inputs = self._inputs(placement, interface)
        self.constants = self._read_constants(constant_of)
        returned = {i for _, i in _passed(interface)}
        self.donated = {key for i, key in self.inputs if i in interface.donated - returned}
        self.outputs = self._outputs(placement, interface)
        self.last = self._last_uses()
        self.sent: dict[Key, int] = {}
        for position, item in enumerate(drafts):
            if isinstance(item, DraftTransfer) and item.sends:
                self.sent.update((key, position) for key in item.keys if key not in self.sent)

    def _inputs(self, placement: Placement, interface: Interface) -> list[tuple[int, Key]]:
        return [
            (i, (value, OUTSIDE))
            for i, value in enumerate(interface.inputs)
            if self.rank in placement.homes.get(value, frozenset())
        ]

    def _read_constants(self, constant_of: Mapping[Key, int]) -> list[tuple[int, Key]]:
        read = {key for item in self.drafts for key in _keys_in(item)}
        return [(number, key) for key, number in constant_of.items() if key in read]

    def _outputs(self, placement: Placement, interface: Interface) -> list[tuple[int, Key]]:
        return [
            (i, (atom, OUTSIDE))
            for i, atom in enumerate(interface.outputs)
            if isinstance(atom, Value) and self.rank in placement.final.get(atom, frozenset())
        ]

    def _last_uses(self) -> dict[Key, int]:
        last: dict[Key, int] = {}
        for position, item in enumerate(self.drafts):
            last.update(dict.fromkeys((*_keys_in(item), *_keys_out(item)), position))
        for key in (*(k for _, k in self.constants), *(k for _, k in self.outputs)):
            last.pop(key, None)
        return last

    def donatable(self, position: int, run: DraftRun, code: Code) -> set[int]:
        """Positions of arguments that this run may overwrite."""
        given = {key for _, key in self.inputs} - self.donated
        owned = []
        for i, key in enumerate(run.inputs):
            overwritten = key in run.outputs
            dies = overwritten or self.last.get(key) == position
            was_sent = self.sent.get(key, position) < position
            if dies and key not in given and not was_sent and run.inputs.count(key) == 1:
                owned.append(i)
        return set(owned)

    def slot(self, key: Key) -> int:
        return self.slots.setdefault(key, len(self.slots))

    def program(self, codes: Sequence[Code]) -> RankProgram:
        inputs = tuple((i, self.slot(key)) for i, key in self.inputs)
        constants = tuple((i, self.slot(key)) for i, key in self.constants)
        instructions = [
            made
            for position, item in enumerate(self.drafts)
            for made in self._write(position, item, codes)
        ]
        return RankProgram(
            instructions=tuple(instructions),
            inputs=inputs,
            constants=constants,
            outputs=tuple((i, self.slot(key)) for i, key in self.outputs),
            donated=frozenset(self.slot(key) for key in self.donated),
            num_slots=len(self.slots),
        )

    def _write(self, position: int, item: Draft, codes: Sequence[Code]) -> list[Instruction]:
        main = self._instruction(item)
        emptied: set[Key] = set()
        if isinstance(item, DraftRun):
            donated = {item.inputs[i] for i in codes[item.code].donate}
            emptied = donated.difference(item.outputs)
        dead = dict.fromkeys(
            key
            for key in (*_keys_in(item), *_keys_out(item))
            if self.last.get(key) == position and key not in emptied
        )
        return [main, Free(tuple(self.slot(key) for key in dead))] if dead else [main]

    def _instruction(self, item: Draft) -> Instruction:
        if isinstance(item, DraftRun):
            inputs, outputs = (
                tuple(map(self.slot, item.inputs)),
                tuple(map(self.slot, item.outputs)),
            )
            return Run(item.code, inputs, outputs, item.action, item.label)
        slots = tuple(map(self.slot, item.keys))
        return Send(slots, item.peer, item.tag) if item.sends else Recv(slots, item.peer, item.tag)


def _keys_in(item: Draft) -> tuple[Key, ...]:
    if isinstance(item, DraftRun):
        return item.inputs
    return item.keys if item.sends else ()


def _keys_out(item: Draft) -> tuple[Key, ...]:
    if isinstance(item, DraftRun):
        return item.outputs
    return () if item.sends else item.keys


def _choose_donations(codes: Sequence[Code], ranks: Sequence[_Rank]) -> tuple[Code, ...]:
    """For each code, the arguments that every one of its runs may overwrite and some result fits into."""
    allowed: dict[int, set[int]] = {}
    for rank in ranks:
        for position, item in enumerate(rank.drafts):
            if isinstance(item, DraftRun):
                found = rank.donatable(position, item, codes[item.code])
                allowed[item.code] = allowed.get(item.code, found) & found
    return tuple(
        replace(code, donate=_fitting(code, allowed.get(i, set()))) for i, code in enumerate(codes)
    )


def _fitting(code: Code, allowed: set[int]) -> tuple[int, ...]:
    """The allowed arguments whose shape and dtype a result can take; each result takes one."""
    if not allowed:
        return ()
    room: dict[Any, int] = {}
    for out in code.outputs:
        kind = (out.shape, out.dtype)
        room[kind] = room.get(kind, 0) + 1
    chosen = []
    for i in sorted(allowed, reverse=True):  # accumulators come last and go first
        kind = (code.inputs[i].shape, code.inputs[i].dtype)
        if room.get(kind, 0):
            room[kind] -= 1
            chosen.append(i)
    return tuple(sorted(chosen))
