"""Every recipe has a name, a manual, and a configuration whose parts fit together."""

import pytest

from stagewright.recipes import RECIPES
from stagewright.trainer.config import RunConfig

NAMES = sorted(RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_tells_its_command_and_what_to_expect(name: str) -> None:
    manual = RECIPES[name].__doc__
    assert f"`stagewright train {name}`" in manual
    assert "Expected:" in manual


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_parts_fit_together(name: str) -> None:
    config = RECIPES[name]()
    assert isinstance(config, RunConfig)
    assert config == RECIPES[name]()
    assert config.data.batch % (config.engine.microbatches * config.mesh.data) == 0
    assert config.data.length <= config.model.context
    assert config.model.depth >= config.mesh.pipe
