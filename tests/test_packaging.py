"""The claim: what is installed is what the repository holds, and importing it is light.

An editable install hides a subpackage that the wheel lacks, an undeclared dependency that a test
tool happens to bring, and a public name whose module is gone. These tests find all three.
"""

import ast
import importlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import stagewright

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]

# Distributions whose import name is not their own name.
IMPORT_NAMES = {"orbax-checkpoint": "orbax", "tensorflow-datasets": "tensorflow_datasets"}


def modules_on_disk() -> dict[str, Path]:
    """The dotted name of every module and package that the wheel should hold, and its file."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *inner)).removesuffix(".__init__")] = file
    return dict(sorted(found.items()))


MODULES = modules_on_disk()
PACKAGES = [name for name, file in MODULES.items() if file.name == "__init__.py"]


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    """Runs this Python on `arguments` in `cwd` and returns what it printed; its errors are ours."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# The list of packages


def test_packages_list_equals_the_disk():
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == PACKAGES


def test_every_folder_of_modules_is_a_package():
    for file in MODULES.values():
        assert (file.parent / "__init__.py").exists(), f"{file.parent} lacks an __init__.py"


def test_type_checkers_see_every_folder():
    for package, folder in FOLDERS.items():
        link = ROOT / "typings" / package.replace(".", "/") / "__init__.py"
        assert link.resolve() == ROOT / folder / "__init__.py"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_for(module):
    docstring = ast.get_docstring(ast.parse(MODULES[module].read_text())) or ""
    assert len(docstring.split()) > 3


# The public face


def type_checking_imports() -> dict[str, str]:
    """Public name -> module, as type checkers read it in `stagewright/__init__.py`."""
    tree = ast.parse(Path(stagewright.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def test_face_is_the_same_for_python_and_type_checkers():
    submodules = dict.fromkeys(stagewright._SUBMODULES, "stagewright")
    assert type_checking_imports() == stagewright._HOMES | submodules
    assert sorted(stagewright.__all__) == sorted(type_checking_imports())
    assert set(stagewright.__all__) <= set(dir(stagewright))


@pytest.mark.parametrize("name", stagewright.__all__)
def test_public_name_resolves_and_is_documented(name):
    value = getattr(stagewright, name)
    if inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value):
        assert value.__doc__
        # A dataclass without a docstring gets its signature as one.
        assert not value.__doc__.startswith(f"{value.__name__}(")


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no public name 'Trianer'"):
        stagewright.Trianer  # noqa: B018


def test_version_is_the_installed_one():
    assert importlib.metadata.version("stagewright") == stagewright.__version__


# Imports


def test_importing_stagewright_is_light(tmp_path):
    code = (
        "import sys; before = set(sys.modules); import stagewright;"
        "print(*(set(sys.modules) - before))"
    )
    loaded = {name.partition(".")[0] for name in run_python("-c", code, cwd=tmp_path).split()}
    assert "stagewright" in loaded
    assert loaded <= {"stagewright"} | set(sys.stdlib_module_names)


def test_no_module_imports_the_heavy_and_optional_ones_at_its_top(tmp_path):
    """wandb, TensorFlow (Datasets) and Ray are imported where they are used, not before."""
    importable = [name for name in MODULES if not name.endswith(".__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {importable!r}:\n"
        "    importlib.import_module(name)\n"
        "print(*sys.modules)"
    )
    loaded = set(run_python("-c", code, cwd=tmp_path).split())
    assert loaded.isdisjoint({"wandb", "tensorflow", "tensorflow_datasets", "ray", "tensorboard"})


def imported_names(file: Path) -> set[str]:
    """The top-level names of every import statement in a file, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def declared(requirements: list[str]) -> set[str]:
    distributions = {re.split(r"[\[<>=]", text)[0] for text in requirements}
    return {IMPORT_NAMES.get(name, name) for name in distributions}


def test_every_import_is_a_declared_dependency():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    available = declared(project["dependencies"] + extras["ray"] + extras["tensorboard"])
    available |= {"stagewright"} | set(sys.stdlib_module_names)
    for module, file in MODULES.items():
        missing = imported_names(file) - available
        assert not missing, f"{module} imports {missing}, not in pyproject.toml"


def test_every_dependency_is_bounded_above():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    for requirement in (*project["dependencies"], *(text for extra in extras for text in extra)):
        assert re.search(r"==|>=[\d.]+,<\d", requirement), requirement


# The tools


def test_makefile_asks_for_the_python_of_pyproject():
    lowest, highest = re.findall(r"(\d+), (\d+)\) ?(?:<=|else)", (ROOT / "Makefile").read_text())
    assert PYPROJECT["project"]["requires-python"] == f">={'.'.join(lowest)},<{'.'.join(highest)}"


def test_pre_commit_pins_the_tools_of_the_dev_extra():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    (ruff,) = (r for r in PYPROJECT["project"]["optional-dependencies"]["dev"] if "ruff" in r)
    assert ruff in hooks


def test_tests_run_on_eight_cpu_devices():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


# The wheel


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory):
    """A folder into which the wheel was installed, from a copy of the tracked and new files."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for folder in FOLDERS.values():
        copy_sources(ROOT / folder, source / folder)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile")
    run_python(*pip, "--no-deps", "--target", str(target), str(source), cwd=target)
    return target


def copy_sources(folder: Path, target: Path) -> None:
    patterns = ("*.py", "py.typed", "*.md", "*.css", "*.js")
    for file in (file for pattern in patterns for file in folder.rglob(pattern)):
        (target / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        (target / file.relative_to(folder)).write_bytes(file.read_bytes())


def test_wheel_holds_every_module(unpacked_wheel):
    installed = {str(file.relative_to(unpacked_wheel)) for file in unpacked_wheel.rglob("*.py")}
    expected = set()
    for name, file in MODULES.items():
        init = "/__init__" if file.name == "__init__.py" else ""
        expected.add(f"{name.replace('.', '/')}{init}.py")
    assert installed == expected
    assert (unpacked_wheel / "stagewright" / "py.typed").exists()


def test_wheel_holds_what_pages_are_made_of(unpacked_wheel):
    pictures = unpacked_wheel / "stagewright" / "pipelining" / "pictures"
    for file in ("page.css", "page.js"):
        assert (pictures / file).read_bytes() == (ROOT / "pipelining/pictures" / file).read_bytes()


def test_wheel_imports_from_elsewhere(unpacked_wheel, tmp_path):
    code = (
        "import importlib\n"
        f"for name in {PACKAGES!r}:\n"
        "    print(importlib.import_module(name).__file__)"
    )
    files = run_python("-c", code, cwd=tmp_path, PYTHONPATH=str(unpacked_wheel)).split()
    assert len(files) == len(PACKAGES)
    assert all(Path(file).is_relative_to(unpacked_wheel) for file in files)
