"""MpmdEngine gives SingleProgramEngine's numbers, makes its state where it is read, and compiles nothing twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.engines import MpmdEngine, SingleProgramEngine
from stagewright.pipelining.jax_seams import count_compilations
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.schedules import ZBH1, Interleaved1F1B, OneFOneB

MICROBATCHES, WIDTH, LAYERS = 4, 8, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def init():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {f"w{i}": jax.random.normal(key, (WIDTH, WIDTH)) / 3 for i, key in enumerate(keys)}
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}


def loss(params, x):
    hidden = x
    for i in range(LAYERS):
        hidden = jnp.tanh(hidden @ params[f"w{i}"])
        if i < LAYERS - 1:
            hidden = pipeline_yield(hidden)
    return jnp.mean((hidden - x) ** 2)


def step(state, batch):
    losses, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(state["params"], x), batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": jnp.mean(losses), "norm": optax.tree.norm(grads)}
    return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics


def batches(num):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(MICROBATCHES, 2, WIDTH)).astype(np.float32) for _ in range(num)]


def run(engine, mesh):
    compiled = engine.compile(init=init, step=step, batch=batches(1)[0], mesh=mesh)
    state, values = compiled.init(), []
    born = jax.tree.map(np.asarray, state["params"])
    with count_compilations() as count:
        for batch in batches(3):
            state, metrics = compiled(state, batch)
            values.append(jax.tree.map(float, metrics))
    return compiled, born, state, values, count()


@pytest.fixture(scope="module")
def one_device():
    return run(SingleProgramEngine(microbatches=MICROBATCHES), MeshSpec())


@pytest.mark.parametrize(
    ("schedule", "pipe"), [(OneFOneB(), 4), (ZBH1(), 2), (Interleaved1F1B(repeat=2), 2)]
)
def test_same_numbers_as_one_device(one_device, schedule, pipe):
    compiled, born, state, values, compilations = run(
        MpmdEngine(schedule=schedule, microbatches=MICROBATCHES), MeshSpec(pipe=pipe)
    )
    _, born_alone, state_alone, values_alone, _ = one_device
    assert compilations == 0
    jax.tree.map(np.testing.assert_array_equal, born, born_alone)
    for ours, theirs in zip(values, values_alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(state_alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    timeline = compiled.last_timeline
    assert timeline is not None
    assert timeline.unit == "s"
    assert 0 <= timeline.bubble_fraction < 1
    assert timeline.outer


def test_every_leaf_lies_with_its_stage_before_and_after():
    compiled, _, state, _, _ = run(MpmdEngine(OneFOneB(), MICROBATCHES), MeshSpec(pipe=4))
    fresh = compiled.init()
    devices = jax.devices()
    for i in range(LAYERS):
        adam = state["opt"][1][0]
        for leaf in (
            fresh["params"][f"w{i}"],
            state["params"][f"w{i}"],
            adam.mu[f"w{i}"],
            adam.nu[f"w{i}"],
        ):
            assert leaf.devices() == {devices[i]}
    assert state["step"].sharding == fresh["step"].sharding


def test_summary_is_the_plan():
    compiled = MpmdEngine(ZBH1(), MICROBATCHES).compile(
        init=init, step=step, batch=batches(1)[0], mesh=MeshSpec(pipe=2)
    )
    assert [row.parameters for row in compiled.summary.stages] == [2 * WIDTH**2] * 2
    assert [kind for kind, _ in compiled.summary.stages[0].tasks] == ["F", "I", "W"]
    assert 0 < compiled.summary.planned_bubble < 1


def test_state_is_consumed():
    compiled = MpmdEngine(OneFOneB(), MICROBATCHES).compile(
        init=init, step=step, batch=batches(1)[0], mesh=MeshSpec(pipe=2)
    )
    state = compiled.init()
    compiled(state, batches(1)[0])
    assert state["params"]["w0"].is_deleted()


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        MpmdEngine(OneFOneB(), 0)
    with pytest.raises(ValueError, match="zero must be 0 or 1"):
        MpmdEngine(OneFOneB(), 2, zero=3)
