"""A configuration is plain data: frozen, keyword-only, listed and compared by dotted names."""

import dataclasses
import inspect

import pytest

from stagewright.trainer import config
from stagewright.trainer.config import (
    EngineConfig,
    MeshConfig,
    RunConfig,
    changed_fields,
    flatten_config,
)

CONFIGS = [
    item
    for item in vars(config).values()
    if inspect.isclass(item) and dataclasses.is_dataclass(item)
]


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_field_is_keyword_only_and_has_its_line_in_the_manual(kind) -> None:
    assert kind.__dataclass_params__.frozen
    source = inspect.getsource(kind)
    for item in dataclasses.fields(kind):
        assert item.kw_only
        _, _, after = source.partition(f"    {item.name}: ")
        assert after.splitlines()[1].strip().startswith('"""'), f"{kind.__name__}.{item.name}"


def test_names_are_those_of_the_command_line() -> None:
    flat = flatten_config(RunConfig(model=MeshConfig(pipe=3)))
    assert flat["model.pipe"] == 3
    assert flat["optimizer.learning-rate"] == 1e-3
    assert flat["run-dir"] is None


def test_changes_tell_both_values() -> None:
    base = RunConfig(model=MeshConfig())
    other = dataclasses.replace(base, steps=7, mesh=MeshConfig(pipe=4))
    assert changed_fields(other, base) == {"steps": (100, 7), "mesh.pipe": (1, 4)}
    assert changed_fields(base, base) == {}


@pytest.mark.parametrize(("kind", "zero"), [("single", 1), ("spmd", 1), ("spmd", 3), ("mpmd", 3)])
def test_a_zero_that_an_engine_cannot_do_is_refused_with_one_that_it_can(
    kind: str, zero: int
) -> None:
    with pytest.raises(ValueError, match=f"kind {kind} cannot do --engine.zero {zero}; use"):
        EngineConfig(kind=kind, zero=zero).build()


def test_every_kind_of_engine_is_built() -> None:
    names = {
        kind: type(EngineConfig(kind=kind).build()).__name__ for kind in ("mpmd", "spmd", "single")
    }
    assert names == {"mpmd": "MpmdEngine", "spmd": "SpmdEngine", "single": "SingleProgramEngine"}
    assert EngineConfig(kind="single", zero=3).build().fsdp
