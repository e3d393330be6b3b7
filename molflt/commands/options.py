"""Command-line words on their way to jsonargparse, and its errors on their way back.

jsonargparse reads ``--skip_bad=true`` and ``--splits=[a,b]``; people type ``--skip-bad`` and
``--splits a b``, misspell names, and want one line that says which.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Literal, NamedTuple, Union, get_args, get_origin

if TYPE_CHECKING:
    from argparse import Action

    from jsonargparse import ArgumentParser, Namespace

__all__ = ["parse"]

# Ends of keys that have had other names
_RENAMED = {
    "backend": "mixing",
    "channels": "dim",
    "k_max": "max_frequency",
    "placement": "position",
    **{
        name: f"position_options.{name}"
        for name in ("diameter", "nodes", "num_gaussians", "num_nodes", "spectrum")
    },
}


def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parses what people type.

    Raises:
        ValueError: saying which option or key is wrong, what was expected, and what was given.
    """
    from argparse import ArgumentError

    parser.exit_on_error = False
    parser.allow_abbrev = False  # an abbreviation turns a misspelt option into another one
    _show_flags(parser)
    words = _normalize(words, parser)
    given = _given(words, parser)
    try:
        config: Namespace = parser.parse_args(words)
    except ArgumentError as error:
        raise ValueError(_explain(str(error), parser, given)) from error
    return config


def _options_of(parser: ArgumentParser) -> dict[str, Action]:
    """Every ``--name`` that the parser knows."""
    return {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not name.endswith("+")
    }


def _kinds(action: Action) -> set[object]:
    """What an option may hold: types, without their parameters."""
    hint = getattr(action, "_typehint", None)
    return {get_origin(kind) or kind for kind in (hint, *get_args(hint))}


def _is_flag(action: Action | None) -> bool:
    return getattr(action, "_typehint", None) is bool


def _show_flags(parser: ArgumentParser) -> None:
    for action in _options_of(parser).values():
        if _is_flag(action):
            action.metavar = ""
        elif _kinds(action) & {list, tuple}:
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
            action.metavar = "ITEM ..."


