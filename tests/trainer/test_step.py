"""A step is the mean over tokens, one update, and nothing else; models that break it are told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stagewright.trainer.blueprint import draw_blueprint
from stagewright.trainer.microbatches import MicrobatchSplit
from stagewright.trainer.step import build_train_functions


def build(model, microbatches: int, optimizer=None, **split):
    split = MicrobatchSplit(microbatches=microbatches, **split)
    blueprint = draw_blueprint(model, seed=0)
    return build_train_functions(blueprint, optimizer or optax.sgd(0.1), split), split


def test_any_number_of_microbatches_is_the_same_step(tiny_net, tiny_batches) -> None:
    batch = tiny_batches(1, size=8)[0]
    results = []
    for microbatches in (1, 2, 8):
        functions, split = build(tiny_net, microbatches)
        results.append(jax.jit(functions.step)(functions.init(), split(batch)))
    for result in results[1:]:
        for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("microbatches", "replicas"), [(1, 2), (2, 2), (1, 8), (2, 4)])
def test_any_number_of_replicas_is_the_same_step(
    tiny_net, tiny_batches, microbatches: int, replicas: int
) -> None:
    batch = tiny_batches(1, size=8)[0]
    results = []
    for data_size in (1, replicas):
        functions, split = build(tiny_net, microbatches, data_size=data_size)
        results.append(jax.jit(functions.step)(functions.init(), split(batch)))
    for ours, theirs in zip(jax.tree.leaves(results[1]), jax.tree.leaves(results[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_replicas_draw_masks_of_their_own(dropping_net, tiny_batches) -> None:
    one = tiny_batches(1, size=1)[0]
    batch = {name: np.repeat(leaf, 4, axis=0) for name, leaf in one.items()}
    functions, split = build(dropping_net, 1, data_size=2)
    _, metrics = jax.jit(functions.step)(functions.init(), split(batch))
    functions, split = build(dropping_net, 1, data_size=1)
    half = {name: leaf[:2] for name, leaf in batch.items()}
    _, alone = jax.jit(functions.step)(functions.init(), split(half))
    assert float(metrics["loss"]) != float(alone["loss"])  # it would be the same with one mask


def test_gradients_are_those_of_the_mean(tiny_net, tiny_batches) -> None:
    batch = tiny_batches(1, size=8)[0]
    functions, split = build(tiny_net, 4, optax.sgd(1.0))
    state = functions.init()
    after, metrics = jax.jit(functions.step)(state, split(batch))
    graphdef, params = nnx.split(tiny_net(nnx.Rngs(0)), nnx.Param)

    def mean(params):
        total, count, _ = nnx.merge(graphdef, params).loss(batch)
        return total / count

    loss, grads = jax.value_and_grad(mean)(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    taken = jax.tree.map(lambda old, new: old - new, state.params, after.params)
    for ours, theirs in zip(jax.tree.leaves(taken), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_models_metrics_are_per_token(tiny_net, tiny_batches) -> None:
    batch = tiny_batches(1, size=8)[0]
    functions, split = build(tiny_net, 2)
    _, metrics = jax.jit(functions.step)(functions.init(), split(batch))
    _, count, sums = tiny_net(nnx.Rngs(0)).loss(batch)
    np.testing.assert_allclose(metrics["error"], sums["error"] / count, rtol=1e-6)


def test_random_streams_are_left_as_they_are(dropping_net, tiny_batches, bits) -> None:
    functions, split = build(dropping_net, 2)
    state = functions.init()
    after, _ = jax.jit(functions.step)(state, split(tiny_batches(1)[0]))
    assert bits(after.rest) == bits(state.rest)
    assert len(bits(state.rest)) > 0


def test_a_learning_rate_is_told_where_it_is_known(tiny_net, tiny_batches) -> None:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.5))
    for chosen, told in ((optimizer, True), (optax.sgd(0.5), False)):
        functions, split = build(tiny_net, 2, chosen)
        metrics = jax.eval_shape(functions.step, functions.init(), split(tiny_batches(1)[0]))[1]
        assert ("learning_rate" in metrics) == told


def model_with_loss(loss):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(2))
            self.norm = nnx.BatchNorm(2, rngs=rngs)

        def loss(self, batch):
            return loss(self, batch)

    return Model


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: jnp.sum(b["x"]), r"must return \(sum over tokens.*got a "),
        (lambda m, b: (jnp.sum(b["x"]), 1.0), r"got 2 values"),
        (lambda m, b: (b["x"], 1.0, {}), r"'sum over tokens' has shape \(2, 2\)"),
        (lambda m, b: (jnp.sum(b["x"]), 1.0, {"h": b["x"]}), r"'h' has shape \(2, 2\)"),
        (lambda m, b: (jnp.sum(b["x"]), 1.0, {"loss": 1.0}), r"\['loss'\] are the step's own"),
    ],
)
def test_a_loss_of_another_form_is_refused(loss, message: str) -> None:
    functions, split = build(model_with_loss(loss), 2)
    batch = split({"x": np.ones((4, 2), np.float32)})
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(functions.step, jax.eval_shape(functions.init), batch)


def test_statistics_that_would_be_lost_are_refused_by_name() -> None:
    model = model_with_loss(lambda m, b: (jnp.sum(m.norm(b["x"])), 1.0, {}))
    functions, split = build(model, 2)
    batch = split({"x": np.ones((4, 2), np.float32)})
    with pytest.raises(NotImplementedError, match=r"'norm'.*'mean'.*LayerNorm"):
        jax.eval_shape(functions.step, jax.eval_shape(functions.init), batch)
