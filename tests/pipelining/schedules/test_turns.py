"""Claim: where a V turns, two neighbouring stages share a rank, and nothing is sent between them."""

import jax
import jax.numpy as jnp
import pytest

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.compile import compile_step
from stagewright.pipelining.program import Send
from stagewright.pipelining.schedules import (
    ZBV,
    DualPipeV,
    HanayoWaves,
    LoopedBFS,
    Schedule,
    VHalf,
    VMin,
)

STAGES, RANKS, MICROBATCHES = 4, 2, 4


def sends(schedule: Schedule) -> list[tuple[int, int]]:
    """(from, to) of all transfers of a step of four layers, a chain."""

    def step(weights, batch):
        def loss(weights, x):
            for i, w in enumerate(weights):
                x = jnp.tanh(x @ w)
                x = pipeline_yield(x) if i < STAGES - 1 else x
            return jnp.sum(x)

        return accumulate_grads(lambda x: jax.value_and_grad(loss)(weights, x), batch)

    matrix = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    arguments = [*[matrix] * STAGES, jax.ShapeDtypeStruct((MICROBATCHES, 2, 3), jnp.float32)]
    plan = compile_step(
        lambda *leaves: jax.tree.leaves(step(leaves[:-1], leaves[-1])),
        arguments,
        schedule=schedule,
        num_ranks=RANKS,
        partition=Uniform(),
    )
    return [
        (rank, instruction.to)
        for rank, program in enumerate(plan.program.ranks)
        for instruction in program.instructions
        if isinstance(instruction, Send)
    ]


@pytest.mark.parametrize(
    "schedule",
    [ZBV(), VHalf(), VMin(), DualPipeV(), HanayoWaves(1)],
    ids=lambda schedule: schedule.name,
)
def test_a_v_sends_down_and_up_and_not_at_its_turn(schedule: Schedule) -> None:
    """Each micro-batch crosses ranks twice forward and twice back, not at stages 1 and 2 on rank 1."""
    crossings = sends(schedule)
    assert crossings.count((0, 1)) == 2 * MICROBATCHES
    assert crossings.count((1, 0)) == 2 * MICROBATCHES
    assert len(crossings) == 4 * MICROBATCHES


def test_a_loop_sends_at_every_edge() -> None:
    crossings = sends(LoopedBFS(2))
    assert len(crossings) == 2 * (STAGES - 1) * MICROBATCHES