def _normalize(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Rewrites what people type into what jsonargparse reads: each option and its value one word.

    ``--skip-bad`` becomes ``--skip_bad=true`` (``--no-skip-bad``: false), and ``--splits a b``
    becomes an emptied list and one append per word.

    Raises:
        ValueError: If an option does not exist, or has no value.
    """
    options = _options_of(parser)
    rest = list(words)
    out: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        if not word.startswith("--"):
            out.append(word)
            continue
        typed, equals, value = word.partition("=")
        name = _option_name(typed.removesuffix("+"))
        append = "+" * typed.endswith("+")
        positive = name.replace("--no_", "--", 1)
        if name not in options and not equals and _is_flag(options.get(positive)):
            out.append(f"{positive}=false")
        elif name not in options and not _is_item(name, options):
            raise ValueError(_unknown_option(typed, options, parser.prog))
        elif equals:
            out.append(f"{name}{append}={value}")
        else:
            out += _with_values(typed, name, append, options.get(name), rest)
    return out


def _with_values(
    typed: str, name: str, append: str, action: Action | None, rest: list[str]
) -> list[str]:
    """An option with the values that follow it, which are taken off `rest`."""
    if _is_flag(action):
        explicit = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
        return [f"{name}={explicit.lower()}"]
    if action is not None and action.nargs is not None:  # --help, --print_config
        return [name]
    kinds = set() if action is None else _kinds(action)
    several = bool(kinds & {list, tuple})
    count = next((i for i, word in enumerate(rest) if not _is_value(word)), len(rest))
    if not count:
        expected = "at least one value" if several else "one value"
        raise ValueError(f"option {typed}; expected {expected}; got none")
    if not several or rest[0].startswith("["):
        return [f"{name}{append}={rest.pop(0)}"]
    items = rest[:count]
    del rest[:count]
    if tuple in kinds:
        return [f"{name}=[{', '.join(items)}]"]
    return [*([] if append else [f"{name}=[]"]), *(f"{name}+={item}" for item in items)]


def _is_value(word: str) -> bool:
    """Whether a word is no option; negative numbers are values."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _is_item(name: str, options: Mapping[str, Action]) -> bool:
    """Whether it is an item of a dictionary: --model.position_options.num_nodes."""
    whole = options.get(name.rpartition(".")[0])
    return whole is not None and dict in _kinds(whole)


def _option_name(typed: str) -> str:
    return typed.replace("-", "_").replace("__", "--", 1)


def _did_you_mean(word: str, names: Sequence[str]) -> str:
    """``; did you mean ...?`` for a close name, or for a key that ends in a close name."""
    group, dot, leaf = word.rpartition(".")
    new = f"{group}{dot}{_RENAMED.get(leaf, leaf)}"
    if new != word and {new, new.rpartition(".")[0]} & set(names):
        return f"; did you mean {new}?"
    close = difflib.get_close_matches(word, names, 1, 0.7)
    if not close:
        leaves = {name.rpartition(".")[2].removeprefix("--"): name for name in names}
        close = [
            leaves[hit]
            for hit in difflib.get_close_matches(leaf.removeprefix("--"), leaves, 1, 0.7)
        ]
    return f"; did you mean {close[0]}?" if close else ""


def _unknown_option(typed: str, options: Mapping[str, Action], prog: str) -> str:
    hint = _did_you_mean(_option_name(typed), list(options))
    return f"unknown option {typed}{hint}; see `{prog} --help`"


class _Given(NamedTuple):
    """A value, and where it was given."""

    where: str
    value: str


def _given(words: Sequence[str], parser: ArgumentParser) -> Mapping[str, list[_Given]]:
    """What the words and the configurations that they name give to each key.

    Raises:
        ValueError: for a word too many, or a configuration that cannot be read or has unknown keys.
    """
    options = _options_of(parser)
    given: dict[str, list[_Given]] = defaultdict(list)
    places = [action.dest for action in parser._actions if not action.option_strings]
    for word in words:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").removesuffix("+")
        if _is_value(word):
            if not places:
                raise ValueError(f"unexpected {word}; see `{parser.prog} --help`")
            given[places.pop(0)].append(_Given(word, word))
        elif name == "--config":
            file = value
            for key, found in _leaves(_read_config(file), options):
                if f"--{key}" not in options:
                    names = [option.removeprefix("--") for option in options]
                    raise ValueError(
                        f"{file}: unknown key {key!r}{_did_you_mean(key, names)}; "
                        f"see `{parser.prog} --help`"
                    )
                given[key].append(_Given(f"{file}: key {key}", str(found)))
        elif equals:
            given[key].append(_Given(f"option --{key}", value))
    return given


def _read_config(name: str) -> Mapping[str, object]:
    import yaml

    if not Path(name).is_file():
        raise ValueError(f"{name}: no such file; expected a YAML configuration")
    try:
        config = yaml.safe_load(Path(name).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: not a YAML configuration: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{name}: expected a configuration, as `key: value`; got {config!r}")
    return config


def _leaves(
    config: Mapping[str, object], options: Mapping[str, Action], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Keys and values, down to the keys of options."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        action = options.get(f"--{key}")
        if isinstance(value, dict) and (action is None or dict not in _kinds(action)):
            yield from _leaves(value, options, f"{key}.")
        else:
            yield key, value


def _explain(message: str, parser: ArgumentParser, given: Mapping[str, Sequence[_Given]]) -> str:
    """What; expected; got, for a value of the wrong type and for what is missing."""
    options = _options_of(parser)
    named = re.search(r'Parser key "([\w.]+)"', message)
    key = named[1] if named else ""
    if key in given and f"--{key}" in options:
        values = given[key]
        where, value = next((one for one in values if one.value in message), values[-1])
        expected = _type_name(getattr(options[f"--{key}"], "_typehint", None))
        return f"{where}; expected {expected}; got {value!r}"
    defaults = parser.get_defaults()
    missing = [
        (action.option_strings or [action.dest])[0]
        for action in parser._actions
        if action.required and action.dest not in given and not defaults.get(action.dest)
    ]
    if missing and not named:
        return f"missing {', '.join(missing)}; see `{parser.prog} --help`"
    return message


def _type_name(hint: object) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(hint)))
    if hint is NoneType:
        return "null"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
