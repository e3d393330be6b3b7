"""Command-line words on their way to jsonargparse, and its errors on their way back.

jsonargparse reads ``--skip_bad=true`` and ``--splits=[a,b]``; people type ``--skip-bad`` and
``--splits a b``, misspell names, and want one line that says which.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, get_args

from molflt.commands.values import (
    Given,
    checked,
    is_group,
    kinds_of,
    nulls,
    out_of_range,
    read_config,
)
from molflt.files import shown

if TYPE_CHECKING:
    from argparse import Action

    from jsonargparse import ArgumentParser, Namespace

__all__ = ["normalized", "parse", "refuse_idle"]

# Ends of keys, and commands, that have had other names
_RENAMED = {
    "backend": "mixing",
    "channels": "dim",
    "--epochs": "--trainer.max_epochs",
    "--steps": "--trainer.max_steps",
    "k_max": "max_frequency",
    "placement": "position",
    **{
        name: f"position_options.{name}"
        for name in ("diameter", "nodes", "num_gaussians", "num_nodes", "spectrum")
    },
}


def refuse_idle(run: str, kind: str, options: Mapping[str, object]) -> None:
    """Refuses options that are given to a model of a kind that has no use for them.

    Args:
        run: the model, for messages.
        kind: what it is.
        options: name -> value; None where it is not given.

    Raises:
        ValueError: naming the first one that is given.
    """
    for name, value in options.items():
        if value is not None:
            word = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise ValueError(f"{run}: {kind}; {word} has no effect; leave it out")


def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parses what people type.

    Raises:
        ValueError: saying which option or key is wrong, what was expected, and what was given.
    """
    from argparse import ArgumentError

    parser.exit_on_error = False
    parser.allow_abbrev = False  # an abbreviation turns a misspelt option into another one
    _show_flags(parser)
    mistakes: list[str] = []
    words = _normalize(words, parser, mistakes)
    try:
        given = _given(words, parser, mistakes)
        config: Namespace = parser.parse_args(words)
        values = vars(config.as_flat())
    except ArgumentError as error:
        places = {f"--{place.dest}": place for place in _places_of(parser)}
        wrong, values = checked(given, _options_of(parser) | places)
        mistakes += [*wrong, *out_of_range(values, given), *_missing(parser, given)]
        raise ValueError(_listed(mistakes or [str(error)])) from error
    except RecursionError as error:
        raise ValueError(_listed(mistakes or ["a value is nested too deeply"])) from error
    except ValueError as error:
        raise ValueError(_listed([*mistakes, str(error)])) from error
    mistakes += [*nulls(values, given, _options_of(parser)), *out_of_range(values, given)]
    if mistakes:
        raise ValueError(_listed(mistakes))
    return config


def _listed(mistakes: Sequence[str]) -> str:
    """One mistake as it is, several with their numbers."""
    if len(mistakes) == 1:
        return mistakes[0]
    listed = "; ".join(f"({number}) {one}" for number, one in enumerate(mistakes, 1))
    return f"{len(mistakes)} mistakes: {listed}"


def _options_of(parser: ArgumentParser) -> dict[str, Action]:
    """Every ``--name`` that the parser knows."""
    return {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not name.endswith("+")
    }


def _places_of(parser: ArgumentParser) -> list[Action]:
    """What the words that are no options are, in order."""
    return [action for action in parser._actions if not action.option_strings]


def _is_flag(action: Action | None) -> bool:
    hint = getattr(action, "_typehint", None)
    return hint is bool or {*get_args(hint)} == {bool, NoneType}


def _show_flags(parser: ArgumentParser) -> None:
    for action in _options_of(parser).values():
        if _is_flag(action):
            action.metavar = ""
        elif kinds_of(action) & {list, tuple}:
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
            action.metavar = "ITEM ..."


