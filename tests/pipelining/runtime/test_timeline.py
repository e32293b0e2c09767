"""Claim: the runtime's timeline tells what a step did: every run, every message, and what the slots held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.calibrate import measured_costs
from stagewright.pipelining.errors import ActorError
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.program import Program, Run
from stagewright.pipelining.runtime.records import Message, RunSpan, make_timeline
from stagewright.pipelining.schedules import ZBH1, OneFOneB
from stagewright.pipelining.simulate import simulate_program

WIDTH, BATCH, MICROBATCHES = 4, 2, 4
VALUE = BATCH * WIDTH * 4  # bytes of one micro-batch's activation


def make_step(schedule, pipe, trouble=None):
    @mpmd_jit(mesh=MeshSpec(pipe=pipe), schedule=schedule, donate_argnums=(0,))
    def step(weights, batch):
        def loss(weights, x):
            for i, w in enumerate(weights):
                x = jnp.tanh(x @ w)
                x = pipeline_yield(x) if i < len(weights) - 1 else x
            if trouble is not None:
                struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
                x = x * jax.pure_callback(trouble, struct, jax.lax.stop_gradient(x))
            return jnp.sum(x)

        losses, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(weights, x), batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        return [w - 0.1 * g / norm for w, g in zip(weights, grads, strict=True)], losses

    return step


def operands(num_layers):
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(w, jnp.float32) for w in rng.normal(size=(num_layers, WIDTH, WIDTH))]
    return weights, rng.normal(size=(MICROBATCHES, BATCH, WIDTH)).astype(np.float32)


def test_it_is_made_of_what_was_noted():
    """A run from 100 to 102 s, a message posted then and had at 103 s; the first run is at 0."""
    first, second = (Run(0, (), (), None, label) for label in ("first", "second"))
    runs = [RunSpan(0, first, 100.0, 102.0), RunSpan(1, second, 103.0, 107.0)]
    program = step_program()
    tags = [i.tag for i in program.ranks[0].instructions if hasattr(i, "to")]
    messages = {(0, 1): [Message(102.0, 40, 103.0)]}
    held = [[(99.0, 8), (102.0, 8), (102.5, 24)], [(99.0, 8), (104.0, 0)]]
    got = make_timeline(program, runs, messages, held)
    assert [(s.rank, s.label, s.start, s.end) for s in got.outer] == [
        (0, "first", 0.0, 2.0),
        (1, "second", 3.0, 7.0),
    ]
    (sent,) = got.transfers
    assert (sent.source, sent.to, sent.label, sent.num_bytes) == (0, 1, tags[0], 40)
    assert (sent.start, sent.end) == (2.0, 3.0)
    assert got.memory == (((0.0, 8), (2.5, 24)), ((0.0, 8), (4.0, 0)))
    assert (got.makespan, got.unit) == (7.0, "s")


def step_program() -> Program:
    return make_step(OneFOneB(), 2).compile(*operands(2)).plan.program


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=lambda s: s.name)
def test_every_run_and_message_of_a_real_step_is_there(schedule):
    step = make_step(schedule, 3)
    function = step.compile(*operands(3))
    assert function.runtime.timeline is None
    step(*operands(3))
    got = function.runtime.timeline
    planned = simulate_program(function.plan.program, measured_costs([got]))

    def named(timeline):
        return sorted((t.source, t.to, t.label, t.num_bytes) for t in timeline.transfers)

    assert named(got) == named(planned)
    assert {VALUE, 4} <= {t.num_bytes for t in got.transfers}  # activations, and parts of the norm
    assert {s.action for s in got.spans} == {s.action for s in planned.spans}
    assert {s.label for s in got.outer} == {s.label for s in planned.outer}
    assert (got.unit, got.num_ranks, got.memory) == ("s", 3, ())


def test_times_respect_who_waits_for_whom():
    """A message is posted after its task's end, had after it was posted, and read after it was had."""
    step = make_step(OneFOneB(), 3)
    step(*operands(3))
    got = step.compile(*operands(3)).runtime.timeline
    spans = {str(span.action): span for span in got.spans}
    forwards = [t for t in got.transfers if t.label in spans and t.label[1] == "F"]
    assert len(forwards) == 2 * MICROBATCHES
    for sent in forwards:
        made = spans[sent.label]
        read = spans[f"{int(sent.label[0]) + 1}{sent.label[1:]}"]
        assert made.end <= sent.start <= sent.end <= read.start
    assert min(span.start for span in got.work) == 0


def test_memory_is_there_if_it_was_counted_and_only_then():
    step = make_step(OneFOneB(), 2)
    function = step.compile(*operands(2))
    function.runtime.count_bytes = True
    step(*operands(2))
    got = function.runtime.timeline
    planned = simulate_program(function.plan.program, measured_costs([got]))
    for rank in range(2):
        assert [size for _, size in got.memory[rank]] == [size for _, size in planned.memory[rank]]
        instants = [instant for instant, _ in got.memory[rank]]
        assert instants == sorted(instants)
        assert instants[0] == 0
    function.runtime.count_bytes = False
    step(*operands(2))
    assert function.runtime.timeline.memory == ()


def test_each_step_has_a_timeline_of_its_own_and_a_failed_one_spoils_nothing():
    broken = [False]

    def trouble(x):
        if broken[0]:
            raise RuntimeError("sensor on fire")
        return x

    step = make_step(OneFOneB(), 2, trouble)
    runtime = step.compile(*operands(2)).runtime
    step(*operands(2))
    first = runtime.timeline
    assert runtime.timeline is first
    broken[0] = True
    with pytest.raises(ActorError, match="sensor on fire"):
        step(*operands(2))
    broken[0] = False
    step(*operands(2))
    last = runtime.timeline
    assert last is not first
    assert len(last.transfers) == len(first.transfers)
    assert all(t.start <= t.end for t in last.transfers)


def test_the_trainers_step_gives_the_same_timeline():
    from stagewright.pipelining.engines.mpmd import MpmdEngine

    weights, batch = operands(2)
    step = make_step(OneFOneB(), 2)
    compiled = MpmdEngine(microbatches=MICROBATCHES).compile(
        init=lambda: [w * 1 for w in weights],
        step=lambda state, batch: step.__wrapped__(state, batch),
        batch=batch,
        mesh=MeshSpec(pipe=2),
    )
    assert compiled.last_timeline is None
    compiled(compiled.init(), batch)
    assert compiled.last_timeline.transfers
    assert compiled.last_timeline is compiled._latest.runtime.timeline
