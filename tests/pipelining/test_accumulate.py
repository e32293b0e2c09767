"""The loop over micro-batches does what its reductions say, as a `lax.scan` on one device and through a pipeline.

Numbers are checked against NumPy or against a Python loop, exactly where they are whole, else to rtol 1e-6.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.reductions import Max, Mean, Stack, Sum
from stagewright.pipelining.schedules import OneFOneB

BATCH = np.array([[1.0, -2.0], [3.0, 5.0], [-7.0, 0.5]], np.float32)


def on_one(step):
    return jax.jit(step)


def on_two(step):
    return mpmd_jit(step, mesh=MeshSpec(pipe=2), schedule=OneFOneB())


both = pytest.mark.parametrize("run", [on_one, on_two])


def loss(w, x):
    return (pipeline_yield(w * x) * w).sum()


@both
def test_by_default_values_are_stacked_and_gradients_summed(run):
    step = run(lambda w, b: accumulate_grads(lambda x: jax.value_and_grad(loss)(w, x), b))
    values, grad = step(np.float32(2), BATCH)
    np.testing.assert_array_equal(values, 4 * BATCH.sum(1))
    np.testing.assert_array_equal(grad, 4 * BATCH.sum())


@both
def test_every_reduction_of_every_kind_of_number(run):
    def numbers(x):
        return {
            "float": x,
            "half": x.astype(jnp.bfloat16),
            "int": x.astype(jnp.int32),
            "bool": x > 0,
        }

    def f(x):
        crossed = pipeline_yield(x * 1.0)
        return tuple(numbers(crossed) for _ in range(4)), None

    ops = (
        tuple(dict.fromkeys(numbers(BATCH[0]), op) for op in (Sum(), Mean(), Max(), Stack())),
        None,
    )
    (sums, means, largest, stacked), _ = run(lambda b: accumulate_grads(f, b, ops))(BATCH)
    columns = {name: np.asarray(x) for name, x in numbers(jnp.asarray(BATCH)).items()}
    types = {"float": "float32", "half": "bfloat16", "int": "int32", "bool": "int32"}
    for name, column in columns.items():
        np.testing.assert_array_equal(
            sums[name], column.astype(np.float32).sum(0).astype(types[name])
        )
        mean_type = types[name] if name in ("float", "half") else "float32"
        wanted = (column.astype(np.float32).sum(0) / np.float32(3)).astype(mean_type)
        np.testing.assert_allclose(
            np.asarray(means[name], np.float32), wanted.astype(np.float32), rtol=1e-6
        )
        np.testing.assert_array_equal(largest[name], column.max(0))
        np.testing.assert_array_equal(stacked[name], column)
        assert (sums[name].dtype, means[name].dtype) == (types[name], mean_type)
        assert largest[name].dtype == stacked[name].dtype == column.dtype


@both
def test_random_keys_can_be_stacked(run):
    keys = jax.random.split(jax.random.key(0), 3)
    step = run(
        lambda b: accumulate_grads(lambda b: (pipeline_yield((b["key"], b["x"] * 1.0)), None), b)
    )
    (found, x), _ = step({"key": keys, "x": BATCH})
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
    np.testing.assert_array_equal(x, BATCH)


@both
@pytest.mark.parametrize(("accum_dtype", "total"), [(jnp.float32, 260.0), (None, 256.0)])
def test_the_accumulators_dtype(run, accum_dtype, total):
    """256 + 1 + 1 + 1: bfloat16 has no 257; the sum 259 is 260 as the nearest bfloat16.  On the second stage, too."""

    def two_stages(w, x):
        return pipeline_yield(w[0] * x) + w[1] * x

    def step(w, batch):
        return accumulate_grads(
            lambda x: jax.value_and_grad(two_stages)(w, x), batch, accum_dtype=accum_dtype
        )

    weights = (jnp.bfloat16(1), jnp.bfloat16(1))
    _, grads = run(step)(weights, jnp.array([256, 1, 1, 1], jnp.bfloat16))
    assert [float(g) for g in grads] == [total, total]
    assert {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}


@both
def test_axes_name_where_microbatches_are_counted(run):
    batch = {"x": BATCH.T, "table": np.arange(4, dtype=np.float32), "half": BATCH}

    def f(b):
        assert (b["x"].shape, b["table"].shape, b["half"].shape) == ((2,), (4,), (2,))
        return (pipeline_yield(b["x"]) * b["table"].sum() + b["half"]).sum(), None

    axes = {"x": -1, "table": None, "half": 0}
    values, _ = run(lambda b: accumulate_grads(f, b, in_axes=axes))(batch)
    np.testing.assert_array_equal(values, 7 * BATCH.sum(1))


def test_plain_loops_can_be_differentiated_and_mapped():
    def total(w, batch):
        values, _ = accumulate_grads(lambda x: (loss(w, x), None), batch)
        return values.sum()

    np.testing.assert_allclose(jax.grad(total)(2.0, BATCH), 4 * BATCH.sum(), rtol=1e-6)
    _, tangent = jax.jvp(lambda w: total(w, BATCH), (2.0,), (1.0,))
    np.testing.assert_allclose(tangent, 4 * BATCH.sum(), rtol=1e-6)
    weights = jnp.array([1.0, 2.0])
    mapped = jax.vmap(lambda w: total(w, BATCH))(weights)
    np.testing.assert_allclose(mapped, weights**2 * BATCH.sum(), rtol=1e-6)


def test_the_loop_runs_without_jit():
    values, grad = accumulate_grads(lambda x: jax.value_and_grad(loss)(2.0, x), BATCH)
    np.testing.assert_array_equal(values, 4 * BATCH.sum(1))
    assert float(grad) == 4 * BATCH.sum()


# ---- NNX modules ----------------------------------------------------------------------------------------------------


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(64))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(pipeline_yield(self.weight[...] * x))


@both
def test_random_streams_are_folded_by_microbatch_and_move_on_by_step(run):
    model = Noisy(nnx.Rngs(0))
    graphdef, _ = nnx.split(model)

    def step(state, batch):
        model = nnx.merge(graphdef, state)

        def noisy(model, x):
            out = model(x)
            return out.sum(), out

        (_, outs), _ = accumulate_grads(
            lambda x: nnx.value_and_grad(noisy, has_aux=True)(model, x), batch
        )
        return nnx.state(model), outs

    function, state, rows = run(step), nnx.state(model), []
    for _ in range(2):
        state, outs = function(state, np.ones((4, 64), np.float32))
        rows += list(np.asarray(outs) > 0)
    assert len({row.tobytes() for row in rows}) == 8
    counts = [leaf for path, leaf in nnx.to_flat_state(state) if path[-1] == "count"]
    assert [int(count[...]) for count in counts] == [2]


def test_other_changes_of_a_module_are_refused_by_name():
    class Counting(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(2))
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return (self.weight[...] * x).sum()

    model = Counting()
    with pytest.raises(ValueError, match=r"changed BatchStat .*calls.*return it as aux"):
        accumulate_grads(lambda x: nnx.value_and_grad(lambda m, x: m(x))(model, x), BATCH)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accumulate_grads(lambda x: x, BATCH), r"pair \(value, grads\)"),
        (lambda: accumulate_grads(lambda x: (x, x, x), BATCH), r"pair \(value, grads\)"),
        (lambda: accumulate_grads(lambda x: (x, x), {"a": BATCH, "b": BATCH[:2]}), r"3 .*'a'.* and 2 .*'b'"),
        (lambda: accumulate_grads(lambda x: (x, x), {"a": BATCH, "n": 3}), r"\['n'\].* shape \(\)"),
        (lambda: accumulate_grads(lambda x: (x, x), {"a": "text"}), r"\['a'\].*got str 'text'"),
        (lambda: accumulate_grads(lambda x: (x, x), {}), "at least one batch leaf"),
        (lambda: accumulate_grads(lambda x: (x, x), BATCH[:0]), "at least one micro-batch"),
        (lambda: accumulate_grads(lambda x: (x, x), BATCH, in_axes=None), "at least one batch leaf"),
        (lambda: accumulate_grads(lambda x: (x, x), BATCH, in_axes={"a": 0}), "in_axes .*prefix"),
        (lambda: accumulate_grads(lambda x: (x, x), BATCH, (Sum(), Sum(), Sum())), "ops .*prefix"),
        (lambda: accumulate_grads(lambda x: (x, x), BATCH, (Sum(), "mean")), "got 'mean'"),
        (lambda: accumulate_grads(lambda x: (x, x), BATCH, (Sum, Mean)), "got <class"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert len(str(caught.value).splitlines()) <= 15
