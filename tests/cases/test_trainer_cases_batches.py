"""Cases 17, 19 and 20 of CASES.md, through the Trainer: batches of every shape, or a refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.nn import pipeline_yield
from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.schedules import by_name
from stagewright.trainer.trainer import Trainer

ENGINES = ["single", "1f1b", "zbh1"]


def make_trainer(kind: str, model, optimizer, microbatches: int, **options) -> Trainer:
    if kind == "single":
        engine, mesh = SingleProgramEngine(microbatches), MeshSpec()
    else:
        engine, mesh = MpmdEngine(by_name(kind), microbatches), MeshSpec(pipe=2)
    return Trainer(model=model, optimizer=optimizer, engine=engine, mesh=mesh, **options)


class Regression(nnx.Module):
    """Two layers on sequences of any length, a stage each."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.second = nnx.Linear(5, 3, rngs=rngs)

    def loss(self, batch):
        hidden = pipeline_yield(jnp.tanh(self.first(batch["x"])))
        errors = jnp.sum((self.second(hidden) - batch["y"]) ** 2, axis=-1)
        return jnp.sum(errors), jnp.float32(errors.size), {}


def batch_of(size: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (size, length, 3)
    return {name: rng.normal(size=shape).astype(np.float32) for name in ("x", "y")}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    ("batch", "microbatches", "message"),
    [
        (batch_of(8, 2), 3, r"'x' holds 8 examples.*3 micro-batches"),
        (batch_of(8, 2) | {"y": batch_of(7, 2)["y"]}, 2, r"'x' has 8 examples, but 'y'.*has 7"),
    ],
)
def test_case_17_what_does_not_divide_is_refused(kind, batch, microbatches, message) -> None:
    trainer = make_trainer(kind, Regression, optax.sgd(0.1), microbatches)
    with pytest.raises(ValueError, match=message):
        trainer.fit([batch], 1)


def test_case_17_replicas_count_too() -> None:
    # An engine without data parallelism refuses the mesh; one with it, micro-batches of 2 for 4.
    engine, mesh = MpmdEngine(by_name("1f1b"), 4), MeshSpec(pipe=2, data=4)
    with pytest.raises((ValueError, NotImplementedError), match="data=4"):
        Trainer(model=Regression, optimizer=optax.sgd(0.1), engine=engine, mesh=mesh).fit(
            [batch_of(8, 2)], 1
        )


def reference_losses(batches, optimizer) -> tuple[list[float], nnx.State]:
    """Plain JAX on the whole batch."""
    graphdef, params = nnx.split(Regression(nnx.Rngs(0)), nnx.Param)
    opt_state = optimizer.init(params)
    losses = []
    for batch in batches:

        def mean_loss(params, batch=batch):
            total, count, _ = nnx.merge(graphdef, params).loss(batch)
            return total / count

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


@pytest.mark.parametrize("kind", ["single", "1f1b"])
def test_case_19_lengths_may_change_from_step_to_step(kind: str, compilations) -> None:
    batches = [batch_of(8, length, seed) for seed, length in enumerate([8, 12, 8, 5])]
    optimizer = optax.adam(0.01)
    losses, params = reference_losses(batches, optimizer)
    trainer = make_trainer(kind, Regression, optimizer, 4)
    trainer.fit(batches[:2], 2)
    before = compilations()
    third = trainer.fit(batches[2:3], 1)
    assert compilations() == before, "a length that was seen before compiles nothing"
    fourth = trainer.fit(batches[3:], 1)
    assert compilations() > before
    np.testing.assert_allclose([*third.losses, *fourth.losses], losses[2:], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(trainer.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Axes(nnx.Module):
    """Leaves with their batch axis elsewhere, or none."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.float32(1.0))

    def loss(self, batch):
        x = pipeline_yield(self.w[...] * batch["x"])
        assert batch["mrope"].shape == (3, 2, 4)
        total = jnp.sum(x + batch["pos"]) + 0 * jnp.sum(batch["mrope"]) + 0 * batch["n"]
        return total, jnp.float32(2), {}


AXES_BATCH = {
    "x": np.ones((8, 4), np.float32),
    "pos": np.arange(4, dtype=np.float32)[None],
    "mrope": np.zeros((3, 8, 4), np.float32),
    "n": 2,
}


@pytest.mark.parametrize("kind", ENGINES)
def test_case_20_each_leaf_names_its_axis(kind: str) -> None:
    axes = {"pos": None, "mrope": 1, "n": None}
    trainer = make_trainer(kind, Axes, optax.sgd(0.0), 4, batch_axes=axes)
    result = trainer.fit([AXES_BATCH], 1)
    assert result.losses[0] * result.metrics["tokens"] == 80.0


def test_case_20_without_names_the_leaf_is_told() -> None:
    batch = {name: AXES_BATCH[name] for name in ("x", "pos")}
    trainer = make_trainer("single", Axes, optax.sgd(0.0), 4)
    with pytest.raises(ValueError, match=r"'x' has 8 .*'pos' of shape \(1, 4\).*\{'pos': None\}"):
        trainer.fit([batch], 1)


@pytest.fixture
def compilations():
    """How many programs XLA has compiled so far."""
    count = 0

    def listen(event: str, duration: float, **_: object) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count
    jax.monitoring.unregister_event_duration_listener(listen)
