"""Cases 7 to 12: skip connections, integers and static values across edges, unread outputs, degenerate programs.

Symptoms elsewhere: pytorch/pytorch#127964 and #183024, pytorch/torchtitan#3112, pytorch/pytorch#152827,
alpa-projects/alpa#838.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stagewright.nn.yields import pipeline_yield as end
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.reductions import Mean, Stack, Sum
from stagewright.pipelining.schedules import ZBH1, OneFOneB


def skip(w, x):
    h0 = end(w[0] * x)
    h = end(w[1] * h0)
    h = end(w[2] * h)
    return w[3] * h + h0


def test_7_a_skip_over_three_stages(grads, schedule, ranks_for):
    value, gradient = grads(
        skip,
        [jnp.float32(w) for w in (2, 3, 5, 7)],
        np.ones((1,), np.float32),
        schedule=schedule,
        ranks=ranks_for(4),
    )
    assert value.tolist() == [212.0]
    assert [float(g) for g in gradient] == [106.0, 70.0, 42.0, 30.0]


def test_8_integers_and_booleans_cross(grads, schedule, ranks_for):
    table = jnp.array([1.0, 2.0, 3.0, 4.0])
    seen = []

    def loss(w, ids):
        emb, mask = w[0] * table[ids], ids > 1
        emb, mask, ids = end((emb, mask, ids))
        seen.append((mask.dtype, ids.dtype))
        return jnp.where(mask, emb * w[1] * ids, 0.0).sum()

    value, gradient = grads(
        loss,
        jnp.array([2.0, 3.0]),
        np.arange(4, dtype=np.int32)[None],
        schedule=schedule,
        ranks=ranks_for(2),
    )
    assert value.tolist() == [108.0]
    assert gradient.tolist() == [54.0, 36.0]
    assert seen[0] == (jnp.bool_, jnp.int32)


def test_9_flags_none_and_strings_are_settings(schedule, ranks_for):
    def loss(w, x, scale=None, flip=False, mode="relu"):
        h = end({"h": w[0] * x, "scale": scale, "flip": flip, "mode": mode})
        hidden = -h["h"] if h["flip"] else h["h"]
        assert h["scale"] is None
        hidden = jax.nn.relu(hidden) if h["mode"] == "relu" else hidden
        return (hidden * w[1]).sum()

    @mpmd_jit(mesh=MeshSpec(pipe=ranks_for(2)), schedule=schedule, static_argnames=("flip",))
    def step(w, batch, flip=False):
        def f(x):
            return jax.value_and_grad(lambda w: loss(w, x, flip=flip))(w)

        return accumulate_grads(f, batch)

    w, batch = jnp.array([2.0, 3.0]), np.array([[-1.0, 4.0]], np.float32)
    for flip, value, gradient in [(False, 24.0, [12.0, 8.0]), (True, 6.0, [3.0, 2.0])]:
        found, grad = step(w, batch, flip=flip)
        assert found.tolist() == [value]
        assert grad.tolist() == gradient


def test_9_none_in_a_batch_is_fine_and_a_string_is_named():
    @mpmd_jit(mesh=MeshSpec(pipe=1), schedule=OneFOneB())
    def step(w, batch):
        return accumulate_grads(lambda b: jax.value_and_grad(lambda w: w * b["x"].sum())(w), batch)

    value, _ = step(jnp.float32(2.0), {"x": np.ones((2, 3), np.float32), "extra": None})
    assert value.tolist() == [6.0, 6.0]
    with pytest.raises(ValueError, match=r"\['mode'\].*got str 'relu'"):
        step(jnp.float32(2.0), {"x": np.ones((2, 3), np.float32), "mode": "relu"})


def test_10_unread_outputs_and_unused_parameters_get_zeros(grads, schedule, ranks_for):
    def loss(params, x):
        w = params["w"]
        h, _ = end((w[0] * x, w[1] * x))
        return (h * w[2]).sum()

    params = {"w": jnp.array([2.0, 9.0, 3.0]), "unused": jnp.ones((2, 2))}
    value, gradient = grads(
        loss, params, np.ones((1, 1), np.float32), schedule=schedule, ranks=ranks_for(2)
    )
    assert value.tolist() == [6.0]
    assert gradient["w"].tolist() == [3.0, 0.0, 2.0]
    assert gradient["unused"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=str)
def test_12_degenerate_results(schedule, microbatches, update):
    batch = np.arange(microbatches * 2, dtype=np.float32).reshape(microbatches, 2) + 1
    optimizer = optax.sgd(0.5)

    def loss(w, x):
        value = (end(w[0] * x) * w[1]).sum()
        return value, {"one": jnp.array(1.0), "x_back": x, "four": 4}

    def step(w, batch):
        aux_ops = {"one": Mean(), "x_back": Stack(), "four": Sum()}
        (_, aux), grads = accumulate_grads(
            lambda x: jax.value_and_grad(loss, has_aux=True)(w, x), batch, ((Sum(), aux_ops), Sum())
        )
        if not update:
            return grads, aux
        updates, _ = optimizer.update(grads, optimizer.init(w))
        return optax.apply_updates(w, updates), aux

    w = jnp.array([2.0, 3.0])
    out, aux = mpmd_jit(step, mesh=MeshSpec(pipe=2), schedule=schedule)(w, batch)
    grad = np.array([3.0, 2.0]) * batch.sum()
    np.testing.assert_allclose(out, np.asarray(w) - 0.5 * grad if update else grad)
    assert float(aux["one"]) == 1.0
    assert int(aux["four"]) == 4 * microbatches
    np.testing.assert_array_equal(aux["x_back"], batch)
