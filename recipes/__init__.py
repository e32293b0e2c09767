"""Recipes: functions that return a run's configuration, by the names the command line uses."""

from collections.abc import Callable

from stagewright.recipes.gpt3 import gpt3_nano
from stagewright.trainer.config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "gpt3-nano": gpt3_nano,
}
