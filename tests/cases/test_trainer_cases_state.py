"""Cases 21, 28, 29 and 33 of CASES.md, through the Trainer: the state is changed by steps alone.

Evaluation leaves no trace, nothing compiles twice, the user's arrays stay the user's, and what is
counted is updates, not micro-batches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.nn import PipelinedModule, pipeline_yield
from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.schedules import by_name
from stagewright.trainer.checkpoints import Checkpoints
from stagewright.trainer.trainer import Trainer

ENGINES = ["single", "1f1b", "zbh1"]


def make_trainer(kind: str, model, optimizer, microbatches: int = 2, **options) -> Trainer:
    if kind == "single":
        engine, mesh = SingleProgramEngine(microbatches), MeshSpec()
    else:
        engine, mesh = MpmdEngine(by_name(kind), microbatches), MeshSpec(pipe=2)
    options = {"mesh": mesh, **options}
    return Trainer(model=model, optimizer=optimizer, engine=engine, **options)


def wave(key, shape, dtype):
    """Weights that need no random numbers, whose programs take long to compile."""
    del key
    return jnp.sin(jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, kernel_init=wave, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Net(PipelinedModule):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = self.layers(Layer, 2, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x)

    def loss(self, batch):
        errors = jnp.sum((self(batch["x"]) - batch["y"]) ** 2, axis=-1)
        return jnp.sum(errors), jnp.float32(errors.size), {}


def batches_of(size: int, count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {name: rng.normal(size=(size, 4)).astype(np.float32) for name in ("x", "y")}
        for _ in range(count)
    ]


def bits(tree) -> list[bytes]:
    def plain(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return [np.asarray(plain(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


# ---- case 21 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["single", "1f1b"])
def test_case_21_evaluation_leaves_no_trace(kind: str) -> None:
    first, second = batches_of(4, 2)
    plain = make_trainer(kind, Net, optax.adam(0.01))
    losses = [*plain.fit([first], 1).losses, *plain.fit([second], 1).losses]

    trainer = make_trainer(kind, Net, optax.adam(0.01))
    trainer.evaluate(batches_of(8, 1, seed=1))
    disturbed = [*trainer.fit([first], 1).losses]
    before = bits(trainer.state)
    trainer.evaluate(batches_of(6, 1, seed=1))
    trainer.model()(jnp.ones((3, 4)))
    assert bits(trainer.state) == before
    disturbed += trainer.fit([second], 1).losses
    assert disturbed == losses
    assert bits(trainer.state) == bits(plain.state)


def test_case_21_evaluation_is_exact_over_ragged_data_and_without_dropout() -> None:
    trainer = make_trainer("1f1b", Net, optax.adam(0.01))
    data = [*batches_of(8, 2), *batches_of(3, 1, seed=5)]
    model = Net(nnx.Rngs(0))
    model.eval()
    sums = [model.loss(batch)[0] for batch in data]
    found = trainer.evaluate(data)
    assert found["tokens"] == 19
    np.testing.assert_allclose(found["loss"], float(sum(sums)) / 19, rtol=1e-6)


def test_case_21_predict_is_plain_apply() -> None:
    trainer = make_trainer("1f1b", Net, optax.identity())
    model = Net(nnx.Rngs(0))
    model.eval()
    x = batches_of(5, 1)[0]["x"]
    # The Trainer's model is cut in two, so its layers do not run in one scan: rounding differs.
    np.testing.assert_allclose(trainer.model()(x), model(x), rtol=1e-6, atol=1e-6)


# ---- case 28 ------------------------------------------------------------------------------------


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


class CountingLogger:
    """Writes down how much was compiled by each step."""

    def __init__(self, compilations):
        self.compilations, self.counts = compilations, []

    def start(self, info) -> None: ...

    def log(self, step, values) -> None:
        self.counts.append(self.compilations())

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", ["single", "1f1b"])
def test_case_28_nothing_compiles_after_the_first_step(kind, compilations, tmp_path) -> None:
    logger = CountingLogger(compilations)
    checkpoints = Checkpoints(tmp_path / "a")
    trainer = make_trainer(kind, Net, optax.adam(0.01), loggers=[logger], checkpoints=checkpoints)
    trainer.evaluate(batches_of(6, 1))
    trainer.fit(batches_of(4, 1), 1)
    settled = compilations()
    trainer.fit(batches_of(4, 3), 3)
    trainer.evaluate(batches_of(6, 1))
    trainer.fit(batches_of(4, 2), 2)
    assert compilations() == settled

    resumed = make_trainer(kind, Net, optax.adam(0.01), loggers=[logger])
    resumed.restore(checkpoints.path)
    logger.counts.clear()
    resumed.fit(batches_of(4, 3), 3)
    assert logger.counts[1:] == [logger.counts[0]] * 2


# ---- case 29 ------------------------------------------------------------------------------------


class EmaState(NamedTuple):
    ema: nnx.State


def sgd_with_ema(rate: float, decay: float) -> optax.GradientTransformation:
    """SGD whose state starts as a reference to the parameters."""

    def update(grads, state, params):
        updates = jax.tree.map(lambda g: -rate * g, grads)
        new = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state.ema, new)
        return updates, EmaState(ema)

    return optax.GradientTransformation(EmaState, update)


class Unit(nnx.Module):
    """Gradient 1 for each of its two parameters, one in each stage."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Param(jnp.float32(1.0))
        self.b = nnx.Param(jnp.float32(1.0))

    def loss(self, batch):
        x = pipeline_yield(self.a[...] * batch["x"])
        return jnp.sum(x + self.b[...] * batch["x"]), jnp.float32(batch["x"].size), {}


