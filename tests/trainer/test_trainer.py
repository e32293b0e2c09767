"""The Trainer ties parts together: results, refusals before step 1, and an orderly end."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.schedules import by_name
from stagewright.trainer.checkpoints import Checkpoints
from stagewright.trainer.trainer import Trainer


class Recorder:
    """Keeps what it is told; may run something at a step."""

    def __init__(self, at: int = 0, action=lambda: None):
        self.infos, self.steps, self.values, self.closed = [], [], [], 0
        self._at, self._action = at, action

    def start(self, info) -> None:
        self.infos.append(info)

    def log(self, step, values) -> None:
        self.steps.append(step)
        self.values.append(dict(values))
        if step == self._at:
            self._action()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def make_trainer(tiny_net):
    def make(**options) -> Trainer:
        options = {"engine": SingleProgramEngine(2), "optimizer": optax.sgd(0.01)} | options
        return Trainer(model=options.pop("model", tiny_net), **options)

    return make


def test_a_fit_tells_losses_metrics_state_and_step(make_trainer, tiny_batches) -> None:
    recorder = Recorder()
    trainer = make_trainer(loggers=[recorder])
    result = trainer.fit(tiny_batches(3), 3)
    assert (result.step, len(result.losses), int(result.state.step)) == (3, 3, 3)
    assert recorder.steps == [1, 2, 3]
    assert recorder.closed == 1
    assert [values["loss"] for values in recorder.values] == result.losses
    assert result.metrics == recorder.values[-1]
    assert {"loss", "grad_norm", "tokens", "skipped", "error", "step_seconds"} <= set(
        result.metrics
    )
    assert all(type(value) in (int, float) for value in result.metrics.values())
    assert all(values["step_seconds"] > 0 for values in recorder.values)


def test_loggers_hear_of_stages_and_steps(make_trainer, tiny_batches) -> None:
    recorder = Recorder()
    engine, mesh = MpmdEngine(by_name("1f1b"), 2), MeshSpec(pipe=2)
    trainer = make_trainer(engine=engine, mesh=mesh, loggers=[recorder], settings={"a": 1})
    trainer.fit(tiny_batches(2), 2)
    trainer.fit(tiny_batches(1), 1)
    first, second = recorder.infos
    assert first.layers_per_stage == (1, 1)
    assert first.num_parameters == 2 * (4 * 4 + 4)
    assert (first.first_step, first.last_step, second.first_step) == (1, 2, 3)
    assert first.settings == {"a": 1}
    assert recorder.steps == [1, 2, 3]
    assert 0 <= recorder.values[-1]["bubble"] <= 1


def test_two_fits_are_one_longer_fit(make_trainer, tiny_batches, bits) -> None:
    data = tiny_batches(4)
    once, twice = make_trainer(), make_trainer()
    losses = once.fit(data, 4).losses
    batches = iter(data)
    assert [*twice.fit(batches, 1).losses, *twice.fit(batches, 3).losses] == losses
    assert bits(once.state) == bits(twice.state)


def test_a_fit_takes_no_more_batches_than_steps(make_trainer, tiny_batches) -> None:
    batches = iter(tiny_batches(5))
    make_trainer().fit(batches, 3)
    assert len(list(batches)) == 2


def test_data_that_ends_early_is_told(make_trainer, tiny_batches) -> None:
    with pytest.warns(RuntimeWarning, match="ended at step 2, before step 5"):
        result = make_trainer().fit(tiny_batches(2), 5)
    assert len(result.losses) == 2


def test_refusals(make_trainer, tiny_batches) -> None:
    with pytest.raises(ValueError, match="data is empty"):
        make_trainer().fit([], 1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make_trainer().fit(tiny_batches(1), 0)
    with pytest.raises(RuntimeError, match="nothing was fitted"):
        _ = make_trainer().state
    with pytest.raises(ValueError, match="has no pipeline, but the mesh has pipe=2"):
        make_trainer(mesh=MeshSpec(pipe=2))
    with pytest.raises(ValueError, match=r"2 layers.*3|3.*2 layers"):
        make_trainer(engine=MpmdEngine(by_name("1f1b"), 2), mesh=MeshSpec(pipe=3))
    with pytest.raises(TypeError, match=r"method loss.*got Linear"):
        make_trainer(model=lambda rngs: nnx.Linear(2, 2, rngs=rngs))


def test_a_directory_in_use_is_refused_before_anything_compiles(
    make_trainer, tiny_batches, tmp_path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    recorder = Recorder()
    trainer = make_trainer(checkpoints=Checkpoints(tmp_path), loggers=[recorder])
    with pytest.raises(FileExistsError, match="not empty"):
        trainer.fit(tiny_batches(1), 1)
    assert not recorder.infos


class FailingStep:
    def __init__(self, summary):
        self.summary = summary

    def place(self, state):
        return state

    def __call__(self, state, batch):
        raise RuntimeError("a device was lost")


def test_a_failed_step_leaves_no_state_to_mistake_for_a_good_one(make_trainer, tiny_batches):
    trainer = make_trainer()
    trainer.fit(tiny_batches(1), 1)

    (shapes,) = trainer._steps
    step = trainer._steps[shapes]
    trainer._steps[shapes] = FailingStep(step.summary)
    with pytest.raises(RuntimeError, match="a device was lost"):
        trainer.fit(tiny_batches(1), 1)
    trainer._steps[shapes] = step
    with pytest.raises(RuntimeError, match=r"step 2 failed"):
        trainer.fit(tiny_batches(1), 1)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_after_the_step_with_its_checkpoint(
    make_trainer, dropping_net, tiny_batches, tmp_path, bits
) -> None:
    data = tiny_batches(9)
    recorder = Recorder(at=3, action=press_ctrl_c)  # step 3 is reported while step 4 runs
    checkpoints = Checkpoints(tmp_path / "c")
    trainer = make_trainer(model=dropping_net, loggers=[recorder], checkpoints=checkpoints)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4"):
        trainer.fit(data, 9)
    assert recorder.steps == [1, 2, 3, 4]
    assert recorder.closed == 1
    resumed = make_trainer(model=dropping_net)
    assert resumed.restore(checkpoints.path) == 4
    resumed.fit(data[4:], 5)
    whole = make_trainer(model=dropping_net)
    whole.fit(data, 9)
    assert bits(resumed.state) == bits(whole.state)


def test_a_second_ctrl_c_ends_at_once(make_trainer, tiny_batches) -> None:
    def twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    recorder = Recorder(at=1, action=twice)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(loggers=[recorder]).fit(tiny_batches(9), 9)
    assert recorder.steps == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fit_in_another_thread_leaves_signals_alone(make_trainer, tiny_batches) -> None:
    losses = []
    trainer = make_trainer()
    thread = threading.Thread(target=lambda: losses.extend(trainer.fit(tiny_batches(1), 1).losses))
    thread.start()
    thread.join()
    assert len(losses) == 1


def test_parameters_before_a_fit_are_those_it_starts_from(make_trainer, tiny_batches, bits):
    trainer = make_trainer(optimizer=optax.sgd(0.0))
    before = bits(trainer.params)
    trainer.fit(tiny_batches(1), 1)
    assert bits(trainer.params) == before


def test_the_model_is_a_copy(make_trainer, tiny_batches) -> None:
    trainer = make_trainer()
    trainer.fit(tiny_batches(1), 1)
    model = trainer.model()
    x = np.ones((1, 4), np.float32)
    before = np.asarray(model(x))
    trainer.fit(tiny_batches(2), 2)
    np.testing.assert_array_equal(model(x), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, r"model must be a constructor.*got int"),
        ({"optimizer": optax.adamw}, r"optimizer must be an Optax transformation.*got adamw"),
        ({"mesh": 2}, r"mesh must be a MeshSpec such as MeshSpec\(pipe=2\), got 2"),
        ({"engine": SingleProgramEngine}, r"engine must be an engine such as MpmdEngine\(\)"),
    ],
)
def test_a_part_of_another_kind_is_named(tiny_net, changes: dict, message: str) -> None:
    parts = {"model": tiny_net, "optimizer": optax.sgd(0.1), "engine": SingleProgramEngine()}
    with pytest.raises(TypeError, match=message):
        Trainer(**{**parts, **changes})


def test_a_model_is_passed_as_a_constructor(tiny_net) -> None:
    class ByName(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jnp.ones(2))

        def loss(self, batch):
            return jnp.sum(self.w[...]), jnp.float32(1), {}

    engine, optimizer = SingleProgramEngine(), optax.sgd(0.1)
    with pytest.raises(TypeError, match="write model=lambda rngs: ByName"):
        Trainer(model=ByName, optimizer=optimizer, engine=engine)
    with pytest.raises(TypeError, match="must be a constructor"):
        Trainer(model=tiny_net(nnx.Rngs(0)), optimizer=optimizer, engine=engine)


def test_what_is_no_run_of_batches_is_refused(tiny_net, tiny_batches) -> None:
    trainer = Trainer(model=tiny_net, optimizer=optax.sgd(0.1), engine=SingleProgramEngine())
    with pytest.raises(ValueError, match=r"a single mapping with \['x', 'y'\]; pass \[batch\]"):
        trainer.fit(tiny_batches(1)[0], 1)
    with pytest.raises(ValueError, match=r"whole number of steps, at least 1, got 2\.5"):
        trainer.fit(tiny_batches(1), 2.5)


def test_the_first_loss_that_is_no_number_is_told_once(tiny_net, tiny_batches) -> None:
    batches = tiny_batches(5)
    batches[2]["x"][0, 0] = np.nan
    trainer = Trainer(model=tiny_net, optimizer=optax.sgd(0.1), engine=SingleProgramEngine())
    with pytest.warns(RuntimeWarning, match="loss of step 3 is nan; the last good one was") as told:
        trainer.fit(batches, 5)
    assert len(told) == 1


def test_parameters_may_come_from_a_trainer_on_another_mesh(tiny_net, tiny_batches) -> None:
    parts = {"model": tiny_net, "optimizer": optax.sgd(0.1)}
    first = Trainer(**parts, engine=MpmdEngine(microbatches=2), mesh=MeshSpec(pipe=2))
    first.fit(tiny_batches(2), 2)
    second = Trainer(**parts, engine=SingleProgramEngine(2), params=first.params)
    np.testing.assert_array_equal(
        jax.tree.leaves(second.params)[0], jax.tree.leaves(first.params)[0]
    )
    assert second.fit(tiny_batches(1), 1).losses
