"""A loop body comes apart into stages: every operation where its operands are, and only what is needed is handed on.

Marks that the partition does not use leave no trace; cheap values that depend on no activation are made where they are
read; skips go to their reader and no further; residuals stay at home; empty tasks are absent.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.partition import Explicit, Uniform
from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.actions import Kind
from stagewright.pipelining.errors import StageError
from stagewright.pipelining.stages import cut_stages
from stagewright.pipelining.trace import trace_step

ROWS, WIDTH = 2, 5
F, B = Kind.F, Kind.B


def cut(loss, num_params, num_stages, partition=None, *, grads=True, batch=None):
    batch = np.ones((2, ROWS, WIDTH), np.float32) if batch is None else batch
    params = [np.ones((WIDTH, WIDTH), np.float32)] * num_params

    def f(params, x):
        return jax.value_and_grad(loss)(params, x) if grads else (loss(params, x), None)

    def step(*flat):
        value, found = accumulate_grads(lambda x: f(flat[:-1], x), flat[-1])
        return [value, *jax.tree.leaves(found)]

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*params, batch)]
    return cut_stages(trace_step(step, structs).loop, num_stages, partition or Uniform())


def names(plan, stage, kind):
    return [op.operator.name for op in plan.tasks[stage, kind].operations]


def shapes(plan, stage, kind):
    return [value.shape for value in plan.tasks[stage, kind].exports]


def read_by(plan, value):
    return {key for key, task in plan.tasks.items() if value in task.reads}


def chain(params, x):
    for i, w in enumerate(params):
        x = jnp.sin(x @ w)
        x = pipeline_yield(x) if i < len(params) - 1 else x
    return x.sum()


def test_each_stage_has_its_layer_forward_and_backward():
    plan = cut(chain, 3, 3)
    assert set(plan.tasks) == {(stage, kind) for stage in range(3) for kind in (F, B)}
    for stage in range(3):
        assert names(plan, stage, F).count("dot_general") == 1
        assert names(plan, stage, F).count("sin") == 1
        assert names(plan, stage, B).count("dot_general") == (1 if stage == 0 else 2)
        assert [r.output for r in plan.tasks[stage, B].results] == [1 + stage]


def test_what_is_handed_on_is_one_activation_and_one_cotangent():
    plan = cut(chain, 3, 3)
    for stage in range(3):
        between = [
            value for value in plan.tasks[stage, F].exports
            if read_by(plan, value) - {(stage, B)}
        ]  # fmt: skip
        assert [v.shape for v in between] == ([(ROWS, WIDTH)] if stage < 2 else [])
        assert shapes(plan, stage, B) == ([(ROWS, WIDTH)] if stage else [])


def test_marks_that_are_no_edge_leave_no_trace():
    plan = cut(chain, 4, 2)
    assert set(plan.tasks) == {(stage, kind) for stage in range(2) for kind in (F, B)}
    assert all("pipeline_yield" not in names(plan, *key) for key in plan.tasks)
    assert [names(plan, stage, F).count("sin") for stage in range(2)] == [2, 2]


def test_an_explicit_partition_chooses_the_edges():
    plan = cut(chain, 4, 2, Explicit((1, 3)))
    assert [names(plan, stage, F).count("sin") for stage in range(2)] == [1, 3]


def test_one_stage_needs_no_mark():
    plan = cut(lambda params, x: jnp.sin(x @ params[0]).sum(), 1, 1)
    assert set(plan.tasks) == {(0, F), (0, B)}


def test_a_mask_is_made_where_it_is_read():
    def masked(params, x):
        keep = jnp.arange(WIDTH) % 2 == 0
        for i, w in enumerate(params):
            x = jnp.where(keep[None], jnp.sin(x @ w), 0.0)
            x = pipeline_yield(x) if i < 2 else x
        return x.sum()

    plan = cut(masked, 3, 3)
    for stage in range(3):
        assert "iota" in names(plan, stage, F)
        assert "iota" in names(plan, stage, B)
    exported = [v for task in plan.tasks.values() for v in task.exports]
    assert not [v for v in exported if v.dtype == jnp.bool_]


def test_a_skip_is_read_by_its_reader_and_by_nobody_between():
    def skip(params, x):
        first = pipeline_yield(jnp.sin(x @ params[0]))
        x = pipeline_yield(jnp.sin(first @ params[1]))
        x = pipeline_yield(jnp.sin(x @ params[2]))
        return (jnp.sin(x @ params[3]) * first).sum()

    plan = cut(skip, 4, 4)
    handed = [read_by(plan, value) for value in plan.tasks[0, F].exports]
    assert {(1, F), (3, F)} <= set().union(*handed)
    assert not {(2, F), (2, B)} & set().union(*handed)
    # Stage 1 adds the two cotangents up, so stage 3 hands its own straight there, past stage 2.
    back = {
        (s, reader)
        for s in range(1, 4)
        for v in plan.tasks[s, B].exports
        for reader in read_by(plan, v)
    }
    assert {(3, (1, B)), (3, (2, B)), (2, (1, B)), (1, (0, B))} == back


def test_a_residual_goes_from_the_forward_to_its_own_backward_only():
    plan = cut(chain, 3, 3)
    for (stage, kind), task in plan.tasks.items():
        for value in task.exports:
            readers = read_by(plan, value)
            assert readers, "handed on, but nobody reads it"
            if kind is F:
                assert readers <= {(stage, B), (stage + 1, F), (stage + 1, B)}


def test_results_belong_to_the_task_that_makes_them():
    def loss(params, x):
        early = jnp.sin(x @ params[0])
        x = pipeline_yield(early)
        return jnp.sin(x @ params[1]).sum(), early, x[0] > 0

    plan = cut(loss, 2, 2, grads=False)
    assert [r.output for r in plan.tasks[0, F].results] == [1]
    assert [r.output for r in plan.tasks[1, F].results] == [0, 2]
    assert set(plan.tasks) == {(0, F), (1, F)}  # nothing goes backward


def test_what_crosses_a_mark_unread_is_neither_made_nor_sent():
    def loss(params, x):
        used, unused = pipeline_yield((jnp.sin(x @ params[0]), jnp.cos(x @ params[1])))
        del unused
        return used.sum()

    plan = cut(loss, 2, 2)
    assert "cos" not in names(plan, 0, F)
    assert [v.shape for v in plan.tasks[0, F].exports if (1, F) in read_by(plan, v)] == [
        (ROWS, WIDTH)
    ]


def test_a_stage_that_has_nothing_to_do_is_absent():
    def loss(params, x):
        return pipeline_yield(pipeline_yield(jnp.sin(x @ params[0]) * 1)).sum()

    plan = cut(loss, 1, 3)
    assert (1, F) not in plan.tasks
    assert (1, B) not in plan.tasks


@pytest.mark.parametrize("num_stages", [2, 5])
def test_too_few_marks_are_refused_with_both_numbers(num_stages):
    def one_mark_less(params, x):
        for _ in range(num_stages - 2):
            x = pipeline_yield(x * 2)
        return (x @ params[0]).sum()

    message = rf"needs {num_stages} stages.* has {num_stages - 2} stage marks"
    with pytest.raises(StageError, match=message):
        cut(one_mark_less, 1, num_stages)


def test_graphs_and_tasks_print_what_a_person_can_read():
    plan = cut(chain, 2, 2)
    assert str(plan.tasks[1, F]) == "F of stage 1"
    lines = str(plan.tasks[0, F].graph).splitlines()
    assert lines[0].startswith("in v0 v1")
    assert f"v2:float32[{ROWS}, {WIDTH}] = dot_general v" in lines[1]
    assert lines[-1].startswith("out v")
    assert "v3:float32[2, 5] = sin v2" in lines
