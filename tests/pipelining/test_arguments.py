"""Any call comes apart into arrays and back: pytrees, keywords, settings, NNX objects, buffers given away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.arguments import Signature
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import OneFOneB

BATCH = np.linspace(-1, 1, 4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.second = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(pipeline_yield(jnp.tanh(self.first(x))))


def net_loss(model, x):
    return ((model(x) - x) ** 2).sum()


def grads_of(model, batch):
    return accumulate_grads(lambda x: nnx.value_and_grad(net_loss)(model, x), batch)


def on_two(function, **options):
    return mpmd_jit(function, mesh=MeshSpec(pipe=2), schedule=OneFOneB(), **options)


def own_leaves(args, kwargs, argnums):
    """The arrays that `positions` picks, with those that the arguments hold."""
    call, _ = Signature(lambda: None, (), ()).call(args, kwargs)
    picked = [call.leaves[i] for i in sorted(call.positions(argnums))]
    return {id(leaf) for leaf in picked}


def ids(tree):
    return {id(leaf) for leaf in jax.tree.leaves(tree)}


def test_positions_are_those_of_the_argument_wherever_modules_stand():
    net, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    other.first = net.first  # shared
    array, tree = jnp.ones(2), {"a": jnp.ones(3), "b": [jnp.ones(4)]}
    of = {"net": ids(nnx.state(net)), "other": ids(nnx.state(other)) - ids(nnx.state(net))}
    assert own_leaves((net, array, tree), {}, (1,)) == ids(array)
    assert own_leaves((array, net, tree), {}, (2,)) == ids(tree)
    assert own_leaves((array, net, tree), {}, (1,)) == of["net"]
    assert own_leaves((array,), {"model": net, "tree": tree}, (0,)) == ids(array)
    assert own_leaves((net, net, array), {}, (2,)) == ids(array)
    assert own_leaves((net, other, array), {}, (2,)) == ids(array)
    assert own_leaves((net, other, array), {}, (1, 2)) == of["other"] | ids(array)
    assert own_leaves((array, tree), {}, ()) == set()


def test_a_module_given_by_keyword_keeps_its_buffers():
    @on_two
    def plain(total, batch, *, model):
        losses, _ = grads_of(model, batch)
        return total + losses.sum()

    given_away = on_two(plain.__wrapped__, donate_argnums=(0,))
    net = Net(nnx.Rngs(0))
    expected = plain(jnp.float32(0), BATCH, model=net)
    total = jnp.float32(0)
    for number in range(1, 3):
        total = given_away(total, BATCH, model=net)
        np.testing.assert_allclose(total, number * expected, rtol=1e-6)
    assert np.isfinite(net.first.kernel[...]).all()


def test_random_streams_move_on():
    @on_two
    def step(model, rngs, batch):
        noise = jax.random.uniform(rngs.noise(), ())
        losses, _ = grads_of(model, batch)
        return losses + noise, noise

    net, rngs = Net(nnx.Rngs(0)), nnx.Rngs(noise=3)
    twin = nnx.Rngs(noise=3)
    found = [float(step(net, rngs, BATCH)[1]) for _ in range(3)]
    assert found == [float(jax.random.uniform(twin.noise(), ())) for _ in range(3)]
    assert int(rngs.noise.count[...]) == 3


def test_metrics_add_up():
    @on_two
    def step(model, metrics, batch):
        losses, grads = grads_of(model, batch)
        metrics.update(loss=losses)
        return grads

    net = Net(nnx.Rngs(0))
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    for _ in range(2):
        step(net, metrics, BATCH)
    mean = np.mean([net_loss(net, x) for x in BATCH])
    assert float(metrics.compute()["loss"]) == pytest.approx(mean, rel=1e-5)
    assert int(metrics.loss.count[...]) == 8


def test_states_and_graphdefs_in_functional_style():
    net = Net(nnx.Rngs(0))
    graphdef, state = nnx.split(net)

    @on_two
    def step(state, batch):
        def loss(state, x):
            return net_loss(nnx.merge(graphdef, state), x)

        _, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(state, x), batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    new = step(state, BATCH)
    assert isinstance(new, nnx.State)
    expected = step.__wrapped__(state, BATCH)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_numbers_are_arrays_and_settings_choose_a_program():
    @on_two
    def scaled(weight, batch, rate, negate=False):
        def loss(weight, x):
            return (pipeline_yield(weight * x) * (-1 if negate else 1)).sum()

        _, grad = accumulate_grads(lambda x: jax.value_and_grad(loss)(weight, x), batch)
        return weight - rate * grad

    step = on_two(scaled.__wrapped__, static_argnames=("negate",))
    batch = np.ones((2, 3), np.float32)
    assert float(step(2.0, batch, 0.5)) == -1.0
    assert float(step(2.0, batch, 0.25)) == 0.5  # the same program
    assert len(step._compiled) == 1
    assert float(step(2.0, batch, 0.5, negate=True)) == 5.0
    assert len(step._compiled) == 2


def test_a_call_under_a_transformation_is_refused():
    step = on_two(lambda w, batch: accumulate_grads(lambda x: (w * x.sum(), None), batch))
    with pytest.raises(ValueError, match=r"not inside jax\.jit"):
        jax.jit(step)(jnp.float32(1), BATCH)


def test_what_is_no_array_is_named():
    step = on_two(lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=r"args\[1\]\['mode'\] .* got str 'fast'"):
        step(BATCH, {"mode": "fast"})
    with pytest.raises(ValueError, match=r"kwargs\['name'\] .* got str 'x'"):
        step(BATCH, name="x")
