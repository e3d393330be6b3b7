"""What the words and the configurations give to each option, and what is wrong with it."""

from __future__ import annotations

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


__all__ = [
    "Given",
    "checked",
    "is_group",
    "item_types",
    "kinds_of",
    "nulls",
    "out_of_range",
    "read_config",
]

_ITEMS = "model.position_options"


class Given(NamedTuple):
    """A value, and where it was given."""

    key: str
    """of the option"""
    where: str
    """words that say so"""
    value: object
    """text of a word, or what a configuration holds"""
    append: bool = False
    """one more item of a list"""


def kinds_of(action: Action) -> set[object]:
    """What an option may hold: types, without their parameters."""
    hint = getattr(action, "_typehint", None)
    return {get_origin(kind) or kind for kind in (hint, *get_args(hint))}


def read_config(name: str, options: Mapping[str, Action]) -> list[Given]:
    """Keys and values of a YAML file, down to the keys of options.

    Raises:
        ValueError: if it cannot be read, is no YAML, or holds something else than keys and values.
    """
    import yaml

    from molflt.training.yaml_file import Loader

    path = find_config(name)
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also of endless numbers
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name}: not a YAML configuration: {why}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{name}: expected a configuration, as `key: value`; got {shown(config)}")
    return list(_leaves(name, config, options))


def _leaves(
    file: str, config: Mapping[object, object], options: Mapping[str, Action], prefix: str = ""
) -> Iterator[Given]:
    for name, value in config.items():
        key = f"{prefix}{name}"
        action = options.get(f"--{key}")
        inner = action is None or dict not in kinds_of(action)
        if isinstance(value, dict) and inner and (value or is_group(key, options)):
            yield from _leaves(file, value, options, f"{key}.")
        else:
            yield Given(key, f"{file}: key {key}", value)


def is_group(key: str, options: Mapping[str, Action]) -> bool:
    """Whether a key stands above options, as `model` above `model.dim`."""
    return any(option.startswith(f"--{key}.") for option in options)


def checked(
    given: Sequence[Given], options: Mapping[str, Action]
) -> tuple[list[str], dict[str, object]]:
    """A line for each value that its option cannot hold, and the others by key, in their types."""
    wrong: list[str] = []
    values: dict[str, object] = {}
    for one in given:
        hint = getattr(options.get(f"--{one.key}"), "_typehint", None)
        whole, _, item = one.key.rpartition(".")
        if hint is None and whole == _ITEMS:  # --model.position_options.num_nodes
            values[_ITEMS] = {**_items(values.get(_ITEMS)), item: one.value}
        elif hint is not None:
            try:
                values[one.key] = _parsed(hint, one)
            except ValueError:
                wrong.append(f"{one.where}; expected {_type_name(hint)}; got {shown(one.value)}")
    return wrong, values


def _items(value: object) -> dict[object, object]:
    return value if isinstance(value, dict) else {}


def _parsed(hint: object, given: Given) -> object:
    """A value as an option of a type reads it."""
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    probe = ArgumentParser(exit_on_error=False)
    probe.add_argument("--value", type=hint)
    try:
        if isinstance(given.value, str):
            return probe.parse_args([f"--value{'+' * given.append}={given.value}"]).value
        return probe.parse_object({"value": given.value}).value
    except (ArgumentError, RecursionError) as error:
        raise ValueError(str(error)) from None


def out_of_range(config: Mapping[str, object], given: Sequence[Given]) -> list[str]:
    """A line for each number outside of what its option can mean, and each item of a wrong type.

    Args:
        config: values of all options by key.
        given: where they come from.
    """
    places = {one.key: one.where for one in given}
    wrong = []
    for key, value in config.items():
        where = places.get(key, f"option --{key}")
        if key == _ITEMS:
            wrong += _wrong_items(where, _items(value))
        elif interval := outside(key, value):
            wrong.append(_off(where, interval, value))
    return wrong


def nulls(
    config: Mapping[str, object], given: Sequence[Given], options: Mapping[str, Action]
) -> list[str]:
    """A line for each null that was given to an option of another type; jsonargparse takes them."""
    wrong = []
    for key, where in {one.key: one.where for one in given}.items():
        action = options.get(f"--{key}")
        if action is None or config.get(key, key) is not None:
            continue
        hint = getattr(action, "_typehint", None)
        if hint is not None and not kinds_of(action) & {NoneType, object, Any}:
            wrong.append(f"{where}; expected {_type_name(hint)}; got null")
    return wrong


def _off(where: str, interval: str, value: object) -> str:
    kind = type(value).__name__ if isinstance(value, int | float) else "numbers"
    return f"{where}; expected {kind} in {interval}; got {shown(value)}"


def _wrong_items(where: str, items: Mapping[object, object]) -> list[str]:
    """As `out_of_range`, of the options of a position, which all encodings share."""
    types = item_types() if items else {}
    wrong = []
    for name, value in items.items():
        if not isinstance(name, str):
            wrong.append(f"{where}; expected names of options; got {shown(name)}")
            continue
        hint = types.get(name)
        try:
            found = value if hint is None else _parsed(hint, Given(name, where, value))
        except ValueError:
            wrong.append(f"{where}: {name}; expected {_type_name(hint)}; got {shown(value)}")
        else:
            if interval := outside(_ITEMS, found):
                wrong.append(_off(f"{where}: {name}", interval, found))
    return wrong


def item_types() -> dict[str, Any]:
    """Type of each option of positions, by name."""
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


def _type_name(hint: object) -> str:
    """A type in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(hint)))
    if hint is NoneType:
        return "null"
    if get_origin(hint) is dict:
        return "keys and values"
    if get_origin(hint) is list and get_origin(get_args(hint)[0]) is Literal:
        return f"some of {', '.join(map(repr, get_args(get_args(hint)[0])))}"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
