"""The claim: every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
PACKAGES = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["packages"]


def module_names() -> list[str]:
    modules = {
        found.name
        for package in PACKAGES
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
    }
    return sorted({*PACKAGES, *modules})


@pytest.mark.parametrize("name", module_names())
def test_examples_run(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(module, optionflags=flags)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples; see stdout above"
