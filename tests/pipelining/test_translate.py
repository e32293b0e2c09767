"""Jaxprs become flat graphs that compute the same; a stage mark where no stage can end is refused by name and line."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.errors import StageError
from stagewright.pipelining.graph import evaluate, prune
from stagewright.pipelining.translate import to_graph

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 7


def calls(x):
    y = jax.jit(lambda a: jax.nn.relu(a) * 2)(x)
    return jax.nn.gelu(y) + jnp.where(y > 0.5, y, 0.0)


def loops(x):
    def body(carry, row):
        return carry * 0.5 + row, jax.lax.cond(row.sum() > 0.5, jnp.sin, jnp.cos, row)

    return jax.lax.scan(body, x[0], x)


def checkpointed(x):
    return jax.grad(lambda x: jax.checkpoint(jnp.tanh)(x @ x.T).sum())(x)


@pytest.mark.parametrize("function", [calls, loops, checkpointed])
@pytest.mark.parametrize("inline_checkpoints", [False, True])
def test_a_graph_computes_what_its_jaxpr_does(function, inline_checkpoints):
    graph, constants = to_graph(jax.make_jaxpr(function)(X), inline_checkpoints=inline_checkpoints)
    assert not constants
    found = evaluate(graph, [X])
    for ours, theirs in zip(found, jax.tree.leaves(function(X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_calls_are_inlined_and_checkpoints_on_demand():
    graph, _ = to_graph(jax.make_jaxpr(calls)(X))
    assert not {op.operator.name for op in graph.operations} & {"jit", "pjit", "custom_jvp_call"}
    closed = jax.make_jaxpr(checkpointed)(X)
    names = [
        {op.operator.name for op in to_graph(closed, inline_checkpoints=i)[0].operations}
        for i in (0, 1)
    ]
    assert any("remat" in name or "checkpoint" in name for name in names[0])
    assert not any("remat" in name or "checkpoint" in name for name in names[1])


def test_arrays_that_are_closed_over_are_constants():
    table = jnp.arange(5.0)
    graph, constants = to_graph(jax.make_jaxpr(lambda x: x.sum() * table)(X))
    assert len(constants) <= 1  # JAX may keep it as a literal of its own kind
    pruned = prune(graph)
    assert "mul" in str(pruned)


def in_scan(x):
    return jax.lax.scan(lambda c, r: (pipeline_yield(c * r), None), x[0], x)[0]


def in_while(x):
    return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: pipeline_yield(c + 1), x)


def in_cond(x):
    return jax.lax.cond(x.sum() > 0, lambda a: pipeline_yield(a * 2), lambda a: a, x)


def in_checkpoint(x):
    return jax.checkpoint(lambda a: pipeline_yield(jnp.sin(a)))(x)


def in_jit_in_scan(x):
    return jax.lax.scan(lambda c, r: (jax.jit(pipeline_yield)(c * r), None), x[0], x)[0]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (in_scan, "scan"),
        (in_while, "while"),
        (in_cond, "cond"),
        (in_checkpoint, "checkpoint"),
        (in_jit_in_scan, "scan"),
    ],
)
def test_hidden_marks_are_refused_with_construct_and_line(function, name):
    line = inspect.getsourcelines(function)[1] + 1
    with pytest.raises(StageError, match=f"inside `{name}`") as caught:
        to_graph(jax.make_jaxpr(function)(X))
    assert f"test_translate.py:{line}" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 15


def test_marks_in_jitted_functions_are_found():
    graph, _ = to_graph(jax.make_jaxpr(lambda x: jax.jit(lambda a: pipeline_yield(a) * 2)(x))(X))
    assert [op.operator.name for op in graph.operations] == ["pipeline_yield", "mul"]
