"""Generation continues the prompt, one byte after another, also past the model's context."""

import jax.numpy as jnp
import pytest
from flax import nnx

from stagewright.trainer.generate import generate


class CountUp(nnx.Module):
    """Thinks that byte b is followed by b + step."""

    def __init__(self, step: int):
        self.step = nnx.Param(jnp.int32(step))

    def __call__(self, tokens):
        following = (tokens + self.step[...]) % 256
        return 20.0 * nnx.one_hot(following, 256)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("context", [2, 4, 32])
def test_each_byte_follows_the_one_before(context: int, temperature: float) -> None:
    text = generate(CountUp(1), b"abc", length=8, context=context, temperature=temperature)
    assert text == b"abcdefghijk"


def test_the_seed_decides() -> None:
    class Unsure(nnx.Module):
        def __call__(self, tokens):
            return jnp.zeros((*tokens.shape, 256))

    texts = [generate(Unsure(), b"a", length=8, context=4, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        generate(CountUp(1), b"", length=1, context=1)
    with pytest.raises(ValueError, match="temperature >= 0"):
        generate(CountUp(1), b"a", length=1, context=1, temperature=-1.0)
    assert generate(CountUp(1), b"a", length=0, context=1) == b"a"