def normalized(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Words as `parse` reads them, each option and its value one; without what is no option."""
    return _normalize(words, parser, [])


def _normalize(words: Sequence[str], parser: ArgumentParser, mistakes: list[str]) -> list[str]:
    """Rewrites what people type into what jsonargparse reads: each option and its value one word.

    ``--skip-bad`` becomes ``--skip_bad=true`` (``--no-skip-bad``: false), and ``--splits a b``
    becomes an emptied list and one append per word. Adds a line to `mistakes` for each option that
    does not exist or has no value, and leaves it out.
    """
    options = _options_of(parser)
    rest = list(words)
    out: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        if _is_value(word) or word == "-h":
            out.append(word)
            continue
        typed, equals, value = word.partition("=")
        name = _option_name(typed.removesuffix("+"))
        append = "+" * typed.endswith("+")
        positive = name.replace("--no_", "--", 1)
        if name not in options and not equals and _is_flag(options.get(positive)):
            out.append(f"{positive}=false")
        elif name not in options and not _is_item(name, options):
            mistakes.append(_unknown_option(typed, options, parser.prog))
            while not equals and rest and _is_value(rest[0]):
                rest.pop(0)
        elif equals:
            out.append(f"{name}{append}={value}")
        else:
            try:
                out += _with_values(typed, name, append, options.get(name), rest)
            except ValueError as error:
                mistakes.append(str(error))
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
    kinds = set() if action is None else kinds_of(action)
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
    return whole is not None and dict in kinds_of(whole)


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
    name = typed if len(typed) <= 80 else f"{typed[:77]}..."
    return f"unknown option {name}{hint}; see `{prog} --help`"


def _given(words: Sequence[str], parser: ArgumentParser, mistakes: list[str]) -> list[Given]:
    """What the words and the configurations that they name give, in order.

    Adds a line to `mistakes` for a word too many, and for each unknown key of a configuration.
    """
    options = _options_of(parser)
    given: list[Given] = []
    places = _places_of(parser)
    for word in words:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").removesuffix("+")
        if _is_value(word) and places:
            place = places[0] if places[0].nargs == "+" else places.pop(0)
            given.append(Given(place.dest, place.dest, word))
        elif _is_value(word):
            hint = _of_data(word, options, given)
            mistakes.append(f"unexpected {word}{hint}; see `{parser.prog} --help`")
        elif name == "--config":
            given += _configured(value, parser, mistakes)
        elif is_group(key, options):
            hint = _of_data(value, options, given) if key == "data" else ""
            mistakes.append(f"option {name}; expected {name}.NAME; got {shown(value)}{hint}")
        elif equals:
            given.append(Given(key, f"option --{key}", value, name.endswith("+")))
    return given


def _of_data(word: str, options: Mapping[str, Action], given: Sequence[Given]) -> str:
    """A hint for a word that may name data."""
    if "--data.root" not in options:
        return ""
    if any(one.key == "data.root" for one in given):
        return "; name several with a pattern in quotes: --data.root '*.extxyz' or '{a,b}.extxyz'"
    return f"; did you mean --data.root {word}?"


def _configured(file: str, parser: ArgumentParser, mistakes: list[str]) -> Iterator[Given]:
    """What a configuration gives; adds a line to `mistakes` for each key that is no option."""
    options = {
        name: action
        for name, action in _options_of(parser).items()
        if name not in ("--config", "--help", "--print_config", "--resume")
    }
    for one in read_config(file, options):
        if is_group(one.key, options):
            mistakes.append(
                f"{one.where}; expected keys and values below it, or leave it out; got "
                f"{shown(one.value)}"
            )
        elif f"--{one.key}" in options:
            yield one
        else:
            hint = _did_you_mean(one.key, [name.removeprefix("--") for name in options])
            mistakes.append(f"{file}: unknown key {one.key!r}{hint}; see `{parser.prog} --help`")


def _missing(parser: ArgumentParser, given: Sequence[Given]) -> list[str]:
    """A line for what has to be given and was not, if there is such."""
    defaults, there = parser.get_defaults(), {one.key for one in given}
    missing = [
        (action.option_strings or [action.dest])[0]
        for action in parser._actions
        if action.required and action.dest not in there and not defaults.get(action.dest)
    ]
    return [f"missing {', '.join(missing)}; see `{parser.prog} --help`"] if missing else []
