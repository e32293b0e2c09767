"""The checker accepts what the compiler makes and rejects a program that was broken in any way that matters."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.check import validate_program
from stagewright.pipelining.compile import compile_step
from stagewright.pipelining.errors import CommunicationError
from stagewright.pipelining.program import Free, Recv, Run, Send
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB


def step(w, batch):
    def loss(w, x):
        hidden = pipeline_yield(jnp.tanh(x @ w[0]))
        hidden = pipeline_yield(jnp.tanh(hidden @ w[1]))
        hidden = pipeline_yield(jnp.tanh(hidden @ w[2]))
        return jnp.sum(hidden @ w[0].T)  # tied

    losses, grads = accumulate_grads(
        lambda x: jax.value_and_grad(loss)((w, w + 1, w + 2), x), batch
    )
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    return [losses.sum(), *(g / norm for g in grads)]


def make(schedule, ranks, microbatches=4):
    structs = [
        jax.ShapeDtypeStruct((3, 3), jnp.float32),
        jax.ShapeDtypeStruct((microbatches, 2, 3), jnp.float32),
    ]
    return compile_step(step, structs, schedule=schedule, num_ranks=ranks, partition=Uniform())


PLANS = [make(OneFOneB(), 4), make(ZBH1(), 2), make(GPipe(), 3), make(Interleaved1F1B(2), 2)]


def with_instructions(program, rank, instructions):
    ranks = list(program.ranks)
    ranks[rank] = dataclasses.replace(ranks[rank], instructions=tuple(instructions))
    return dataclasses.replace(program, ranks=tuple(ranks))


def runs(program, order):
    """Whether a program is right, found out by another way: every rank one instruction at a time, round and round."""
    position = [0] * len(program.ranks)
    full = [{s for _, s in (*r.inputs, *r.constants)} for r in program.ranks]
    seen = [[] for _ in program.ranks]
    moved = True
    while moved:
        moved = False
        for rank, rank_program in enumerate(program.ranks):
            if position[rank] == len(rank_program.instructions):
                continue
            now = rank_program.instructions[position[rank]]
            if isinstance(now, Run):
                code = program.codes[now.code]
                if code.rank != rank or len(code.inputs) != len(now.inputs):
                    return False
                if not set(now.inputs) <= full[rank]:
                    return False
                full[rank] -= {now.inputs[i] for i in code.donate}
                full[rank] |= set(now.outputs)
                if now.action:
                    seen[rank].append(now.action)
            elif isinstance(now, Free):
                if not set(now.slots) <= full[rank]:
                    return False
                full[rank] -= set(now.slots)
            else:
                peer = now.to if isinstance(now, Send) else now.source
                other_program = program.ranks[peer].instructions
                other = (
                    other_program[position[peer]] if position[peer] < len(other_program) else None
                )
                wanted = Recv if isinstance(now, Send) else Send
                if not isinstance(other, wanted):
                    continue
                back = other.source if isinstance(other, Recv) else other.to
                if back != rank:
                    continue
                send, recv, a, b = (
                    (now, other, rank, peer) if isinstance(now, Send) else (other, now, peer, rank)
                )
                if send.tag != recv.tag or len(send.slots) != len(recv.slots):
                    return False
                if not set(send.slots) <= full[a]:
                    return False
                full[b] |= set(recv.slots)
                position[peer] += 1
            position[rank] += 1
            moved = True
    for rank, rank_program in enumerate(program.ranks):
        outputs = {s for _, s in rank_program.outputs}
        may_stay = outputs | {s for _, s in (*rank_program.constants, *rank_program.inputs)}
        if position[rank] < len(rank_program.instructions):
            return False
        if not outputs <= full[rank] or not full[rank] <= may_stay:
            return False
    return [tuple(actions) for actions in seen] == list(order.actions)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(len(plan.program.ranks)))
def test_what_the_compiler_makes_is_right_by_both_ways(plan):
    validate_program(plan.program, plan.order)
    assert runs(plan.program, plan.order)


def drop(instructions, i, j, slot):
    del instructions[i]


def duplicate(instructions, i, j, slot):
    instructions.insert(j, instructions[i])


def swap(instructions, i, j, slot):
    instructions[i], instructions[j] = instructions[j], instructions[i]


def rename(instructions, i, j, slot):
    now = instructions[i]
    if isinstance(now, Run):
        if now.inputs:
            k = j % len(now.inputs)
            inputs = (*now.inputs[:k], slot, *now.inputs[k + 1 :])
            instructions[i] = dataclasses.replace(now, inputs=inputs)
    elif now.slots:
        k = j % len(now.slots)
        instructions[i] = dataclasses.replace(
            now, slots=(*now.slots[:k], slot, *now.slots[k + 1 :])
        )


def redirect(instructions, i, j, slot):
    now = instructions[i]
    if isinstance(now, Send):
        instructions[i] = dataclasses.replace(now, to=slot % 2)
    elif isinstance(now, Recv):
        instructions[i] = dataclasses.replace(now, source=slot % 2)


@settings(max_examples=300)
@given(data=st.data())
def test_a_broken_program_is_rejected(data):
    plan = data.draw(st.sampled_from(PLANS))
    rank = data.draw(st.integers(0, len(plan.program.ranks) - 1))
    rank_program = plan.program.ranks[rank]
    instructions = list(rank_program.instructions)
    i = data.draw(st.integers(0, len(instructions) - 1))
    j = data.draw(st.integers(0, len(instructions) - 1))
    slot = data.draw(st.integers(0, rank_program.num_slots - 1))
    data.draw(st.sampled_from([drop, duplicate, swap, rename, redirect]))(instructions, i, j, slot)
    broken = with_instructions(plan.program, rank, instructions)
    if runs(broken, plan.order):
        validate_program(broken, plan.order)
    else:
        with pytest.raises(CommunicationError):
            validate_program(broken, plan.order)


def test_messages_name_rank_and_instruction_and_stay_short():
    plan = PLANS[0]
    instructions = [i for i in plan.program.ranks[1].instructions if not isinstance(i, Recv)]
    with pytest.raises(CommunicationError, match="rank 1") as caught:
        validate_program(with_instructions(plan.program, 1, instructions), plan.order)
    assert len(str(caught.value).splitlines()) <= 15


def test_programs_print_what_a_person_can_read():
    text = str(PLANS[0].program)
    assert "rank 3:" in text
    assert "RUN 0F0 [" in text
    assert "SEND 0F0 [" in text
    assert "RECV 0F0 [" in text
