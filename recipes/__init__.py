"""Recipes: functions that return a run's configuration, by the names the command line uses."""

from collections.abc import Callable

from stagewright.recipes.gpt3 import GPT3
from stagewright.recipes.llama2 import LLAMA2
from stagewright.trainer.config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {**GPT3, **LLAMA2}