ONES = {"x": np.ones(4, np.float32)}


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("kind", ENGINES)
def test_case_29_and_33_a_moving_average_may_start_as_the_parameters(kind, given) -> None:
    params = nnx.state(Unit(nnx.Rngs(0)), nnx.Param) if given else None
    trainer = make_trainer(kind, Unit, sgd_with_ema(1.0, 0.5), 4, params=params)
    state = trainer.fit([ONES, ONES], 2).state
    for name in "ab":
        assert float(state.params[name].get_value()) == -1.0
        assert float(state.opt_state.ema[name].get_value()) == -0.25


@pytest.mark.parametrize("kind", ["single", "1f1b"])
def test_case_29_the_users_parameters_stay_the_users(kind: str) -> None:
    params = nnx.state(Unit(nnx.Rngs(7)), nnx.Param)
    before = bits(params)
    trainer = make_trainer(kind, Unit, optax.sgd(0.1), params=params)
    assert bits(trainer.params) == before
    trainer.fit([ONES, ONES], 2)
    assert bits(params) == before
    assert bits(trainer.params) != before


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("single", MeshSpec(devices=(3,))), ("1f1b", MeshSpec(pipe=2, devices=(3, 1)))],
)
def test_case_29_devices_may_come_in_any_order(kind: str, mesh: MeshSpec) -> None:
    data = [ONES, {"x": np.arange(4, dtype=np.float32)}]
    sorted_order = make_trainer(kind, Unit, optax.adam(0.01)).fit(data, 2)
    other_order = make_trainer(kind, Unit, optax.adam(0.01), mesh=mesh).fit(data, 2)
    assert other_order.losses == sorted_order.losses
    assert bits(other_order.state) == bits(sorted_order.state)


def test_parameters_that_do_not_fit_are_refused_by_name() -> None:
    params = nnx.state(Unit(nnx.Rngs(0)), nnx.Param)
    with pytest.raises(ValueError, match=r"only one of the two has .*blocks"):
        make_trainer("single", Net, optax.sgd(0.1), params=params)


# ---- case 33 ------------------------------------------------------------------------------------


class RateLogger:
    def __init__(self):
        self.rates = []

    def start(self, info) -> None: ...

    def log(self, step, values) -> None:
        self.rates.append(values["learning_rate"])

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", ENGINES)
def test_case_33_schedules_count_updates(kind: str) -> None:
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    logger = RateLogger()
    trainer = make_trainer(kind, Unit, optimizer, 4, loggers=[logger])
    trainer.fit([ONES] * 3, 3)
    assert logger.rates == [0.0, 0.25, 0.5]
    assert float(trainer.params["a"].get_value()) == 1.0 - 0.75


class Affine(nnx.Module):
    """Kernel, bias and scale, all 1, and all without a gradient."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.ones((2, 2)))
        self.bias = nnx.Param(jnp.ones(2))
        self.scale = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return x + 0 * (x @ self.kernel[...] + (self.scale[...] + self.bias[...])[None])


class FourAffine(PipelinedModule):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = self.layers(Affine, 4, rngs=rngs)

    def loss(self, batch):
        y = self.blocks(batch["x"])
        return jnp.sum(y), jnp.float32(len(y)), {}


@pytest.mark.parametrize("kind", ["single", "1f1b"])
def test_case_33_decay_masks_hold_in_every_stage(kind: str) -> None:
    mask = lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params)  # noqa: E731
    optimizer = optax.chain(optax.add_decayed_weights(0.1, mask=mask), optax.sgd(1.0))
    trainer = make_trainer(kind, FourAffine, optimizer)
    trainer.fit([{"x": np.zeros((4, 2), np.float32)}], 1)
    for layer in range(4):
        found = trainer.params["blocks"]["layers"][layer]
        np.testing.assert_array_equal(found["bias"].get_value(), 1.0)
        np.testing.assert_array_equal(found["scale"].get_value(), 1.0)
        np.testing.assert_allclose(found["kernel"].get_value(), 0.9, rtol=1e-6)
