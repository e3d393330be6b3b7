"""Parsing of command lines with jsonargparse, with readable errors.

jsonargparse reads ``--skip_bad=true`` and ``--splits=[a,b]``; people type ``--skip-bad`` and
``--splits a b``. An error names the option or the key, what was expected and what was given.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

from molflt.commands.limits import outside
from molflt.files import shown
from molflt.shipped import find_config

if TYPE_CHECKING:
    from argparse import Action

    from jsonargparse import ArgumentParser, Namespace

__all__ = [
    "did_you_mean",
    "is_flag",
    "kinds_of",
    "normalized",
    "options_of",
    "parse",
    "position_types",
    "refuse_idle",
    "show_usage",
]

_POSITION = "model.position_options"
_COMMAND_LINE_ONLY = ("--config", "--help", "--print_config", "--resume")


class _Given(NamedTuple):
    """A value and its place in the command line or in a configuration."""

    key: str
    where: str
    value: object
    append: bool = False


def refuse_idle(run: str, kind: str, options: Mapping[str, object]) -> None:
    """Raises ValueError if an option is given that this kind of model does not use.

    Args:
        run: name of the model, for the message.
        kind: kind of the model, for the message.
        options: name -> value; None if it is not given.
    """
    for name, value in options.items():
        if value is not None:
            word = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise ValueError(f"{run}: {kind}; {word} has no effect; leave it out")


def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parses command-line words; a ValueError names the first wrong option or key."""
    from argparse import ArgumentError

    parser.exit_on_error = False
    parser.allow_abbrev = False  # an abbreviation would turn a typing error into another option
    show_usage(parser)
    words = normalized(words, parser)
    given = list(_given(words, parser))
    options = options_of(parser)
    try:
        config: Namespace = parser.parse_args(words)
    except ArgumentError as error:
        _check_types(given, options | {f"--{one.dest}": one for one in _positionals_of(parser)})
        raise ValueError(_missing(parser, given) or str(error)) from error
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None
    _check_values(vars(config.as_flat()), given, options)
    return config


def options_of(parser: ArgumentParser) -> dict[str, Action]:
    """Returns the options of a parser by their long names, with the leading ``--``."""
    return {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not name.endswith("+")
    }


def kinds_of(action: Action) -> set[object]:
    """Returns the types that an option accepts, without their parameters."""
    hint = getattr(action, "_typehint", None)
    return {get_origin(kind) or kind for kind in (hint, *get_args(hint))}


def is_flag(action: Action | None) -> bool:
    """Returns True if an option is a boolean."""
    return action is not None and kinds_of(action) - {NoneType, Union, UnionType} == {bool}


def show_usage(parser: ArgumentParser) -> None:
    """Lets ``--help`` show flags and lists as people type them."""
    for action in options_of(parser).values():
        if is_flag(action):
            action.metavar = ""
        elif kinds_of(action) & {list, tuple}:
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
            action.metavar = "ITEM ..."


def did_you_mean(word: str, names: Sequence[str]) -> str:
    """Returns ``; did you mean ...?`` for a similar name or last part of a name, else ""."""
    close = difflib.get_close_matches(word, names, 1, 0.7)
    if not close:
        last = {name.rpartition(".")[2].removeprefix("--"): name for name in names}
        typed = word.rpartition(".")[2].removeprefix("--")
        close = [last[name] for name in difflib.get_close_matches(typed, last, 1, 0.7)]
    return f"; did you mean {close[0]}?" if close else ""


