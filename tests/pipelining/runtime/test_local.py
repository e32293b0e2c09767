"""A step of the local runtime gives its results or an error that says where; it never hangs and keeps nothing."""

import gc
import itertools
import os
import signal
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.errors import ActorError
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.program import Free, Send
from stagewright.pipelining.schedules import OneFOneB

MICROBATCHES = 4


def make_step(trouble=None, *, pipe=2, timeout=60.0):
    """A two-stage step whose second stage calls `trouble(x)` on each micro-batch's input."""

    def watched(x):
        if trouble is None:
            return x
        return jax.pure_callback(trouble, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @mpmd_jit(mesh=MeshSpec(pipe=pipe), schedule=OneFOneB(), timeout=timeout)
    def step(weights, batch):
        def loss(weights, x):
            hidden = pipeline_yield(weights[0] * x)
            return jnp.sum(hidden * weights[1] * jax.lax.stop_gradient(watched(x)))

        return accumulate_grads(lambda x: jax.value_and_grad(loss)(weights, x), batch)

    return step


WEIGHTS = np.array([2.0, 3.0], np.float32)
BATCH = np.arange(1, MICROBATCHES + 1, dtype=np.float32)[:, None]


def test_a_failing_task_is_named_and_the_next_step_runs():
    broken = [True]

    def trouble(x):
        if broken[0] and x[0] == 3:
            raise RuntimeError("sensor on fire")
        return x

    step = make_step(trouble)
    with pytest.raises(ActorError, match="sensor on fire") as caught:
        step(WEIGHTS, BATCH)
    assert (caught.value.rank, caught.value.stage) == (1, 1)
    assert (caught.value.kind, caught.value.microbatch) == ("F", 2)
    assert len(str(caught.value).splitlines()) <= 15
    broken[0] = False
    losses, _ = step(WEIGHTS, BATCH)
    np.testing.assert_allclose(losses, 6 * BATCH[:, 0] ** 2)


def test_a_rank_that_waits_too_long_says_for_what():
    def slow(x):
        time.sleep(1.0)
        return x

    step = make_step(slow, timeout=0.3)
    with pytest.raises(ActorError, match=r"waiting for 0B0, to be sent by rank 1"):
        step(WEIGHTS, BATCH)


def test_ctrl_c_ends_the_step_and_says_where_it_was():
    started = threading.Event()

    def slow(x):
        started.set()
        time.sleep(0.5)
        return x

    step = make_step(slow)
    step.compile(WEIGHTS, BATCH)

    def interrupt():
        started.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        step(WEIGHTS, BATCH)
    assert time.monotonic() - begin < 30
    assert any("rank 1 at RUN 1F0" in note for note in caught.value.__notes__)
    losses, _ = step(WEIGHTS, BATCH)
    np.testing.assert_allclose(losses, 6 * BATCH[:, 0] ** 2)


def test_values_are_freed_after_their_last_use():
    program = make_step().compile(WEIGHTS, BATCH).plan.program
    for rank in program.ranks:
        for position, instruction in enumerate(rank.instructions):
            if isinstance(instruction, Send) and instruction.tag[1] == "F":
                freed = rank.instructions[position + 1]
                assert isinstance(freed, Free)
                assert set(freed.slots) <= set(instruction.slots)


def test_nothing_but_results_and_constants_outlives_a_step():
    step = make_step()
    losses, gradients = step(WEIGHTS, BATCH)
    runtime = step.compile(WEIGHTS, BATCH).runtime
    kept = [array for actor in runtime._actors for array in actor.slots if array is not None]
    constants = sum(len(rank.constants) for rank in runtime.program.ranks)
    assert len(kept) == constants
    assert {losses.shape, gradients.shape} == {(MICROBATCHES,), (2,)}


def test_spans_cover_every_run_in_order():
    step = make_step()
    step(WEIGHTS, BATCH)
    spans = step.compile(WEIGHTS, BATCH).runtime.spans
    for rank in (0, 1):
        own = [span for span in spans if span.rank == rank]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(own))
        tasks = [str(span.run.action) for span in own if span.run.action is not None]
        assert sorted(tasks) == sorted(f"{rank}{kind}{m}" for kind in "FB" for m in range(4))


def test_threads_end_with_their_step():
    step = make_step()
    step(WEIGHTS, BATCH)
    actors = [weakref.ref(actor._thread) for actor in step.compile(WEIGHTS, BATCH).runtime._actors]
    del step
    gc.collect()
    deadline = time.monotonic() + 10
    while any(ref() is not None and ref().is_alive() for ref in actors):
        assert time.monotonic() < deadline, "actor threads outlive the function that made them"
        time.sleep(0.01)
