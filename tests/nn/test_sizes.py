"""The claim: models of published shapes have exactly the published numbers of parameters."""

import math

import jax
from flax import nnx

from stagewright import nn


class Block(nnx.Module):
    def __init__(self, width, heads, hidden, *, llama, rngs):
        norm = nn.RMSNorm if llama else nn.LayerNorm
        activation = "swiglu" if llama else "gelu"
        options = {"use_bias": not llama, "rngs": rngs}
        self.norms = nnx.List([norm(width, rngs=rngs) for _ in range(2)])
        self.attention = nn.Attention(
            width, heads, rotary=nn.Rotary() if llama else None, **options
        )
        self.mlp = nn.MLP(width, hidden, activation=activation, **options)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT2(nn.PipelinedModule):
    def __init__(self, rngs):
        self.embed = nn.Embed(50_257, 768, rngs=rngs)
        self.positions = nn.PositionEmbed(1024, 768, rngs=rngs)
        self.blocks = self.layers(
            lambda r: Block(768, 12, 4 * 768, llama=False, rngs=r), 12, rngs=rngs
        )
        self.norm = nn.LayerNorm(768, rngs=rngs)
        self.head = self.embed  # tied


class Llama(nn.PipelinedModule):
    def __init__(self, rngs):
        self.embed = nn.Embed(32_000, 4096, rngs=rngs)
        self.blocks = self.layers(
            lambda r: Block(4096, 32, 11_008, llama=True, rngs=r), 32, rngs=rngs
        )
        self.norm = nn.RMSNorm(4096, rngs=rngs)
        self.head = nn.Linear(4096, 32_000, axes=("embed", "vocab"), use_bias=False, rngs=rngs)


def abstract_parameters(make):
    """Return a model's parameters by path, without making any."""
    return nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param))


def count(make):
    return sum(math.prod(variable.get_value().shape) for _, variable in abstract_parameters(make))


def test_gpt2_124m():
    assert count(GPT2) == 124_439_808


def test_llama2_7b():
    assert count(Llama) == 6_738_415_616


def test_every_dim_of_every_parameter_is_named_and_bound():
    rules = nn.default_axis_rules()
    for _, variable in (*abstract_parameters(GPT2), *abstract_parameters(Llama)):
        names = nn.axis_names(variable)
        assert None not in names
        assert len(rules.spec(names)) == len(variable.get_value().shape)


def test_matrices_have_two_dims_and_biases_one():
    shapes = {path[-1]: variable.get_value().shape for path, variable in abstract_parameters(GPT2)}
    ndims = jax.tree.map(len, shapes, is_leaf=lambda x: isinstance(x, tuple))
    assert ndims == {"embedding": 2, "kernel": 2, "bias": 1, "scale": 1}
