"""Cases 16 to 20: layers that do not divide, wrong marks, ragged batches, changing lengths, odd batch axes.

Symptoms elsewhere: NVIDIA/Megatron-LM#1304, pytorch/pytorch#126600, deepspeedai/DeepSpeed#3195,
NVIDIA-NeMo/Automodel PR 3208.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.partition import Explicit
from stagewright.nn.yields import pipeline_yield as end
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.jax_seams import count_compilations
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import ZBH1, Interleaved1F1B, OneFOneB

TEN_LAYERS = 0.37158912  # the product of (k + 1) / 5 for k = 0 .. 9, times 1


def ten_layers(w, x):
    for k in range(10):
        x = x * ((k + 1) / 5)
        x = end(x) if k < 9 else x
    return (w * x).sum()


@pytest.mark.parametrize(
    ("schedule", "ranks"), [(OneFOneB(), 3), (OneFOneB(), 4), (ZBH1(), 3), (Interleaved1F1B(2), 2)]
)
def test_16_every_layer_runs_once(grads, schedule, ranks):
    value, gradient = grads(
        ten_layers, jnp.float32(1.0), np.ones((2, 1), np.float32), schedule=schedule, ranks=ranks
    )
    np.testing.assert_allclose(value, [TEN_LAYERS] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * TEN_LAYERS, rtol=1e-6)


def test_16_an_explicit_partition_chooses_the_marks():
    @mpmd_jit(mesh=MeshSpec(pipe=2), schedule=OneFOneB(), partition=Explicit((9, 1)))
    def step(w, batch):
        return accumulate_grads(lambda x: jax.value_and_grad(ten_layers)(w, x), batch)

    batch = np.ones((2, 1), np.float32)
    tasks = step.compile(jnp.float32(1.0), batch).plan.stages.tasks
    assert len(tasks[0, "F"].operations) > 2 * len(tasks[1, "F"].operations)
    np.testing.assert_allclose(step(jnp.float32(1.0), batch)[0], [TEN_LAYERS] * 2, rtol=1e-6)


@pytest.mark.parametrize("num_marks", [0, 2])
def test_16_too_few_marks_are_refused_with_both_numbers(grads, num_marks):
    def loss(w, x):
        for _ in range(num_marks):
            x = end(x * 1.0)
        return (w * x).sum()

    with pytest.raises(ValueError, match=rf"needs 4 stages.* has {num_marks} stage marks"):
        grads(loss, jnp.float32(1), np.ones((2, 1), np.float32), schedule=OneFOneB(), ranks=4)


def test_17_ragged_batches_are_refused_with_both_numbers(grads):
    batch = {"x": np.ones((4, 2), np.float32), "y": np.ones((3, 2), np.float32)}
    with pytest.raises(ValueError, match=r"4 \(batch\['x'\]\) and 3 \(batch\['y'\]\)"):
        grads(
            lambda w, b: (w * b["x"] * b["y"]).sum(), jnp.float32(1), batch,
            schedule=OneFOneB(), ranks=1,
        )  # fmt: skip


def test_19_lengths_change_from_step_to_step(schedule, ranks_for):
    def loss(w, x):
        return ((end(jnp.tanh(w[0] * x)) * w[1]) ** 2).sum()

    def step(w, batch):
        value, grad = accumulate_grads(lambda x: jax.value_and_grad(loss)(w, x), batch)
        return value.sum(), w - 0.01 * grad

    pipelined = mpmd_jit(step, mesh=MeshSpec(pipe=ranks_for(2)), schedule=schedule)
    ours = theirs = jnp.array([0.5, 1.5])
    rng = np.random.default_rng(0)
    compilations = []
    for length in (8, 12, 8, 5):
        batch = rng.normal(size=(4, 2, length)).astype(np.float32)
        with count_compilations() as count:
            value, ours = pipelined(ours, batch)
            compilations.append(count())
        expected, theirs = jax.jit(step)(theirs, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert compilations[2] == 0
    assert min(compilations[0], compilations[1], compilations[3]) > 0


def test_20_axes_and_shared_leaves(grads, schedule, ranks_for):
    batch = {
        "x": np.ones((2, 4, 4), np.float32),
        "pos": np.arange(4, dtype=np.float32)[None],
        "mrope": np.ones((3, 4, 2, 4), np.float32),
        "n": 2,
    }

    def loss(w, b):
        assert b["x"].shape == (2, 4)
        assert b["mrope"].shape == (3, 2, 4)
        return w * (end(b["x"] * 1.0) + b["pos"]).sum() + 0 * b["mrope"].sum() * b["n"]

    value, _ = grads(
        loss,
        jnp.float32(1.0),
        batch,
        schedule=schedule,
        ranks=ranks_for(2),
        in_axes={"x": 1, "pos": None, "mrope": 1, "n": None},
    )
    assert float(value.sum()) == 80.0


def test_20_without_axes_the_leaf_is_named(grads):
    batch = {"x": np.ones((4, 2, 4), np.float32), "pos": np.ones((1, 4), np.float32)}
    with pytest.raises(ValueError, match=r"1 \(batch\['pos'\]\)"):
        grads(lambda w, b: (w * b["x"]).sum(), jnp.float32(1), batch, schedule=OneFOneB(), ranks=1)
