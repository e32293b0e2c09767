"""Models of the recipes have exactly the published numbers of parameters, and train on their meshes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright import nn
from stagewright.recipes import RECIPES
from stagewright.recipes.llama_config import LlamaConfig


@functools.cache
def abstract(name: str, depth: int):
    config = dataclasses.replace(RECIPES[name]().model, depth=depth)
    return nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))


def parameters(name: str, depth: int = 1) -> list:
    return nnx.to_flat_state(nnx.state(abstract(name, depth), nnx.Param))


def count(name: str) -> int:
    """The whole model's, from one of one layer and one of two: all layers are alike."""
    one, two = (
        sum(math.prod(v.get_value().shape) for _, v in parameters(name, depth)) for depth in (1, 2)
    )
    return one + (RECIPES[name]().model.depth - 1) * (two - one)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpt2-125m", 124_439_808),
        ("gpt3-125m", 124_439_808 + 1024 * 768),  # twice the positions
        ("gpt3-nano", 842_496),
        ("llama2-nano", 791_680),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
    ],
)
def test_parameters_are_exactly_as_many_as_published(name: str, wanted: int) -> None:
    assert count(name) == wanted


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-350m", 0.356),
        ("gpt3-760m", 0.760),
        ("gpt3-1.3b", 1.316),
        ("gpt3-2.7b", 2.65),
        ("gpt3-6.7b", 6.66),
        ("gpt3-13b", 12.85),
        ("gpt3-175b", 174.6),
    ],
)
def test_gpt3_is_of_the_size_in_its_name(name: str, billions: float) -> None:
    assert count(name) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_parameter_fits_its_mesh(name: str) -> None:
    config = RECIPES[name]()
    sizes = {"data": config.mesh.data, "tensor": config.mesh.tensor}
    rules = nn.default_axis_rules()
    for path, variable in parameters(name):
        shape = variable.get_value().shape
        for size, axes in zip(shape, rules.spec(nn.axis_names(variable)), strict=True):
            assert axes is None or size % sizes[axes] == 0, path


def test_a_llama_reads_the_past_only_and_begins_with_a_guess() -> None:
    config = LlamaConfig(vocab=64, context=16, width=32, hidden=48, depth=2, heads=4, kv_heads=2)
    model = config.build(nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 64, (2, 17)).astype(np.int32)
    changed = tokens.copy()
    changed[:, 9:] = 7
    before, after = model(tokens), model(changed)
    np.testing.assert_allclose(before[:, :9], after[:, :9], rtol=1e-5, atol=1e-6)
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 1e-3
    total, count, _ = model.loss({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    assert float(total / count) == pytest.approx(np.log(64), abs=0.1)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama2-70b"])
def test_bfloat16_models_compute_in_it_and_keep_float32_parameters(name: str) -> None:
    model = abstract(name, 1)
    assert {v.get_value().dtype for _, v in parameters(name)} == {jnp.dtype("float32")}
    graphdef, state = nnx.split(model)
    logits = jax.eval_shape(
        lambda s, t: nnx.merge(graphdef, s)(t), state, jax.ShapeDtypeStruct((1, 8), jnp.int32)
    )
    assert logits.dtype == jnp.bfloat16
