"""Prove a program before it runs.

In: a `Program` and the order that it was made from.  Out: nothing, or a `CommunicationError` that says what is wrong
and where.  The program is run on paper, under the strictest rule of communication: a send waits until its receive is
the other rank's next instruction.  What finishes under that rule finishes under any.  Proved on the way: every task
of the schedule runs once, on its rank; a slot is filled before it is read, never read after it was freed or donated,
and everything is freed that is no result.  Linear in the number of instructions; runs on every compile.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from stagewright.pipelining.actions import Action, Order
from stagewright.pipelining.errors import CommunicationError
from stagewright.pipelining.program import Free, Instruction, Program, RankProgram, Recv, Run, Send


@dataclass(slots=True)
class _State:
    """A rank in the middle of its program."""

    rank: int
    program: RankProgram
    position: int = 0
    filled: set[int] = field(default_factory=set)

    @property
    def instruction(self) -> Instruction | None:
        if self.position < len(self.program.instructions):
            return self.program.instructions[self.position]
        return None

    def fail(self, what: str) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank}, instruction {self.position} ({_short(self.instruction)}): {what}; this is a fault of "
            "the compiler, not of the model: please report it with the schedule and the mesh"
        )


def validate_program(program: Program, order: Order, skipped: Collection[Action] = ()) -> None:
    """Check a program against the order that it carries out.

    Args:
      program: the program.
      order: its schedule's order.
      skipped: actions that have nothing to do in this model and so no instruction.

    Raises:
      CommunicationError: naming rank, instruction and fault.
    """
    states = [_State(rank, p, filled=_given(p)) for rank, p in enumerate(program.ranks)]
    ready = list(states)
    while ready:
        state = ready.pop()
        partner = _advance(state, states, program)
        if partner is not None:
            ready += [state, partner]
    for state in states:
        if state.instruction is not None:
            raise _stuck(states)
        _check_end(state)
    _check_tasks(program, order, skipped)


def _given(program: RankProgram) -> set[int]:
    return {slot for _, slot in (*program.inputs, *program.constants)}


def _advance(state: _State, states: list[_State], program: Program) -> _State | None:
    """Run a rank until it ends or waits; the partner if a transfer took place."""
    while (instruction := state.instruction) is not None:
        if isinstance(instruction, Run):
            _run(state, instruction, program)
        elif isinstance(instruction, Free):
            _empty(state, instruction.slots)
        else:
            return _meet(state, instruction, states)
        state.position += 1
    return None


def _run(state: _State, run: Run, program: Program) -> None:
    code = program.codes[run.code]
    if code.rank != state.rank:
        raise state.fail(f"its code was made for rank {code.rank}")
    if len(run.inputs) != len(code.inputs):
        raise state.fail(
            f"its code takes {len(code.inputs)} arrays, the instruction gives {len(run.inputs)}"
        )
    _read(state, run.inputs)
    _empty(state, tuple(run.inputs[i] for i in code.donate))
    state.filled.update(run.outputs)


def _meet(state: _State, instruction: Send | Recv, states: list[_State]) -> _State | None:
    """Carry out a transfer if both ranks stand at it."""
    send = isinstance(instruction, Send)
    peer = states[instruction.to if isinstance(instruction, Send) else instruction.source]
    other = peer.instruction
    if send == isinstance(other, Send) or not isinstance(other, (Send, Recv)):
        return None
    if (other.source if isinstance(other, Recv) else other.to) != state.rank:
        return None
    if (len(other.slots), other.tag) != (len(instruction.slots), instruction.tag):
        raise state.fail(f"the other side is {_short(other)} on rank {peer.rank}")
    sender, receiver = (state, peer) if send else (peer, state)
    assert sender.instruction is not None
    assert receiver.instruction is not None
    _read(sender, sender.instruction.slots)  # type: ignore[union-attr]
    receiver.filled.update(receiver.instruction.slots)  # type: ignore[union-attr]
    state.position += 1
    peer.position += 1
    return peer


def _read(state: _State, slots: tuple[int, ...]) -> None:
    missing = [slot for slot in slots if slot not in state.filled]
    if missing:
        raise state.fail(f"slots {missing[:8]} are read but empty")


def _empty(state: _State, slots: tuple[int, ...]) -> None:
    _read(state, slots)
    state.filled.difference_update(slots)


def _check_end(state: _State) -> None:
    kept = {slot for _, slot in (*state.program.outputs, *state.program.constants)}
    unread = {slot for _, slot in state.program.inputs}
    left = state.filled - kept - unread
    if left:
        raise state.fail(f"slots {sorted(left)[:8]} are still full at the end")
    missing = {slot for _, slot in state.program.outputs} - state.filled
    if missing:
        raise state.fail(f"result slots {sorted(missing)[:8]} are empty at the end")


def _stuck(states: list[_State]) -> CommunicationError:
    lines = [
        f"  rank {s.rank} waits at {s.position}: {_short(s.instruction)}"
        for s in states
        if s.instruction
    ]
    return CommunicationError("\n".join(["the program deadlocks when sends block:", *lines[:12]]))


def _check_tasks(program: Program, order: Order, skipped: Collection[Action]) -> None:
    for rank, (rank_program, actions) in enumerate(zip(program.ranks, order.actions, strict=True)):
        ran = [
            i.action
            for i in rank_program.instructions
            if isinstance(i, Run) and i.action is not None
        ]
        wanted = [action for action in actions if action not in skipped]
        if ran != wanted:
            differing = next(
                (i for i, (a, b) in enumerate(zip(ran, wanted, strict=False)) if a != b),
                min(len(ran), len(wanted)),
            )
            raise CommunicationError(
                f"rank {rank} runs {len(ran)} tasks where the schedule has {len(wanted)}; they differ at number "
                f"{differing}: {[str(a) for a in ran[differing : differing + 1]]} instead of "
                f"{[str(a) for a in wanted[differing : differing + 1]]}"
            )


def _short(instruction: Instruction | None) -> str:
    text = str(instruction)
    return text if len(text) <= 90 else text[:87] + "..."
