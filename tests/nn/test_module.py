"""The claim: `set_stages` says where marks go and changes nothing else about a model."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn


class Encoder(nn.PipelinedModule):
    def __init__(self, rngs, make):
        self.z_first = self.layers(make, 2, rngs=rngs)
        self.a_second = self.layers(make, 1, rngs=rngs)


class Translator(nn.PipelinedModule):
    """Attributes whose alphabetical order is not that of creation."""

    def __init__(self, rngs, make):
        self.z_encoder = Encoder(rngs, make)
        self.bridge = nnx.List([self.layers(make, 1, rngs=rngs)])
        self.a_decoder = self.layers(make, 3, rngs=rngs)

    def __call__(self, x):
        for part in (self.z_encoder.z_first, self.z_encoder.a_second, *self.bridge, self.a_decoder):
            x = part(x)
        return x


def edges(model):
    encoder = model.z_encoder
    parts = (encoder.z_first, encoder.a_second, model.bridge[0], model.a_decoder)
    return [part.edges for part in parts]


def hashes(model):
    return [
        hashlib.sha256(np.asarray(layer.up.kernel[...]).tobytes()).hexdigest()
        for layer in model.blocks.layers
    ]


def num_marks(model, *args):
    eqns = jax.make_jaxpr(lambda *args: model(*args))(*args).eqns
    return sum(eqn.primitive.name == "pipeline_yield" for eqn in eqns)


@pytest.mark.parametrize("cut", [(4,), (2, 2), (1, 1, 1, 1), (0, 4)])
def test_initial_weights_differ_by_layer_and_not_by_stages(model, cut):
    reference = hashes(model(nnx.Rngs(0)))
    cut_model = model(nnx.Rngs(0))
    cut_model.set_stages(cut)
    assert hashes(cut_model) == reference
    assert len(set(reference)) == 4


def test_initial_weights_do_not_depend_on_the_dropout_rate(model):
    assert hashes(model(nnx.Rngs(0))) == hashes(model(nnx.Rngs(0), rate=0.5))


@pytest.mark.parametrize("make_anew", [False, True])
def test_layers_are_numbered_in_order_of_creation(block, make_anew):
    model = Translator(nnx.Rngs(0), block)
    if make_anew:
        model = nnx.merge(*nnx.split(model))  # NNX sorts attributes by name here
    assert model.num_layers == 7
    model.set_stages((1, 2, 4))
    assert edges(model) == [(1,), (), (0,), ()]
    model.set_stages((0, 2, 5, 0))
    assert edges(model) == [(0,), (0,), (), (3,)]
    model.set_stages((7,))
    assert edges(model) == [(), (), (), ()]


@pytest.mark.parametrize("cut", [(7,), (2, 5), (3, 4), (1,) * 7, (0, 7, 0), (2, 1, 1, 3)])
def test_there_is_one_mark_fewer_than_stages(block, cut):
    model = Translator(nnx.Rngs(0), block)
    model.set_stages(cut)
    assert num_marks(model, jnp.ones((2, 8))) == len(cut) - 1


def test_works_on_an_abstract_model(model, tokens):
    abstract = nnx.eval_shape(lambda: model(nnx.Rngs(0)))
    abstract.set_stages((1, 3))
    graphdef, state = nnx.split(abstract)
    jaxpr = jax.make_jaxpr(lambda state, t: nnx.merge(graphdef, state)(t))(state, tokens)
    assert sum(eqn.primitive.name == "pipeline_yield" for eqn in jaxpr.eqns) == 1


def test_stages_are_part_of_the_graphdef_and_not_of_the_state(model):
    whole, cut = model(nnx.Rngs(0)), model(nnx.Rngs(0))
    assert nnx.graphdef(whole) == nnx.graphdef(cut)
    cut.set_stages((2, 2))
    assert nnx.graphdef(whole) != nnx.graphdef(cut)
    assert jax.tree.structure(nnx.state(whole)) == jax.tree.structure(nnx.state(cut))
    cut.set_stages((4,))
    assert nnx.graphdef(whole) == nnx.graphdef(cut)


def test_paths_name_the_layer(model):
    paths = {
        "/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model(nnx.Rngs(0))))
    }
    assert "blocks/layers/3/up/kernel" in paths


def test_layers_within_a_layer_are_part_of_it(block):
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.inner = nn.Layers(block, 3, rngs=rngs)

        def __call__(self, x):
            return self.inner(x)

    class Outer(nn.PipelinedModule):
        def __init__(self, rngs):
            self.blocks = self.layers(Deep, 2, rngs=rngs)

    assert Outer(nnx.Rngs(0)).num_layers == 2


def test_a_container_held_twice_counts_once(block):
    class Twice(nn.PipelinedModule):
        def __init__(self, rngs):
            self.blocks = self.layers(block, 2, rngs=rngs)
            self.again = self.blocks

    assert Twice(nnx.Rngs(0)).num_layers == 2


@pytest.mark.parametrize("cut", [(2, 3), (4, 1), (), (5, -1)])
def test_wrong_stages_are_refused_with_both_numbers(model, cut):
    with pytest.raises(ValueError, match=f"sums to {sum(cut)}, for a model with 4 layers"):
        model(nnx.Rngs(0)).set_stages(cut)


def test_a_model_without_layers_has_nothing_to_cut():
    class ByHand(nn.PipelinedModule):
        def __call__(self, x):
            return 2 * nn.pipeline_yield(x)

    model = ByHand()
    model.set_stages((0,))
    assert (model.num_layers, num_marks(model, jnp.ones(3))) == (0, 1)
    with pytest.raises(ValueError, match="no layers to cut between"):
        model.set_stages((0, 0))


def test_layers_attached_too_late_are_refused(model, block):
    late = model(nnx.Rngs(0))
    late.more = late.layers(block, 2, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="attached after the constructor"):
        late.set_stages((3, 3))


def test_loss_is_for_the_subclass_to_define():
    with pytest.raises(NotImplementedError, match=r"PipelinedModule must define loss"):
        nn.PipelinedModule().loss(None)
