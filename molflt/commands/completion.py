"""``molflt completion``: a script with which a shell completes commands, options and values."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import reduce
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from molflt.commands.cli import _GROUPS, COMMANDS, _parser
from molflt.commands.evaluate import parser_of
from molflt.commands.options import _is_flag, _options_of, _show_flags
from molflt.files import write_atomically
from molflt.shipped import config_names
from molflt.training.recipes import RECIPES

__all__ = ["completion"]

_CONFIGS = "_molflt_configs"


def completion(shell: Literal["bash", "zsh", "tcsh"], out: Path | None = None) -> None:
    """Prints a script with which a shell completes commands, options, values and files.

    It holds the options of all recipes, and needs molflt no longer once it is written:
    molflt completion bash > ~/.local/share/bash-completion/completions/molflt

    Args:
        shell: what it is for.
        out: file to write; by default it is printed.

    Raises:
        ModuleNotFoundError: without the package shtab.
    """
    if find_spec("shtab") is None:
        raise ModuleNotFoundError(
            "completion needs the package shtab; pip install 'molflt[completion]'"
        )
    script = f"{_script(shell)}\n"
    if out is None:
        print(script, end="")
    else:
        write_atomically(out, script.encode())
        print(f"written: {out}")


def _script(shell: str) -> str:
    names = shlex.quote(" ".join(config_names()))
    preamble = f'{_CONFIGS}() {{ compgen -W {names} -- "$1"; compgen -f -- "$1"; }}'
    preambles = [preamble] if shell == "bash" else []
    script: str = _whole().get_completion_script(f"shtab-{shell}", preambles=preambles)
    return script


def _whole() -> ArgumentParser:
    """All commands as one parser, which is not used to parse."""
    whole = ArgumentParser(prog="molflt")
    whole.add_argument("--version", action="version", version="")
    commands = whole.add_subcommands()
    groups = {}
    for group, summary in _GROUPS.items():
        commands.add_subcommand(group, parser := ArgumentParser(), help=summary)
        groups[group] = parser.add_subcommands()
    for path, command in COMMANDS.items():
        below = commands if len(path) == 1 else groups[path[0]]
        below.add_subcommand(path[-1], _merged(path), help=command.summary)
    return whole


def _merged(path: tuple[str, ...]) -> ArgumentParser:
    """The options of a command, whatever the recipe is; what it decides is of any of the types."""
    from shtab import FILE

    merged = ArgumentParser()
    options: dict[str, list[Any]] = {}
    for parser in _parsers(path):
        found = {action.dest: action for action in parser._actions if not action.option_strings}
        for name, action in (found | _options_of(parser)).items():
            if hasattr(action, "_typehint"):  # neither --help nor --config
                options.setdefault(name, []).append(action)
    if path == ("train",):
        _add_config(merged, FILE)
    for name, actions in options.items():
        if all(map(_is_flag, actions)):
            merged.add_argument(name, action="store_true", help=actions[0].help)
        else:
            hint: Any = reduce(or_, (action._typehint for action in actions))
            added = merged.add_argument(name, type=hint, help=actions[0].help)
            if hint is str and not name.startswith("-"):  # a run, structures, text
                added.complete = FILE
    _show_flags(merged)
    return merged


def _add_config(parser: ArgumentParser, files: dict[str, Any]) -> None:
    action = parser.add_argument("--config", help="YAML file, or the name of a shipped one")
    parser.add_argument("--print_config", action="store_true", help="print all options as YAML")
    action.complete = {**files, "bash": _CONFIGS}


def _parsers(path: tuple[str, ...]) -> Iterator[ArgumentParser]:
    """The parser of a command, for each recipe if that decides its options."""
    if path == ("train",):
        yield from (_parser(path, [f"--recipe={name}"]) for name in RECIPES)
    elif path == ("evaluate",):
        yield from (parser_of(recipe) for recipe in RECIPES.values())
    else:
        yield _parser(path, [])
