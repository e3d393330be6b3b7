"""``molflt completion``: shell completion of commands, options and values."""

from __future__ import annotations

import shlex
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from molflt.commands.cli import COMMANDS, GROUPS, parser_of
from molflt.commands.evaluate import recipe_parser
from molflt.commands.options import is_flag, options_of, show_usage
from molflt.data.packed import require
from molflt.files import write_atomically
from molflt.shipped import config_names
from molflt.training.recipes import RECIPES

__all__ = ["completion"]

_CONFIGS = "_molflt_configs"  # shell function that lists the shipped configurations


def completion(shell: Literal["bash", "zsh", "tcsh"], out: Path | None = None) -> None:
    """Prints a script that lets a shell complete commands, options, values and files.

    The script contains the options of all recipes. For bash:
    molflt completion bash > ~/.local/share/bash-completion/completions/molflt

    Args:
        shell: name of the shell.
        out: file to write; by default the script is printed.
    """
    require("shtab", "completion", "completion")
    whole = ArgumentParser(prog="molflt")
    whole.add_argument("--version", action="version", version="")
    commands = whole.add_subcommands()
    groups = {}
    for group, summary in GROUPS.items():
        commands.add_subcommand(group, parser := ArgumentParser(), help=summary)
        groups[group] = parser.add_subcommands()
    for path, command in COMMANDS.items():
        below = commands if len(path) == 1 else groups[path[0]]
        below.add_subcommand(path[-1], _merged(path), help=command.summary)
    names = shlex.quote(" ".join(config_names()))
    preamble = f'{_CONFIGS}() {{ compgen -W {names} -- "$1"; compgen -f -- "$1"; }}'
    preambles = [preamble] if shell == "bash" else []
    script = f"{whole.get_completion_script(f'shtab-{shell}', preambles=preambles)}\n"
    if out is None:
        print(script, end="")
    else:
        write_atomically(out, script.encode())
        print(f"written: {out}")


def _merged(path: tuple[str, ...]) -> ArgumentParser:
    """Returns a parser with the options of all recipes; types are unions over the recipes."""
    from shtab import FILE

    merged = ArgumentParser()
    parsers = [parser_of(path)]
    if path == ("train",):
        parsers = [parser_of(path, [f"--recipe={name}"]) for name in RECIPES]
        config = merged.add_argument("--config", help="YAML file, or a shipped configuration")
        config.complete = {**FILE, "bash": _CONFIGS}
        merged.add_argument("--print_config", action="store_true", help="print all options as YAML")
    elif path == ("evaluate",):
        parsers = [recipe_parser(recipe) for recipe in RECIPES.values()]
    options: dict[str, list[Any]] = {}
    for parser in parsers:
        places = {action.dest: action for action in parser._actions if not action.option_strings}
        for name, action in (places | options_of(parser)).items():
            if hasattr(action, "_typehint"):  # not --help or --config
                options.setdefault(name, []).append(action)
    for name, actions in options.items():
        if all(map(is_flag, actions)):
            merged.add_argument(name, action="store_true", help=actions[0].help)
        else:
            hint: Any = reduce(or_, (action._typehint for action in actions))
            added = merged.add_argument(name, type=hint, help=actions[0].help)
            if hint is str and not name.startswith("-"):  # a run, structures, text
                added.complete = FILE
    show_usage(merged)
    return merged
