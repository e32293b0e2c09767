"""The recipe's optimizer: a schedule in updates, no decay of vectors, numbers checked."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stagewright.trainer.config import OptimizerConfig
from stagewright.trainer.optimizers import build_optimizer


def rates(config: OptimizerConfig, steps: int) -> list[float]:
    optimizer = build_optimizer(config, steps)
    params = {"w": jnp.ones((2, 2))}
    state, found = optimizer.init(params), []
    for _ in range(steps):
        _, state = optimizer.update(params, state, params)
        found.append(float(state[-1].hyperparams["learning_rate"]))
    return found


def test_the_rate_rises_in_a_line_and_falls_to_its_last_value() -> None:
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=4, final_fraction=0.2)
    found = rates(config, 12)
    np.testing.assert_allclose(found[:5], [0.0, 0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    assert found[5:] == sorted(found[5:], reverse=True)
    assert 0.02 <= found[-1] < 0.03


@pytest.mark.parametrize(("warmup", "steps"), [(0, 3), (5, 3), (1, 1)])
def test_short_runs_and_no_warmup_work(warmup: int, steps: int) -> None:
    found = rates(OptimizerConfig(learning_rate=0.1, warmup_steps=warmup), steps)
    assert len(found) == steps
    assert max(found) > 0


def test_vectors_do_not_decay() -> None:
    optimizer = build_optimizer(OptimizerConfig(warmup_steps=0, weight_decay=0.1), 10)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    zeros = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    assert np.all(after["kernel"] < 1)
    assert np.all(after["bias"] == 1)


@pytest.mark.parametrize("name", ["learning_rate", "warmup_steps", "b1", "clip_norm"])
def test_numbers_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"optimizer\.{name} .*-1"):
        build_optimizer(OptimizerConfig(**{name: -1}), 10)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        build_optimizer(OptimizerConfig(), 0)
