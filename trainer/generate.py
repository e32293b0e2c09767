"""Text from a trained byte-level model: one byte after another, on one device.

In: a model that maps tokens int32[1, context] to logits [1, context, vocab], and a prompt.  Out:
the prompt and what follows it.  The whole text is one XLA program of fixed shapes, compiled once;
each byte looks at the `context` bytes before it and computes all of them anew, which is slow for
long texts and good enough for a sample.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def generate(
    model: nnx.Module,
    prompt: bytes,
    *,
    length: int,
    context: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> bytes:
    """Continue a text.

    Args:
      model: called as `model(tokens)`; in evaluation mode.
      prompt: at least one byte; the model sees the last `context` of them.
      length: bytes to add.
      context: tokens the model looks back at.
      temperature: 0 takes the likeliest byte every time; 1 draws as the model thinks; in between,
        likely bytes are preferred.
      seed: seed of the draw.

    Returns:
      The prompt and `length` more bytes.

    Raises:
      ValueError: if the prompt is empty, or a number is out of range.
    """
    if not prompt:
        raise ValueError("generate needs a prompt of at least one byte, got none")
    if length < 0 or context < 1 or temperature < 0:
        raise ValueError(
            f"generate needs length >= 0, context >= 1 and temperature >= 0, got {length}, "
            f"{context} and {temperature}"
        )
    known = np.frombuffer(prompt[-context:], np.uint8).astype(np.int32)
    window = np.zeros(context, np.int32)
    window[: known.size] = known
    graphdef, state = nnx.split(model)
    program = jax.jit(_continue, static_argnums=(0, 4, 5))
    key = jax.random.key(seed)
    added = program(graphdef, state, window, np.int32(known.size), length, temperature, key)
    return prompt + np.asarray(added).astype(np.uint8).tobytes()


def _continue(
    graphdef: Any, state: Any, window: Any, size: Any, length: int, temperature: float, key: Any
) -> Any:
    """Tokens int32[length] that follow the first `size` tokens of the window."""

    def step(carry: tuple[Any, Any], index: Any) -> tuple[tuple[Any, Any], Any]:
        window, size = carry
        logits = nnx.merge(graphdef, state, copy=True)(window[None])[0, size - 1, :256]
        token = _draw(logits, temperature, jax.random.fold_in(key, index))
        full = size == window.size
        window = jnp.where(full, jnp.roll(window, -1), window)
        size = jnp.where(full, size, size + 1)
        return (window.at[size - 1].set(token), size), token

    return jax.lax.scan(step, (window, size), jnp.arange(length, dtype=jnp.int32))[1]


def _draw(logits: Any, temperature: float, key: Any) -> Any:
    logits = logits.astype(jnp.float32)
    if temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
