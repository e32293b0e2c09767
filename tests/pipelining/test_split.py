"""I and W together give what B gives, for every stage, however loops and checkpoints hide the two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.partition import Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.actions import Kind
from stagewright.pipelining.graph import evaluate
from stagewright.pipelining.split import split_backwards
from stagewright.pipelining.stages import cut_stages
from stagewright.pipelining.trace import trace_step

WIDTH, STAGES = 3, 3


def plain(x, w):
    return jnp.tanh(x @ w["a"] + w["b"][None]) @ w["c"]


def scanned(x, w, body=plain):
    stacked = jax.tree.map(lambda a: jnp.stack([a, a * 0.5]), w)
    return jax.lax.scan(lambda h, layer: (body(h, layer), None), x, stacked)[0]


def checkpointed(x, w):
    return jax.checkpoint(plain)(x, w)


def scanned_checkpoint(x, w):
    return scanned(x, w, jax.checkpoint(plain))


def shared_in_scan(x, w):
    """One parameter that every iteration reads: its gradient is carried backwards."""
    return jax.lax.scan(lambda h, s: (jnp.tanh(h @ w["a"]) * s + w["b"][None], None), x, w["b"])[0]


def nested_scan(x, w):
    def outer(h, scale):
        return jax.lax.scan(lambda g, s: (jnp.tanh(g @ w["a"]) * s * scale, None), h, w["b"])[
            0
        ], None

    return jax.lax.scan(outer, x, w["b"])[0] @ w["c"]


LAYERS = [plain, scanned, checkpointed, scanned_checkpoint, shared_in_scan, nested_scan]


def make_plan(layer):
    keys = jax.random.split(jax.random.key(0), 3 * STAGES)

    def draw(key, *shape):
        return jax.random.normal(key, shape) / 2

    weights = [
        {
            "a": draw(keys[3 * s], WIDTH, WIDTH),
            "b": draw(keys[3 * s + 1], WIDTH),
            "c": draw(keys[3 * s + 2], WIDTH, WIDTH),
        }
        for s in range(STAGES)
    ]

    def loss(weights, x):
        for stage, w in enumerate(weights):
            x = layer(x, w)
            x = pipeline_yield(x) if stage < STAGES - 1 else x
        return (x**2).sum()

    leaves, treedef = jax.tree.flatten(weights)

    def step(*flat):
        weights = jax.tree.unflatten(treedef, flat[:-1])
        value, grads = accumulate_grads(lambda x: jax.value_and_grad(loss)(weights, x), flat[-1])
        return [value, *jax.tree.leaves(grads)]

    batch = jax.random.normal(jax.random.key(9), (1, 2, WIDTH))
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in [*leaves, batch]]
    trace = trace_step(step, structs)
    plan = split_backwards(cut_stages(trace.loop, STAGES, Uniform()))
    known = dict(zip(trace.inputs, [*leaves, batch], strict=True))
    for op in trace.operations:  # what was hoisted
        if all(v in known for v in op.values_in):
            known.update(
                zip(
                    op.outputs,
                    op.operator.run([known.get(a, getattr(a, "value", None)) for a in op.inputs]),
                    strict=True,
                )
            )
    values = {inner: known[outer] for inner, outer in trace.loop.invariants}
    values |= {inner: known[outer][0] for inner, outer in trace.loop.batch}
    values[trace.loop.index] = jnp.int32(0)
    return plan, values, jax.grad(loss)(weights, batch[0])


def run(task, values, results):
    found = evaluate(task.graph, [values[v] for v in task.reads])
    values.update(zip(task.exports, found, strict=False))
    for result, value in zip(task.results, found[len(task.exports) :], strict=True):
        results.setdefault(result.output, []).append(value)


@pytest.mark.parametrize("layer", LAYERS)
def test_i_and_w_give_what_b_gives(layer):
    plan, given, expected = make_plan(layer)
    found = []
    for kinds in ([Kind.B], [Kind.I, Kind.W]):
        values, results = dict(given), {}
        for stage in range(STAGES):
            run(plan.tasks[stage, Kind.F], values, results)
        for stage in reversed(range(STAGES)):
            for kind in kinds:
                run(plan.tasks[stage, kind], values, results)
        found.append([sum(results[output]) for output in sorted(results)][1:])
    for whole, split, right in zip(*found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(whole, right, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_stage_has_both_and_gradients_leave_in_i(layer):
    plan, _, _ = make_plan(layer)
    for stage in range(STAGES):
        first, second = plan.tasks[stage, Kind.I], plan.tasks[stage, Kind.W]
        assert first.operations
        assert second.results
        assert not second.exports
        assert set(plan.tasks[stage, Kind.B].exports) <= set(first.exports)


def products(operations):
    """Matrix products, loops counted once a round."""
    total = 0
    for op in operations:
        if op.operator.name == "scan":
            body = getattr(op.operator, "body", None)
            assert body is not None, "a scan was left whole"
            total += op.operator.length * products(body.operations)
        total += op.operator.name == "dot_general"
    return total


@pytest.mark.parametrize(
    ("layer", "num_layers"), [(plain, 1), (scanned, 2), (scanned_checkpoint, 2)]
)
def test_the_work_is_parted_and_not_done_twice(layer, num_layers):
    plan, _, _ = make_plan(layer)
    recomputed = num_layers if layer is scanned_checkpoint else 0
    for stage in (1, 2):
        assert products(plan.tasks[stage, Kind.I].operations) == 2 * num_layers + recomputed
        assert products(plan.tasks[stage, Kind.W].operations) == 2 * num_layers
