"""A step is reported once the next has begun, with the time that it took itself."""

import types

import jax
import jax.numpy as jnp
import pytest

from stagewright.pipelining.actions import parse_action
from stagewright.pipelining.timeline import Span, Timeline
from stagewright.trainer import reports
from stagewright.trainer.reports import StepReporter


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reports, "time", clock)
    return clock


def make_timeline(*busy: float) -> Timeline:
    """A step of one second: rank i runs stage i's forward for busy[i] seconds."""
    spans = [Span(i, parse_action(f"{i}F0"), 1.0 - length, 1.0) for i, length in enumerate(busy)]
    return Timeline(tuple(spans), len(busy), unit="s")


def make_compiled(timeline: Timeline | None):
    return types.SimpleNamespace(
        summary=types.SimpleNamespace(planned_bubble=0.25), last_timeline=timeline
    )


def make_metrics(loss: float) -> dict:
    return {"loss": jnp.float32(loss), "tokens": jnp.int32(8)}


def test_reports_come_one_step_late_and_in_order(clock: Clock) -> None:
    heard = []
    reporter = StepReporter(lambda step, values: heard.append((step, values["loss"])))
    compiled = make_compiled(None)
    clock.now += 1
    reporter.submit(1, make_metrics(3.0), compiled)
    assert heard == []
    clock.now += 1
    reporter.submit(2, make_metrics(2.0), compiled)
    assert heard == [(1, 3.0)]
    reporter.flush()
    reporter.flush()
    assert heard == [(1, 3.0), (2, 2.0)]
    assert reporter.losses == [3.0, 2.0]
    assert reporter.latest["bubble_planned"] == 0.25
    assert "bubble" not in reporter.latest


def test_a_step_that_ended_at_once_is_timed_there_and_then(clock: Clock) -> None:
    heard = []
    reporter = StepReporter(lambda step, values: heard.append(values))
    compiled = make_compiled(make_timeline(0.5, 1.0))
    metrics = make_metrics(1.0)
    jax.block_until_ready(metrics)
    clock.now += 2
    reporter.submit(1, metrics, compiled)
    compiled.last_timeline = make_timeline(0.25, 0.25)  # the next step's
    clock.now += 5
    reporter.flush()
    assert heard[0]["step_seconds"] == 2
    assert heard[0]["bubble"] == 0.25
    assert heard[0]["bubble_imbalance"] == 0.25  # rank 0 has half a second less to do
    assert heard[0]["bubble_drain"] == heard[0]["bubble_barrier"] == 0
    assert heard[0]["tokens_per_second"] == 4


def test_the_clock_may_be_restarted(clock: Clock) -> None:
    heard = []
    reporter = StepReporter(lambda step, values: heard.append(values))
    clock.now += 5
    reporter.restart_clock()
    clock.now += 1
    reporter.submit(1, make_metrics(1.0), make_compiled(None))
    reporter.flush()
    assert heard[0]["step_seconds"] == 1
