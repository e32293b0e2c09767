"""The claim: cutting, scanning and rematerialising layers changes neither numbers nor masks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn

CUTS = [(2, 2), (1, 2, 1), (1, 1, 1, 1), (0, 4), (4, 0), (0, 3, 1, 0)]
REMATS = [None, "full", "dots", jax.checkpoint_policies.everything_saveable]


class DropOnes(nnx.Module):
    """Write the mask of a dropout into this layer's row of the carry."""

    def __init__(self, row, rngs):
        self.row = nnx.Variable(jnp.int32(row))
        self.dropout = nn.Dropout(0.5, rngs=rngs)

    def __call__(self, rows):
        return rows.at[self.row[...]].set(self.dropout(jnp.ones(64)))


class Masks(nn.PipelinedModule):
    """Return one row a layer: its dropout mask."""

    def __init__(self, rngs, remat=None):
        row = itertools.count()
        self.blocks = self.layers(lambda r: DropOnes(next(row), r), 4, rngs=rngs, remat=remat)

    def __call__(self):
        return self.blocks(jnp.zeros((4, 64)))


class SharedStream(nnx.Module):
    """Keep the very stream that all the layers are made with."""

    def __init__(self, row, rngs):
        self.row = nnx.Variable(jnp.int32(row))
        self.stream = rngs

    def __call__(self, rows):
        mask = jax.random.bernoulli(self.stream.dropout(), 0.5, (64,))
        return rows.at[self.row[...]].set(mask.astype(jnp.float32))


def names_of(function, *args):
    """Return the primitives of a traced function; backward marks as "backward"."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return [
        "backward" if eqn.params.get("forward") is False else eqn.primitive.name for eqn in eqns
    ]


def assert_trees_close(expected, got, rtol=1e-6):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.max(jnp.abs(a))))

    jax.tree.map(close, expected, got)


@pytest.fixture(scope="module")
def uncut_gradients():
    """Return a function from a dropout rate to the uncut model's loss and gradients."""

    @functools.cache
    def compute(model, value_and_grad, rate):
        tokens = jnp.arange(10, dtype=jnp.int32).reshape(2, 5) % 5
        whole, params = value_and_grad(model(nnx.Rngs(0), rate=rate), tokens)
        return jax.jit(whole)(params)

    return compute


@pytest.mark.parametrize(
    ("cut", "remat", "rate"),
    [(cut, None, 0.0) for cut in CUTS]
    + [((1, 3), remat, 0.0) for remat in REMATS]
    + [((1, 3), "full", 0.25)],
)
def test_gradients_are_those_of_the_uncut_model(
    model, tokens, value_and_grad, uncut_gradients, cut, remat, rate
):
    cut_model = model(nnx.Rngs(0), rate=rate, remat=remat)
    cut_model.set_stages(cut)
    parts, params = value_and_grad(cut_model, tokens)
    assert_trees_close(uncut_gradients(model, value_and_grad, rate), jax.jit(parts)(params))


