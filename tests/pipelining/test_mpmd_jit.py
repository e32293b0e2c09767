"""The public door: any JAX code, NNX or Linen; the user's own schedules; clear refusals."""

import concurrent.futures

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.errors import StageError
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB

BATCH = np.linspace(-1, 1, 4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)


def loss(w, x):
    return jnp.sum(pipeline_yield(jnp.tanh(x @ w[0])) @ w[1])


def step(w, batch):
    return accumulate_grads(lambda x: jax.value_and_grad(loss)(w, x), batch)


def weights():
    return [jax.random.normal(key, (3, 3)) for key in jax.random.split(jax.random.key(0))]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.second = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(pipeline_yield(nnx.gelu(self.first(x))))


def net_loss(model, x):
    return ((model(x) - x) ** 2).sum()


@pytest.mark.parametrize("closed_over_in_the_loop", [True, False])
def test_nnx_modules_and_optimizers_are_updated_in_place(closed_over_in_the_loop):
    def train(model, optimizer, batch):
        if closed_over_in_the_loop:
            losses, grads = accumulate_grads(
                lambda x: nnx.value_and_grad(net_loss)(model, x), batch
            )
        else:
            graphdef, params = nnx.split(model)
            losses, grads = accumulate_grads(
                lambda x: jax.value_and_grad(lambda p: net_loss(nnx.merge(graphdef, p), x))(params),
                batch,
            )
        optimizer.update(model, grads)
        return losses.sum()

    runs = []
    pipelined = mpmd_jit(train, mesh=MeshSpec(pipe=2), schedule=OneFOneB())
    for function in (pipelined, nnx.jit(train)):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses = [float(function(model, optimizer, BATCH)) for _ in range(3)]
        runs.append((losses, jax.tree.leaves(nnx.state((model, optimizer)))))
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-5)
    assert runs[0][0][2] < runs[0][0][0]
    for ours, theirs in zip(runs[0][1], runs[1][1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_linen_modules_work():
    class LinenNet(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(pipeline_yield(linen.gelu(linen.Dense(4)(x))))

    model = LinenNet()
    params = model.init(jax.random.key(0), BATCH[0])

    def train(params, batch):
        def linen_loss(params, x):
            return ((model.apply(params, x) - x) ** 2).sum()

        return accumulate_grads(lambda x: jax.value_and_grad(linen_loss)(params, x), batch)

    ours = mpmd_jit(train, mesh=MeshSpec(pipe=2), schedule=ZBH1())(params, BATCH)
    theirs = jax.jit(train)(params, BATCH)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class BackwardsAsSoonAsPossible:
    """A user's schedule: each micro-batch goes through alone."""

    name = "one at a time"

    def num_stages(self, num_ranks):
        return num_ranks

    def order(self, num_ranks, num_microbatches):
        actions = tuple(
            tuple(
                Action(rank, kind, m) for m in range(num_microbatches) for kind in (Kind.F, Kind.B)
            )
            for rank in range(num_ranks)
        )
        return Order(actions, tuple(range(num_ranks)), num_microbatches)


def test_a_users_schedule_by_protocol():
    ours = mpmd_jit(step, mesh=MeshSpec(pipe=2), schedule=BackwardsAsSoonAsPossible())(
        weights(), BATCH
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(step(weights(), BATCH)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_same_stages_of_a_rank_share_an_executable():
    def deep(w, x):
        for _ in range(3):
            x = pipeline_yield(jnp.tanh(x @ w))
        return jnp.sum(jnp.tanh(x @ w))

    function = mpmd_jit(
        lambda w, b: accumulate_grads(lambda x: jax.value_and_grad(deep)(w, x), b),
        mesh=MeshSpec(pipe=1),
        schedule=Interleaved1F1B(repeat=4),
    )
    compiled = function.compile(weights()[0], BATCH)
    executables = compiled.runtime._actors[0]._executables
    codes = compiled.plan.program.codes
    forward = {c.name: executables[i] for i, c in enumerate(codes) if c.name.startswith("F of")}
    assert forward["F of stage 1"] is forward["F of stage 2"]
    assert forward["F of stage 1"] is not forward["F of stage 3"]


class Idle(BackwardsAsSoonAsPossible):
    """Half as many stages as ranks."""

    def num_stages(self, num_ranks):
        return num_ranks // 2


def call(*, pipe=2, schedule=GPipe(), function=step, batch=BATCH):  # noqa: B008
    return mpmd_jit(function, mesh=MeshSpec(pipe=pipe), schedule=schedule)(weights(), batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: call(pipe=9), r"needs 9 devices.*sees 8"),
        (lambda: call(pipe=4), "needs 4 stages.* has 1 stage marks"),
        (lambda: call(pipe=4, schedule=Idle()), "2 stages on 4 ranks"),
        (lambda: call(schedule="1f1b"), "must be a Schedule"),
        (lambda: call(function=lambda w, b: loss(w, b[0])), "calls it 0 times"),
        (lambda: call(batch="text"), r"args\[1\].*got str"),
        (lambda: call(batch=BATCH[:0]), "at least one micro-batch"),
        (lambda: MeshSpec(pipe=0), "'pipe' must be a positive integer, got 0"),
        (lambda: MeshSpec(pipe=2, devices=(1, 1)), "once"),
    ],
)
def test_refusals_say_what_is_wrong_in_few_lines(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    text = str(caught.value)
    assert len(text.splitlines()) <= 15
    assert "lambda ;" not in text


def test_numbers_of_microbatches_compile_once_each():
    function = mpmd_jit(step, mesh=MeshSpec(pipe=2), schedule=OneFOneB())
    for microbatches in (4, 2, 4, 1, 2):
        losses, _ = function(weights(), BATCH[:microbatches])
        np.testing.assert_allclose(losses, step(weights(), BATCH[:microbatches])[0], rtol=1e-5)
    assert len(function._compiled) == 3


def small_loss(w, x):
    return jnp.mean((pipeline_yield(jnp.tanh(x @ w[0])) @ w[1] - x) ** 2)


SMALL = (jnp.eye(4), jnp.eye(4))


def test_two_threads_take_turns():
    step = mpmd_jit(
        lambda w, b: accumulate_grads(lambda m: jax.value_and_grad(small_loss)(w, m), b)[0],
        mesh=MeshSpec(pipe=2), schedule=OneFOneB(),
    )  # fmt: skip
    x = jnp.ones((4, 2, 4))
    wanted = [np.asarray(step(SMALL, x * i)) for i in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [(i, pool.submit(step, SMALL, x * (i + 1))) for _ in range(20) for i in (0, 1)]
        for i, future in runs:
            np.testing.assert_array_equal(future.result(timeout=60), wanted[i])


def test_a_mark_that_is_differentiated_twice_is_refused():
    def twice(w, x):
        value, back = jax.vjp(lambda w: small_loss(w, x), w)
        return value, (back(1.0)[0], back(2.0)[0])

    step = mpmd_jit(
        lambda w, b: accumulate_grads(lambda m: twice(w, m), b),
        mesh=MeshSpec(pipe=2), schedule=OneFOneB(),
    )  # fmt: skip
    with pytest.raises(StageError, match="differentiated twice"):
        step(SMALL, jnp.ones((4, 2, 4)))


def test_float64_is_kept_where_it_is_switched_on():
    with jax.enable_x64(True):
        weights = tuple(jnp.asarray(w, jnp.float64) for w in SMALL)
        step = lambda w, b: accumulate_grads(lambda m: jax.value_and_grad(small_loss)(w, m), b)  # noqa: E731
        batch = jnp.ones((4, 2, 4), jnp.float64)
        got = mpmd_jit(step, mesh=MeshSpec(pipe=2), schedule=OneFOneB())(weights, batch)
        wanted = jax.jit(step)(weights, batch)
        assert got[1][0].dtype == jnp.float64
        np.testing.assert_allclose(got[1][0], wanted[1][0], rtol=1e-12)


@pytest.mark.parametrize("name", ["donate_argnums", "static_argnums"])
def test_positions_are_counted_from_the_front(name):
    options = {"mesh": MeshSpec(pipe=2), "schedule": OneFOneB()}
    with pytest.raises(ValueError, match=rf"{name} counts arguments from 0, got \(-1,\)"):
        mpmd_jit(step, **options, **{name: -1})
    assert mpmd_jit(step, **options, **{name: 1}) is not None  # a number stands for itself
