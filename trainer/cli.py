"""The command line: `stagewright train RECIPE`, `stagewright recipes`, `stagewright schedule NAME`.

In: argv and the environment, which nothing else reads.  Out: an exit code: 0, 1 for an error with
one clear message, 2 for wrong usage, 130 after Ctrl-C.  JAX is imported when a run starts, after
the environment is set for it, so that help and usage errors take no time.
"""

import difflib
import importlib
import inspect
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from stagewright.trainer.config import RunConfig, changed_fields
from stagewright.trainer.platform import simulated_devices

_HELP = """\
usage: stagewright COMMAND ...

  train RECIPE [--FIELD VALUE ...]   train a model; `stagewright train RECIPE --help` lists fields
  recipes                            list the recipes
  schedule NAME [--OPTION ...]       draw a pipeline schedule, compare all of them or check a file;
                                     `stagewright schedule --help` lists options

  --debug    show where an error came from
  --version  print the version
  --help     print this
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      argv: the arguments after the program's name; those of the process by default.

    Returns:
      The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(importlib.import_module("stagewright").__version__)
        return 0
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": _train,
        "recipes": _list_recipes,
        "schedule": _schedule,
    }
    if words[0] not in commands:
        return _usage(f"there is no command {words[0]!r}.{_nearest(words[0], commands)}")
    return _guard(lambda: commands[words[0]](words[1:]), debug=debug)


def _train(words: list[str]) -> None:
    recipes = _recipes()
    if not words or words[0] in ("-h", "--help"):
        print("usage: stagewright train RECIPE [--FIELD VALUE ...]\n")
        _list_recipes([])
        raise SystemExit(0 if words else 2)
    if words[0] not in recipes:
        name = words[0]
        message = f"there is no recipe {name!r}.{_nearest(name, recipes)}"
        raise SystemExit(_usage(f"{message} `stagewright recipes` lists them."))
    base = recipes[words[0]]()
    config = _parse(words[0], base, words[1:])
    os.environ.update(simulated_devices(config.mesh.size, os.environ))
    run = importlib.import_module("stagewright.trainer.run").run
    run(config, recipe=words[0], changed=changed_fields(config, base))


def _parse(recipe: str, base: RunConfig, words: list[str]) -> RunConfig:
    """The recipe's configuration with the fields that are named on the command line replaced."""
    import tyro

    about = f"{inspect.getdoc(_recipes()[recipe])}\n\nFields and their values in this recipe:"
    program = f"stagewright train {recipe}"
    return tyro.cli(RunConfig, default=base, args=words, prog=program, description=about)


def _list_recipes(words: list[str]) -> None:
    if words:
        raise SystemExit(_usage(f"`stagewright recipes` takes no arguments, got {words}"))
    for name, recipe in _recipes().items():
        summary = (recipe.__doc__ or "").strip().splitlines()[0]
        print(f"{name:<16}{summary}")


def _schedule(words: list[str]) -> None:
    command = importlib.import_module("stagewright.trainer.schedule_command")
    shown = sys.stdout.isatty()
    screen = command.Screen(
        width=shutil.get_terminal_size().columns if shown else None,
        color=shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
    )
    raise SystemExit(command.run_schedule(words, screen))


def _recipes() -> dict[str, Callable[[], RunConfig]]:
    """The recipes, by name.  They stand above the trainer, so only the program looks them up."""
    found: dict[str, Any] = importlib.import_module("stagewright.recipes").RECIPES
    return found


def _guard(command: Callable[[], None], *, debug: bool) -> int:
    """Run a command; turn what goes wrong into a message and an exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            command()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 2
    except KeyboardInterrupt as interrupt:
        print(f"\nstagewright: {str(interrupt) or 'stopped by Ctrl-C'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more
        return 1
    except Exception as error:
        if debug:
            raise
        text = str(error) or type(error).__name__
        print(f"stagewright: {text}\n(--debug shows where)", file=sys.stderr)
        return 1
    return 0


def _usage(message: str) -> int:
    print(f"stagewright: {message}\nTry `stagewright --help`.", file=sys.stderr)
    return 2


def _nearest(word: str, choices: Any) -> str:
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(choices)}."


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"stagewright: {category.__name__}: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
