"""Parsing of command lines with jsonargparse, with readable error messages.

jsonargparse reads ``--skip_bad=true`` and ``--splits=[a,b]``; users type ``--skip-bad`` and
``--splits a b``.
"""

from __future__ import annotations

import inspect
import re
import shlex
from argparse import Action, ArgumentError
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise, takewhile
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import yaml

from molflt.files import did_you_mean, shown
from molflt.shipped import config_names
from molflt.training.limits import check_ranges, readable

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

_POSITION = "model.position_options"
_LAYERED = ("--config", "--data.", "--model.", "--task.", "--trainer.")  # the last value applies


def yaml_of(content: Mapping[str, Any]) -> str:
    """Returns YAML for readers: numbers have six digits, and sentences one line each."""

    class Dumper(yaml.SafeDumper):
        pass

    def represent_list(dumper: yaml.SafeDumper, value: list[object]) -> yaml.Node:
        one_line = not any(" " in str(item) for item in value)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=one_line)

    Dumper.add_representer(float, lambda dumper, x: dumper.represent_float(float(f"{x:.6g}")))
    Dumper.add_representer(list, represent_list)
    layout: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 999}
    return yaml.dump(dict(content), None, Dumper, allow_unicode=True, **layout).rstrip()


def refuse_idle(run: str, why: str, options: Mapping[str, object]) -> None:
    """Raises ValueError for the first option that is set; `why` explains why it has no effect."""
    for name, value in options.items():
        if value is not None:
            words = value if isinstance(value, list) else [value]
            words = [str(word) for word in words if word is not True]  # a flag
            option = shlex.join([f"--{name.replace('_', '-')}", *words])
            raise ValueError(f"{run}: {why}; {option} has no effect; remove it")


def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parses command-line words; raises ValueError for the first invalid option or key."""
    from molflt.training.config import check_values  # loads jsonargparse

    parser.exit_on_error = False
    parser.allow_abbrev = False  # an abbreviation would turn a typo into a different option
    for action in options_of(parser).values():  # --help shows flags and lists as users type them
        if _is_flag(action):
            action.metavar = ""
        elif kinds_of(action) & {list, tuple}:
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
            action.metavar = "ITEM ..."
    words = normalized(words, parser)
    try:
        config: Namespace = parser.parse_args(words)
    except (ArgumentError, RecursionError) as error:
        raise ValueError(f"{readable(error)}; see `{parser.prog} --help`") from error
    check_values(parser, config)
    options = vars(config.as_flat())
    if position := options.get(_POSITION):
        try:
            _position_parser().parse_object(position)
        except ArgumentError as error:
            raise ValueError(f"{_POSITION}: {readable(error)}") from None
    check_ranges(options)
    return config


def options_of(parser: ArgumentParser) -> dict[str, Action]:
    """Returns the options of a parser by long name, including the leading ``--``."""
    return {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not name.endswith("+")
    }


def kinds_of(action: Action) -> set[object]:
    """Returns the types that an option accepts, without the types of items in lists."""
    hint = getattr(action, "_typehint", None)
    return {get_origin(kind) or kind for kind in (hint, *get_args(hint))}


def _is_flag(action: Action | None) -> bool:
    return action is not None and kinds_of(action) - {NoneType, Union, UnionType} == {bool}


def normalized(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Rewrites arguments for jsonargparse: each option and its value become one word.

    ``--skip-bad`` becomes ``--skip_bad=true``, and ``--no-skip-bad`` becomes ``--skip_bad=false``.
    ``--splits a b`` becomes an empty list and one append for each word; ``--splits a --splits b``
    becomes the same list. Other options may be given once, except those in `_LAYERED`.
    """
    options, remaining, out = options_of(parser), list(words), list[str]()
    for before, word in pairwise(["", *words]):  # an empty path would be the current folder
        option = options.get(word[:-1] or before)
        if re.fullmatch("(--[^=]+=)?", word) and not (option and option.default == ""):
            raise ValueError(f"{word or before or 'path'}: expected a value; got empty text")
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            return [*out, word, *remaining]
        if "--data.root" in options and (_is_value(word) or word == "--data"):
            raise ValueError(f"unexpected {shown(word)[1:-1]}; {_meant(word, remaining, out)}")
        if _is_value(word) or word == "-h":
            out.append(word)
        else:
            new = _rewritten(word, remaining, options, parser.prog)
            name = new[0].partition("=")[0]
            given = [other for other in out if other.startswith(f"{name}=")]
            is_layered = name.startswith(_LAYERED) and name != "--data.root"
            may_repeat = len(new) > 1 or is_layered or name.endswith("+")
            if {*given} - {*new} and not may_repeat:
                raise ValueError(f"{name}: expected once; got {given[0]}, {new[0]}; remove one")
            out += new[1:] if len(new) > 1 and given else new
    return out


