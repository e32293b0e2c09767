"""The single-program engine is plain `jax.jit`: the same numbers, compiled ahead, state reused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.pipelining.engines import CompiledStep, Engine, SingleProgramEngine
from stagewright.pipelining.mesh import MeshSpec


def init():
    return {"w": jnp.arange(3.0), "count": jnp.int32(0)}


def step(state, batch):
    w = state["w"] + jnp.sum(batch["x"], axis=(0, 1))
    return {"w": w, "count": state["count"] + 1}, {"norm": jnp.sum(w * w)}


def batch_of(size: int):
    return {"x": np.ones((2, size, 3), np.float32)}


def compile_for(mesh: MeshSpec = MeshSpec()):  # noqa: B008
    return SingleProgramEngine(2).compile(init=init, step=step, batch=batch_of(4), mesh=mesh)


def test_it_is_an_engine() -> None:
    engine = SingleProgramEngine(2)
    assert isinstance(engine, Engine)
    assert engine.microbatches == 2
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SingleProgramEngine(0)


def test_it_gives_what_jit_gives_and_consumes_the_state() -> None:
    compiled: CompiledStep = compile_for()
    state = compiled.init()
    wanted = jax.jit(step)(init(), batch_of(4))
    found = compiled(state, batch_of(4))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert state["w"].is_deleted()
    assert compiled.last_timeline is None


def test_a_pipeline_is_refused_with_a_mesh_that_fits() -> None:
    with pytest.raises(ValueError, match=r"pipe=2; use MeshSpec\(data=6, tensor=1\)"):
        compile_for(MeshSpec(pipe=2, data=3))


@pytest.mark.parametrize("mesh", [MeshSpec(data=4), MeshSpec(data=2, tensor=2)], ids=str)
def test_on_several_devices_the_numbers_are_those_of_one(mesh: MeshSpec) -> None:
    compiled = compile_for(mesh)
    found = compiled(compiled.init(), batch_of(4))
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(step)(init(), batch_of(4)))


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"batch\['x'\] of shape \(2, 4, 3\).*'batch'.*data=3"):
        compile_for(MeshSpec(data=3))


def test_a_new_shape_of_batch_compiles_by_itself() -> None:
    compiled = compile_for()
    state, _ = compiled(compiled.init(), batch_of(4))
    state, _ = compiled(state, batch_of(5))
    np.testing.assert_array_equal(state["w"], np.arange(3.0) + 8 + 10)
    assert int(state["count"]) == 2


def test_the_state_lives_on_the_device_that_was_named() -> None:
    device = jax.devices()[3]
    compiled = compile_for(MeshSpec(devices=(3,)))
    state, metrics = compiled(compiled.init(), batch_of(4))
    assert state["w"].devices() == metrics["norm"].devices() == {device}
    placed = compiled.place(jax.device_put(init(), jax.devices()[0]))
    assert placed["w"].devices() == {device}
    compiled(placed, jax.device_put(batch_of(4), jax.devices()[1]))


def test_the_summary_tells_the_plan() -> None:
    summary = compile_for().summary
    (row,) = summary.stages
    assert (summary.num_ranks, summary.num_microbatches, summary.planned_bubble) == (1, 2, 0.0)
    assert row.parameters == 4
    assert row.tasks[0][0] == "step"
    assert row.tasks[0][1] > 0
    assert summary.compile_seconds > 0
