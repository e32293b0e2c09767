"""Slots are freed after their last use; buffers are given on; a rank holds the activations that its schedule says.

The counts are of slots in the program, so they hold for every runtime.  That no slot is read when empty is proved for
every program by `check.py`; here is that they are empty soon enough, and that nothing is given away that must stay.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.actions import Kind
from stagewright.pipelining.compile import compile_step
from stagewright.pipelining.program import Free, Recv, Run, Send
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB

WIDTH = 3
TABLE = jnp.asarray(np.eye(WIDTH, dtype=np.float32))


def make_step(num_layers):
    def step(*flat):
        *weights, batch = flat

        def loss(weights, x):
            for i, w in enumerate(weights):
                x = jnp.tanh(x @ w)
                x = pipeline_yield(x) if i < num_layers - 1 else x
            return jnp.sum(x @ TABLE)

        losses, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(weights, x), batch)
        new = [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]
        return [*new, losses, batch, TABLE, jnp.float32(7)]

    return step


def make(schedule, ranks, microbatches=4, donated=()):
    num_layers = schedule.num_stages(ranks)
    structs = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * num_layers
    structs.append(jax.ShapeDtypeStruct((microbatches, 2, WIDTH), jnp.float32))
    return compile_step(
        make_step(num_layers), structs, schedule=schedule, num_ranks=ranks,
        partition=Uniform(), donated=frozenset(donated),
    )  # fmt: skip


def reads(program, instruction):
    if isinstance(instruction, Run):
        return set(instruction.inputs)
    return set(instruction.slots) if isinstance(instruction, Send) else set()


def emptied(program, instruction):
    if isinstance(instruction, Run):
        donate = program.codes[instruction.code].donate
        return {instruction.inputs[i] for i in donate} - set(instruction.outputs)
    return set(instruction.slots) if isinstance(instruction, Free) else set()


def filled(instruction):
    if isinstance(instruction, Run):
        return set(instruction.outputs)
    return set(instruction.slots) if isinstance(instruction, Recv) else set()


SETUPS = [(GPipe(), 3), (OneFOneB(), 3), (ZBH1(), 3), (Interleaved1F1B(2), 2)]


@pytest.mark.parametrize(("schedule", "ranks"), SETUPS)
def test_a_slot_is_emptied_right_after_its_last_use(schedule, ranks):
    program = make(schedule, ranks).program
    for rank in program.ranks:
        stays = {slot for _, slot in (*rank.outputs, *rank.constants)}
        last = {}
        for position, instruction in enumerate(rank.instructions):
            touched = reads(program, instruction) | filled(instruction)
            last.update(dict.fromkeys(touched, position))
        for slot, position in last.items():
            if slot in stays:
                continue
            now = emptied(program, rank.instructions[position])
            then = emptied(
                program, rank.instructions[min(position + 1, len(rank.instructions) - 1)]
            )
            assert slot in now | then, (slot, str(rank.instructions[position]))


@pytest.mark.parametrize(("schedule", "ranks"), SETUPS)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_activations_are_held_as_the_schedule_says(schedule, ranks, microbatches):
    """A micro-batch's residuals of a stage are there from its forward to its last backward task."""
    plan = make(schedule, ranks, microbatches)
    most = schedule.max_activations(ranks, microbatches)
    for rank, rank_program in enumerate(plan.program.ranks):
        residuals = {}  # slot -> (stage, micro-batch) whose backward reads it
        for instruction in rank_program.instructions:
            if isinstance(instruction, Run) and instruction.action:
                action = instruction.action
                if action.kind in (Kind.B, Kind.I, Kind.W):
                    key = (action.stage, action.microbatch)
                    residuals.update(dict.fromkeys(reads(plan.program, instruction), key))
        made = {
            slot: residuals[slot]
            for instruction in rank_program.instructions
            if isinstance(instruction, Run) and instruction.action
            for slot in set(instruction.outputs) - set(instruction.inputs)
            if slot in residuals and instruction.action.kind is Kind.F
        }
        held, peak = set(), 0
        for instruction in rank_program.instructions:
            held |= filled(instruction) & made.keys()
            peak = max(peak, len({made[slot] for slot in held}))
            held -= emptied(plan.program, instruction)
        assert 0 < peak <= most[rank]
        assert not held


@pytest.mark.parametrize(("schedule", "ranks"), SETUPS)
def test_accumulators_are_updated_in_place(schedule, ranks):
    program = make(schedule, ranks).program
    for rank in program.ranks:
        for run in rank.instructions:
            if isinstance(run, Run) and run.action:
                kept = [i for i, slot in enumerate(run.inputs) if slot in run.outputs]
                donate = set(program.codes[run.code].donate)
                assert set(kept) <= donate, str(run)
        used = [r for r in rank.instructions if isinstance(r, Run) and r.action]
        assert any(set(run.inputs) & set(run.outputs) for run in used)


@pytest.mark.parametrize(("schedule", "ranks"), SETUPS)
def test_only_what_was_given_away_is_overwritten(schedule, ranks):
    num_layers = schedule.num_stages(ranks)
    for donated in ((), range(num_layers)):
        program = make(schedule, ranks, donated=donated).program
        overwritten = set()
        for rank in program.ranks:
            argument = {slot: i for i, slot in rank.inputs}
            constants = {slot for _, slot in rank.constants}
            for run in rank.instructions:
                if isinstance(run, Run):
                    gone = {run.inputs[i] for i in program.codes[run.code].donate}
                    assert not gone & constants
                    overwritten |= {argument[slot] for slot in gone if slot in argument}
        # With two stages on a rank a result may take the gradient's buffer instead: both are free by then.
        assert overwritten <= set(donated)
        assert bool(overwritten) == bool(donated)


@pytest.mark.parametrize(("schedule", "ranks"), SETUPS)
def test_what_was_sent_is_never_overwritten(schedule, ranks):
    program = make(schedule, ranks).program
    for rank in program.ranks:
        sent = set()
        for instruction in rank.instructions:
            if isinstance(instruction, Run):
                gone = {instruction.inputs[i] for i in program.codes[instruction.code].donate}
                assert not gone & sent
                sent -= set(instruction.outputs)
            elif isinstance(instruction, Send):
                sent |= set(instruction.slots)


def test_a_donated_buffer_has_the_shape_of_a_result():
    program = make(OneFOneB(), 3, donated=range(3)).program
    for code in program.codes:
        found = jax.eval_shape(code.function, *code.inputs)
        results = Counter((r.shape, r.dtype) for r in found)
        given = Counter((code.inputs[i].shape, code.inputs[i].dtype) for i in code.donate)
        assert given <= results
        assert [(r.shape, r.dtype) for r in found] == [(r.shape, r.dtype) for r in code.outputs]


def test_arguments_and_constants_among_the_results_are_no_slots():
    plan = make(OneFOneB(), 3)
    program = plan.program
    assert program.passed == ((4, 3),)  # the batch, given back
    literals = dict(program.literals)
    np.testing.assert_array_equal(literals[5], TABLE)
    assert float(literals[6]) == 7.0
    in_slots = {i for rank in program.ranks for i, _ in rank.outputs}
    assert in_slots == {0, 1, 2, 3}
    assert [tuple(s.shape) for s in program.structs[3:]] == [
        (4,),
        (4, 2, WIDTH),
        (WIDTH, WIDTH),
        (),
    ]