def test_layers_run_in_order_as_if_called_one_by_one(model):
    layers = model(nnx.Rngs(0)).blocks
    x = jax.random.normal(jax.random.key(1), (3, 8))
    expected = x
    for layer in layers.layers:
        expected = layer(expected)
    np.testing.assert_allclose(layers(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("cut", "scans", "marks"),
    [((4,), 1, 0), ((2, 2), 2, 1), ((1, 2, 1), 1, 2), ((1, 1, 1, 1), 0, 3), ((0, 4, 0), 1, 2)],
)
def test_each_stage_is_one_scan_between_marks(model, tokens, value_and_grad, cut, scans, marks):
    cut_model = model(nnx.Rngs(0), rate=0.25)
    cut_model.set_stages(cut)
    forward = names_of(lambda t: cut_model(t), tokens)
    assert (forward.count("scan"), forward.count("pipeline_yield")) == (scans, marks)
    both = names_of(*value_and_grad(cut_model, tokens))
    assert both.count("scan") == 2 * scans
    assert (both.count("pipeline_yield"), both.count("backward")) == (marks, marks)


def test_forward_marks_lie_between_the_scans(model, tokens):
    cut_model = model(nnx.Rngs(0))
    cut_model.set_stages((2, 2))
    wanted = ("scan", "pipeline_yield")
    order = [name for name in names_of(lambda t: cut_model(t), tokens) if name in wanted]
    assert order == ["scan", "pipeline_yield", "scan"]


def test_program_size_does_not_follow_activations_of_depth(model, tokens):
    def num_products(count):
        deep = model(nnx.Rngs(0), count=count)
        return names_of(lambda t: deep(t), tokens).count("dot_general")

    assert num_products(3) == num_products(12)


def test_different_layers_are_called_by_themselves():
    widths = iter((8, 8, 16, 8))

    class Bottleneck(nnx.Module):
        def __init__(self, rngs):
            width = next(widths)
            self.up = nnx.Linear(4, width, rngs=rngs)
            self.down = nnx.Linear(width, 4, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    layers = nn.Layers(Bottleneck, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 4))
    assert names_of(lambda x: layers(x), x).count("scan") == 1  # the first two; 16 and 8 alone
    expected = x
    for layer in layers.layers:
        expected = layer(expected)
    np.testing.assert_allclose(layers(x), expected, rtol=1e-6)


@pytest.mark.parametrize("remat", [None, "full", "dots"])
@pytest.mark.parametrize("cut", CUTS)
def test_masks_are_the_same_under_every_cut_and_remat(cut, remat):
    reference = Masks(nnx.Rngs(0))()
    model = Masks(nnx.Rngs(0), remat=remat)
    model.set_stages(cut)
    np.testing.assert_array_equal(model(), reference)


def test_masks_differ_by_layer_and_keep_about_half():
    rows = np.asarray(Masks(nnx.Rngs(0))())
    assert len({row.tobytes() for row in rows}) == 4
    assert 0.4 < np.mean(rows > 0) < 0.6


@pytest.mark.parametrize("cut", [(4,), (1, 1, 2)])
def test_layers_that_share_a_stream_still_differ(cut):
    class Sharing(nn.PipelinedModule):
        def __init__(self, rngs):
            row = itertools.count()
            self.blocks = self.layers(lambda r: SharedStream(next(row), r), 4, rngs=rngs)

    model = Sharing(nnx.Rngs(0))
    model.set_stages(cut)
    rows = np.asarray(model.blocks(jnp.zeros((4, 64))))
    assert len({row.tobytes() for row in rows}) == 4


def test_containers_that_share_a_stream_still_differ():
    class Two(nn.PipelinedModule):
        def __init__(self, rngs):
            self.a = self.layers(lambda r: SharedStream(0, r), 1, rngs=rngs)
            self.b = self.layers(lambda r: SharedStream(0, r), 1, rngs=rngs)

    model = Two(nnx.Rngs(0))
    rows = jnp.zeros((1, 64))
    assert not np.array_equal(model.a(rows), model.b(rows))


def test_masks_follow_the_keys_in_the_state():
    model = Masks(nnx.Rngs(0))
    first = model()
    np.testing.assert_array_equal(model(), first)  # calling does not advance the streams
    graphdef, keys, rest = nnx.split(model, nnx.RngKey, ...)
    folded = jax.tree.map(lambda key: jax.random.fold_in(key, 1), keys)
    assert not np.array_equal(nnx.merge(graphdef, folded, rest)(), first)


def test_calling_changes_no_count():
    model = Masks(nnx.Rngs(0))
    before = [int(count) for count in jax.tree.leaves(nnx.state(model, nnx.RngCount))]
    model()
    assert before == [int(count) for count in jax.tree.leaves(nnx.state(model, nnx.RngCount))]


def test_eval_switches_masks_off():
    model = Masks(nnx.Rngs(0))
    model.set_stages((1, 3))
    model.eval()
    np.testing.assert_array_equal(model(), np.ones((4, 64)))


def test_carry_may_be_a_tree_with_an_auxiliary_loss():
    class WithLoss(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, carry, scale, *, shift):
            x, aux = carry["x"], carry["aux"]
            x = self.linear(x) * scale + shift
            return {"x": x, "aux": aux + jnp.mean(x**2)}

    layers = nn.Layers(WithLoss, 3, rngs=nnx.Rngs(0))
    layers.edges = (1,)
    x = jnp.ones((2, 4))
    got = layers({"x": x, "aux": 0.0}, 0.5, shift=jnp.float32(0.1))
    expected = {"x": x, "aux": jnp.float32(0.0)}
    for layer in layers.layers:
        expected = layer(expected, 0.5, shift=jnp.float32(0.1))
    assert_trees_close(expected, got)


def test_no_layers_is_the_identity():
    x = jnp.ones(3)
    np.testing.assert_array_equal(nn.Layers(nnx.Linear, 0, rngs=nnx.Rngs(0))(x), x)


def test_wrong_arguments_are_refused(block):
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        nn.Layers(block, -1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'full', 'dots' or a policy .* got 'ful'"):
        nn.Layers(block, 2, rngs=nnx.Rngs(0), remat="ful")