def _rewritten(
    word: str, remaining: list[str], options: Mapping[str, Action], prog: str
) -> list[str]:
    """Rewrites one option; its values, if they are further words, are removed from `remaining`."""
    typed, equals, value = word.partition("=")
    plus = "+" if typed.endswith("+") else ""  # appends to a list
    name = typed.removesuffix("+").replace("-", "_").replace("__", "--", 1)
    if name not in options:
        positive, group = name.replace("--no_", "--", 1), options.get(name.rpartition(".")[0])
        if not equals and _is_flag(options.get(positive)):
            return [f"{positive}=false"]
        if group is None or dict not in kinds_of(group):  # unlike model.position_options
            part, _, last = name.partition(".")
            hint = did_you_mean(name, options)
            if part == "--model" and f"--{last}" in options_of(_position_parser()):
                hint = f"; did you mean --{_POSITION}.{last}?"
            raise ValueError(f"unknown option {shown(typed)[1:-1]}{hint}; see `{prog} --help`")
    action = options.get(name)
    if not equals:
        return _with_values(typed, f"{name}{plus}", action, remaining)
    if action is not None and tuple in kinds_of(action):
        value = f"[{value.strip('[]')}]"  # --betas=0.9,0.99
    return [f"{name}{plus}={value}"]


def _meant(word: str, remaining: Sequence[str], out: Sequence[str]) -> str:
    """Returns advice for a file name without an option; `out` contains the options before it."""
    file = next(filter(_is_value, [word, *remaining]), "FILE")
    if file.endswith((".yaml", ".yml")) or file in config_names():
        return f"did you mean --config {shlex.quote(file)}?"
    if any(option.startswith("--data.root=") for option in out):
        return "for several files, quote a pattern, as in --data.root '*.extxyz'"
    return f"did you mean --data.root {shlex.quote(file)}?"


def _with_values(typed: str, name: str, action: Action | None, remaining: list[str]) -> list[str]:
    """Removes the values of an option from `remaining` and returns the option with them."""
    if _is_flag(action):
        has_value = remaining and remaining[0].lower() in ("true", "false")
        return [f"{name}={remaining.pop(0).lower() if has_value else 'true'}"]
    if action is not None and action.nargs is not None:  # --help, --print_config
        return [name]
    kinds = set() if action is None else kinds_of(action)
    several = bool(kinds & {list, tuple})
    items = list(takewhile(_is_value, remaining))
    if not items:
        expected = "at least one value" if several else "one value"
        raise ValueError(f"option {typed}: expected {expected}; got none")
    if not several or remaining[0].startswith("["):
        return [f"{name}={remaining.pop(0)}"]
    del remaining[: len(items)]
    if tuple in kinds:
        return [f"{name}=[{', '.join(items)}]"]
    first = [] if name.endswith("+") else [f"{name}=[]"]
    return [*first, *(f"{name.removesuffix('+')}+={item}" for item in items)]


def _is_value(word: str) -> bool:
    """Returns True if a word is a value (including a negative number), not an option."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _position_parser() -> ArgumentParser:
    """Returns a parser for the options of all position modules, spectra and node rules."""
    from jsonargparse import ArgumentParser

    from molflt.attention.nodes import NODES
    from molflt.attention.positions import POSITIONS
    from molflt.attention.spectra import SPECTRA

    classes: list[Any] = [*POSITIONS.values(), *SPECTRA.values(), *NODES.values()]
    hints_of: dict[str, set[Any]] = {}
    for build in classes:
        prefix = "node_" if build in NODES.values() else ""
        for name, parameter in inspect.signature(build).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                hints_of.setdefault(prefix + name, set()).add(parameter.annotation)
    parser = ArgumentParser(exit_on_error=False)
    for name, hints in hints_of.items():
        parser.add_argument(f"--{name}", type=reduce(or_, hints))
    return parser
