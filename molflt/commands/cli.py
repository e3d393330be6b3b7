"""The ``molflt`` command: parses the options of a subcommand and calls its function.

The options of a command are the arguments of its function, and the help texts come from its
docstring. Heavy modules are imported only when a command needs them, which keeps ``molflt --help``
fast.
"""

from __future__ import annotations

import inspect
import io
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from molflt.commands.options import kinds_of, parse
from molflt.files import did_you_mean
from molflt.memory import is_out_of_memory
from molflt.training.recipes import DEFAULT
from molflt.version import __version__

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_LONGEST = 1000  # maximum number of characters in an error message


class Command(NamedTuple):
    """A command of ``molflt``."""

    summary: str  # description of the command in ``molflt --help``
    # ``module:function``, where {0} is the last word of the command; its arguments are the options
    function: str = "molflt.commands.{0}:{0}"
    has_parser: bool = False  # True if `build_parser` in that module returns the parser


COMMANDS: dict[tuple[str, ...], Command] = {
    ("data", "inspect"): Command("summary of structures in files: counts, energies, warnings"),
    ("data", "convert"): Command(
        "convert readable files to a compact store", "molflt.data.structures.convert:convert"
    ),
    ("data", "baseline"): Command(
        "add energies from an ASE calculator, for models that learn the difference"
    ),
    ("data", "download"): Command(
        "download, check and unpack a public data set", "molflt.data.structures.download:download"
    ),
    ("data", "split"): Command(
        "split a FASTA file into train, val and test", "molflt.data.text.sources:split"
    ),
    ("train",): Command("train on structures, text or images, or resume a run", has_parser=True),
    ("info",): Command("summary of a run: data, model, steps, best value"),
    ("report",): Command("write an HTML page about a run: curves, errors, settings"),
    ("evaluate",): Command("metrics of a run on splits, with tables and plots", has_parser=True),
    ("compare",): Command("compare runs: options, size, time, metrics, curves"),
    ("predict",): Command("predict structures, sentences or images in files"),
    ("merge",): Command("join the predictions of several processes"),
    ("export",): Command("write a model for use and sharing: weights, model card"),
    ("relax",): Command("relax structures with a trained potential"),
    ("adsorb",): Command("place a molecule on slabs and rank the placements"),
    ("generate",): Command("generate text, translations or images"),
    ("schema",): Command("JSON Schema of configurations, for editors"),
}
GROUPS = {"data": "inspect, convert, download or split data; add energies"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after ``molflt``; by default the command line of the process.

    Returns:
        0 or the status of the command; 2 for bad input, with one line on stderr; 1 for an
        unexpected error, with its traceback; 130 when interrupted. With ``MOLFLT_TRACEBACK=1`` in
        the environment, all errors print a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for file names that are not UTF-8
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # raised by --help and --print_config
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print("molflt: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error)


def _dispatch(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V"):
        print(f"molflt {__version__}")
        return 0
    path: tuple[str, ...] = ()
    while path not in COMMANDS:
        if not words or words[0] in ("-h", "--help"):
            print(_overview(path))
            return 0
        word = words.pop(0)
        names = _names_below(path)
        if word not in names:
            where = " ".join(("molflt", *path))
            raise ValueError(
                f"unknown command {word!r}{did_you_mean(word, names)}; expected one of "
                f"{', '.join(names)}; see `{where} --help`"
            )
        path = (*path, word)
    status = _function(path)(**parse(parser_of(path, words), words).as_dict())
    return status if isinstance(status, int) and not isinstance(status, bool) else 0


def _function(path: tuple[str, ...]) -> Callable[..., object]:
    return pkgutil.resolve_name(COMMANDS[path].function.format(path[-1]))


def _names_below(path: tuple[str, ...]) -> list[str]:
    depth = len(path)
    return list(dict.fromkeys(key[depth] for key in COMMANDS if key[:depth] == path))


def _overview(path: tuple[str, ...]) -> str:
    prog = " ".join(("molflt", *path))
    lines = [f"usage: {prog} COMMAND ...", "", "commands:"]
    for name in _names_below(path):
        command = COMMANDS.get((*path, name))
        lines.append(f"  {name:<10} {command.summary if command else GROUPS[name]}")
    lines += ["", f"`{prog} COMMAND --help` lists the options of a command."]
    if not path:
        lines.insert(1, "       molflt --version")
        lines.append("Set MOLFLT_TRACEBACK=1 to see the traceback of an error.")
    return "\n".join(lines)


def parser_of(path: tuple[str, ...], words: Sequence[str] = ()) -> ArgumentParser:
    """Returns the parser of a command; `words` of the command line may determine its options."""
    from jsonargparse import ArgumentParser

    command, name, function = COMMANDS[path], " ".join(("molflt", *path)), _function(path)
    if command.has_parser:
        parser = pkgutil.resolve_name(f"{function.__module__}:build_parser")(words)
    else:
        parser = ArgumentParser()
        parser.add_function_arguments(function, as_group=False, as_positional=True)
    places = [action for action in parser._actions if not action.option_strings]
    for action in places:
        if kinds_of(action) & {list, Sequence}:  # several words instead of one list
            action.nargs, action.metavar, action._typehint = "+", action.dest, Path
    usage = [name, *(action.dest.upper() for action in places), "[--OPTION VALUE ...]"]
    parser.usage = " ".join(usage)  # instead of a full page
    recipe = next((action.default for action in parser._actions if action.dest == "recipe"), None)
    parser.prog = name if recipe in (None, DEFAULT) else f"{name} --recipe {recipe}"
    parser.description = re.split(r"\n+(?:Args|Returns):\n", inspect.getdoc(function) or "")[0]
    return parser


def _report(error: Exception) -> int:
    """Prints an error and returns the exit status: 2 for bad input, 1 for unexpected errors."""
    status = 2
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = ": ".join([*names, error.strerror])
    elif isinstance(error, ModuleNotFoundError) and error.name is None:
        text = str(error)  # raised by molflt
    elif isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("molflt"):
        text = f"the package {error.name!r} is not installed; pip install {error.name}"
    elif isinstance(error, ValueError | OSError):
        text = str(error)
    elif is_out_of_memory(error):
        text = f"out of memory: {str(error) or type(error).__name__}; use fewer or smaller inputs"
    else:
        status = 1
        text = f"unexpected {type(error).__name__}: {error}"
    if status == 1 or os.environ.get("MOLFLT_TRACEBACK") == "1":
        traceback.print_exception(error)
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 300]} ... {text[-300:]}"  # keeps the advice at the end
    print(f"molflt: error: {text}", file=sys.stderr)
    return status
