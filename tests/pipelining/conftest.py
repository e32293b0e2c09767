"""Programs without a model: an order's tasks, transfers and frees, so small that one can count on paper."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from stagewright.pipelining.actions import Action, Order, dependency_map
from stagewright.pipelining.orders import topological_order
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

VALUE = 8  # bytes of what each task makes, if nothing else is said


@pytest.fixture(scope="session")
def program_of() -> Callable[..., Program]:
    """`program_of(order, num_bytes)`: the program of an order whose tasks make one value each."""
    return make_program


def make_program(
    order: Order, num_bytes: Callable[[Action], int] = lambda action: VALUE
) -> Program:
    needs = dependency_map(order)
    readers: dict[Action, set[int]] = {action: set() for action in needs}
    for action, needed in needs.items():
        for value in needed:
            readers[value].add(order.placement[action.stage])
    lists: list[list[Instruction]] = [[] for _ in order.actions]
    slots: list[dict[Action, int]] = [{} for _ in order.actions]
    codes: list[Code] = []

    def slot(rank: int, value: Action) -> int:
        return slots[rank].setdefault(value, len(slots[rank]))

    for rank, action in topological_order(order):
        inputs = tuple(slot(rank, value) for value in needs[action])
        struct = jax.ShapeDtypeStruct((num_bytes(action),), jnp.uint8)
        codes.append(Code(str(action), rank, lambda *args: args, (), (struct,)))
        outputs = (slot(rank, action),)
        lists[rank].append(Run(len(codes) - 1, inputs, outputs, action, str(action)))
        for to in sorted(readers[action] - {rank}):
            lists[rank].append(Send(outputs, to, str(action)))
            lists[to].append(Recv((slot(to, action),), rank, str(action)))
    ranks = tuple(_with_frees(instructions, len(slots[r])) for r, instructions in enumerate(lists))
    return Program(ranks, tuple(codes), (), (), (), (), ())


def _with_frees(instructions: list[Instruction], num_slots: int) -> RankProgram:
    """Each slot is freed behind the last instruction that names it."""
    last: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        named = (
            (*instruction.inputs, *instruction.outputs)
            if isinstance(instruction, Run)
            else instruction.slots
        )
        last.update(dict.fromkeys(named, position))
    written: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        written.append(instruction)
        dead = tuple(slot for slot, at in last.items() if at == position)
        written += [Free(dead)] if dead else []
    return RankProgram(tuple(written), num_slots, (), (), ())
