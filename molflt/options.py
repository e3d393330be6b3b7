"""Command-line words on their way to jsonargparse, and its messages on their way back.

jsonargparse reads ``--skip_bad=true`` and ``--splits=[a,b]``; people type ``--skip-bad`` and
``--splits a b``, misspell names, and want one line that says which.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args, get_origin

if TYPE_CHECKING:
    from argparse import Action

    from jsonargparse import ArgumentParser

__all__ = ["UsageError", "did_you_mean", "explain", "normalize", "show_flags"]


class UsageError(ValueError):
    """A command line or configuration that cannot be understood."""


def options_of(parser: ArgumentParser) -> dict[str, Action]:
    """Every ``--name`` that the parser knows."""
    return {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not name.endswith("+")
    }


def _is_flag(action: Action) -> bool:
    return getattr(action, "_typehint", None) is bool


def _is_a(action: Action, container: type) -> bool:
    hint = getattr(action, "_typehint", None)
    kinds = (hint, *get_args(hint))
    return any(kind is container or get_origin(kind) is container for kind in kinds)


def show_flags(parser: ArgumentParser) -> None:
    for action in options_of(parser).values():
        if _is_flag(action):
            action.metavar = ""
        elif _is_a(action, list) or _is_a(action, tuple):
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
            action.metavar = "ITEM ..."


def normalize(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Rewrites what people type into what jsonargparse reads.

    ``--skip-bad`` becomes ``--skip_bad=true`` (``--no-skip-bad``: false), and ``--splits a b``
    becomes an emptied list and one append per word.

    Raises:
        UsageError: If an option does not exist.
    """
    options = options_of(parser)
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
        name = typed.replace("-", "_").replace("__", "--", 1).removesuffix("+")
        append = typed.endswith("+")
        negated = name.replace("--no_", "--", 1) if name.startswith("--no_") else name
        if name not in options and _is_flag_named(negated, options) and not equals:
            out.append(f"{negated}=false")
        elif name not in options and _is_item(name, options):
            out.append(f"{name}{equals}{value}")
        elif name not in options:
            raise UsageError(_unknown_option(typed, options, parser.prog))
        elif _is_flag(options[name]) and not equals:
            explicit = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
            out.append(f"{name}={explicit.lower()}")
        elif (_is_a(options[name], list) or _is_a(options[name], tuple)) and not equals:
            items = _take_items(rest)
            if not items:
                raise UsageError(f"option {typed}; expected at least one value; got none")
            if items[0].startswith("["):
                out.append(f"{name}{'+' * append}={items[0]}")
                rest[:0] = items[1:]
            elif _is_a(options[name], tuple):
                out.append(f"{name}=[{', '.join(items)}]")
            else:
                out += [] if append else [f"{name}=[]"]
                out += [f"{name}+={item}" for item in items]
        else:
            out.append(f"{name}{'+' * append}{equals}{value}")
    return out


def _is_flag_named(name: str, options: dict[str, Action]) -> bool:
    return name in options and _is_flag(options[name])


def _is_item(name: str, options: dict[str, Action]) -> bool:
    """Whether it is an item of a dictionary: --model.position_options.num_nodes."""
    whole = name.rpartition(".")[0]
    return whole in options and _is_a(options[whole], dict)


def _take_items(rest: list[str]) -> list[str]:
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    items = rest[:count]
    del rest[:count]
    return items


def did_you_mean(word: str, names: Sequence[str]) -> str:
    """``; did you mean ...?`` for a close name, or for a key that ends in a close name."""
    close = difflib.get_close_matches(word, names, 1, 0.7)
    if not close:
        leaves = {name.rpartition(".")[2].removeprefix("--"): name for name in names}
        leaf = word.rpartition(".")[2].removeprefix("--")
        close = [leaves[hit] for hit in difflib.get_close_matches(leaf, list(leaves), 1, 0.7)]
    return f"; did you mean {close[0]}?" if close else ""


def _unknown_option(typed: str, options: dict[str, Action], prog: str) -> str:
    hint = did_you_mean(typed.replace("-", "_").replace("__", "--", 1), list(options))
    return f"unknown option {typed}{hint}; see `{prog} --help`"


def explain(message: str, parser: ArgumentParser, words: Sequence[str]) -> str:
    """Turns jsonargparse's message into: what; expected; got; what to do, on one line."""
    keys = [name.removeprefix("--") for name in options_of(parser)]
    configs = [b for a, b in itertools.pairwise(words) if a == "--config"]
    configs += [w.partition("=")[2] for w in words if w.startswith("--config=")]
    place = f"{' '.join(configs)}: " if configs else ""

    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    option = re.search(r"Option '([\w.]+)' is not accepted", message)
    if group or option:
        key = f"{group[1]}.{group[2]}" if group else option[1] if option else ""
        return f"{place}unknown key {key!r}{did_you_mean(key, keys)}; see `{parser.prog} --help`"

    missing = re.search(r"the following arguments are required: (.+)", message)
    if missing:
        names = [f"--{n}" if n in keys else n for n in missing[1].split(", ")]
        return f"missing {', '.join(names)}; see `{parser.prog} --help`"

    absent = re.search(r"File does not exist: '(.+)'", message)
    if absent:
        return f"{absent[1]}: no such file; expected a YAML configuration"

    surplus = re.search(r"unrecognized arguments: (.+)", message)
    if surplus:
        return f"unexpected {surplus[1]}; see `{parser.prog} --help`"

    value = re.search(r'Parser key "([\w.]+)"', message)
    expected = [_plain_type(t) for t in re.findall(r"Expected an? (.+?)(?:\. Got|\n|$)", message)]
    got = re.search(r"(?:Got value|Given value): (.*)", message)
    if value and expected and got:
        key = value[1]
        typed = any(w.partition("=")[0].replace("-", "_") == f"__{key}" for w in words)
        name = f"option --{key}" if typed or not configs else f"{place}key {key}"
        return f"{name}; expected {' or '.join(dict.fromkeys(expected))}; got {got[1].strip()!r}"
    return place + message if configs and "config" in message else message


def _plain_type(text: str) -> str:
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("typing.", "")
    text = text.replace("NoneType", "null")
    choices = re.fullmatch(r"Literal\[(.+)\]", text)
    return f"one of {choices[1]}" if choices else text