def normalized(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Rewrites words for jsonargparse: each option and its value become one word.

    ``--skip-bad`` becomes ``--skip_bad=true`` (``--no-skip-bad``: false), and ``--splits a b``
    becomes an empty list and one append per word.
    """
    options = options_of(parser)
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
        append = "+" * typed.endswith("+")
        name = typed.removesuffix("+").replace("-", "_").replace("__", "--", 1)
        positive = name.replace("--no_", "--", 1)
        whole = options.get(name.rpartition(".")[0])  # for model.position_options.num_nodes
        if name not in options and not equals and is_flag(options.get(positive)):
            out.append(f"{positive}=false")
        elif name not in options and (whole is None or dict not in kinds_of(whole)):
            hint = did_you_mean(name, list(options))
            raise ValueError(
                f"unknown option {shown(typed)[1:-1]}{hint}; see `{parser.prog} --help`"
            )
        elif equals:
            out.append(f"{name}{append}={value}")
        else:
            out += _with_values(typed, f"{name}{append}", options.get(name), rest)
    return out


def _with_values(typed: str, name: str, action: Action | None, rest: list[str]) -> list[str]:
    """Removes the values of an option from `rest` and returns the option with them."""
    if is_flag(action):
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
        return [f"{name}={rest.pop(0)}"]
    items = rest[:count]
    del rest[:count]
    if tuple in kinds:
        return [f"{name}=[{', '.join(items)}]"]
    first = [] if name.endswith("+") else [f"{name}=[]"]
    return [*first, *(f"{name.removesuffix('+')}+={item}" for item in items)]


def _is_value(word: str) -> bool:
    """Returns False for options; negative numbers are values."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _positionals_of(parser: ArgumentParser) -> list[Action]:
    return [action for action in parser._actions if not action.option_strings]


def _is_group(key: str, options: Mapping[str, Action]) -> bool:
    """Returns True for a key that contains options, such as `model` for `model.dim`."""
    return any(option.startswith(f"--{key}.") for option in options)


def _given(words: Sequence[str], parser: ArgumentParser) -> Iterator[_Given]:
    """Yields the values in normalized words and in the configurations that they name."""
    options, places = options_of(parser), _positionals_of(parser)
    for word in words:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").removesuffix("+")
        if _is_value(word) and places:
            place = places[0] if places[0].nargs == "+" else places.pop(0)
            yield _Given(place.dest, place.dest, word)
        elif _is_value(word):
            hint = "; quote a pattern for several files" * ("--data.root" in options)
            raise ValueError(f"unexpected argument {word}{hint}; see `{parser.prog} --help`")
        elif name == "--config":
            yield from _configured(value, parser)
        elif _is_group(key, options):
            raise ValueError(f"option {name}; expected {name}.NAME; got {shown(value)}")
        elif equals:
            yield _Given(key, f"option --{key}", value, name.endswith("+"))


def _configured(name: str, parser: ArgumentParser) -> Iterator[_Given]:
    """Yields the values in a YAML configuration; raises ValueError for an unknown key."""
    from molflt.training.config import read_yaml

    options = {k: v for k, v in options_of(parser).items() if k not in _COMMAND_LINE_ONLY}
    config = read_yaml(find_config(name), "give a YAML configuration")
    for key, value in _leaves(config, options):
        where = f"{name}: key {key}"
        if _is_group(key, options):
            raise ValueError(f"{where}; expected keys and values below it; got {shown(value)}")
        if f"--{key}" not in options:
            hint = did_you_mean(key, [option.removeprefix("--") for option in options])
            raise ValueError(f"{name}: unknown key {key!r}{hint}; see `{parser.prog} --help`")
        yield _Given(key, where, value)


def _leaves(
    config: Mapping[str, object], options: Mapping[str, Action], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yields each entry of a nested configuration as the name of its option and its value."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        action = options.get(f"--{key}")
        nested = action is None or dict not in kinds_of(action)
        if isinstance(value, dict) and nested and (value or _is_group(key, options)):
            yield from _leaves(value, options, f"{key}.")
        else:
            yield key, value


def _missing(parser: ArgumentParser, given: Sequence[_Given]) -> str | None:
    """Returns a message that names the required options that were not given."""
    defaults, known = parser.get_defaults(), {one.key for one in given}
    missing = [
        (action.option_strings or [action.dest])[0]
        for action in parser._actions
        if action.required and action.dest not in known and not defaults.get(action.dest)
    ]
    return f"missing {', '.join(missing)}; see `{parser.prog} --help`" if missing else None


def _check_types(given: Sequence[_Given], options: Mapping[str, Action]) -> None:
    """Raises ValueError for the first value that does not have the type of its option."""
    for one in given:
        hint = getattr(options.get(f"--{one.key}"), "_typehint", None)
        if hint is not None:
            try:
                value = _parsed(hint, one.value, one.append)
            except ValueError:
                got = shown(one.value)
                raise ValueError(f"{one.where}; expected {_in_words(hint)}; got {got}") from None
            _check_range(one.where, one.key, value)


def _parsed(hint: object, value: object, append: bool = False) -> object:
    """Returns a value as parsed by an option of the given type."""
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    probe = ArgumentParser(exit_on_error=False)
    probe.add_argument("--value", type=hint)
    try:
        if isinstance(value, str):
            return probe.parse_args([f"--value{'+' * append}={value}"]).value
        return probe.parse_object({"value": value}).value
    except (ArgumentError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _check_values(
    config: Mapping[str, object], given: Sequence[_Given], options: Mapping[str, Action]
) -> None:
    """Raises ValueError for a null that jsonargparse accepts or a number out of range."""
    places = {one.key: one.where for one in given}
    for key, value in config.items():
        where, action = places.get(key, f"option --{key}"), options.get(f"--{key}")
        hint = getattr(action, "_typehint", None)
        if value is None and key in places and action is not None and hint is not None:
            if not kinds_of(action) & {NoneType, object, Any}:
                raise ValueError(f"{where}; expected {_in_words(hint)}; got null")
        elif key == _POSITION and isinstance(value, dict):
            _check_position(where, value)
        else:
            _check_range(where, key, value)


def _check_range(where: str, key: str, value: object) -> None:
    if interval := outside(key, value):
        kind = type(value).__name__ if isinstance(value, int | float) else "numbers"
        raise ValueError(f"{where}; expected {kind} in {interval}; got {shown(value)}")


def _check_position(where: str, options: Mapping[object, object]) -> None:
    """Checks the types and ranges of the options of a position module."""
    types = position_types() if options else {}
    for name, value in options.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}; expected names of options; got {shown(name)}")
        hint = types.get(name)
        try:
            found = value if hint is None else _parsed(hint, value)
        except ValueError:
            got = shown(value)
            raise ValueError(f"{where}: {name}; expected {_in_words(hint)}; got {got}") from None
        _check_range(f"{where}: {name}", _POSITION, found)


def position_types() -> dict[str, Any]:
    """Returns the types of the options of all position modules by name."""
    from molflt.attention.nodes import NODES
    from molflt.attention.positions import POSITIONS
    from molflt.attention.spectra import SPECTRA

    builds: list[tuple[str, Callable[..., object]]] = [("", build) for build in POSITIONS.values()]
    builds += [("", family) for family in SPECTRA.values()]
    builds += [("node_", rule) for rule in NODES.values()]
    found: dict[str, set[Any]] = {}
    for prefix, build in builds:
        for name, parameter in inspect.signature(build).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                found.setdefault(prefix + name, set()).add(parameter.annotation)
    return {name: reduce(or_, hints) for name, hints in found.items()}


def _in_words(hint: object) -> str:
    """Returns a type in words."""
    args = get_args(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_in_words, args))
    if get_origin(hint) is list and get_origin(args[0]) is Literal:
        return f"some of {', '.join(map(repr, get_args(args[0])))}"
    if get_origin(hint) is dict:
        return "keys and values"
    if hint is NoneType:
        return "null"
    return hint.__name__ if isinstance(hint, type) and not args else str(hint)
