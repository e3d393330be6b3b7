"""The ``molflt`` command: finds the function behind a command line and calls it.

The options of a command are the arguments of its function, and the help texts are its docstring.
Nothing heavy is imported before a command has been chosen, so ``molflt --help`` answers at once.
"""

from __future__ import annotations

import os
import pkgutil
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from molflt.commands.options import _did_you_mean, parse
from molflt.commands.terminal import guarded_output, printable
from molflt.memory import is_out_of_memory
from molflt.training.recipes import DEFAULT
from molflt.version import __version__

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = ["COMMANDS", "main"]


class _Command(NamedTuple):
    """A command: its function and what ``molflt --help`` says of it."""

    function: str
    """``module:function``, whose signature is the options"""
    summary: str
    parser: str | None = None
    """``module:build_parser`` if it has its own"""
    places: Mapping[str, str] = {}
    """help of the paths that it takes without options, by name; the first may be several"""


COMMANDS: dict[tuple[str, ...], _Command] = {
    ("data", "inspect"): _Command(
        "molflt.commands.inspect:inspect",
        "what files of structures hold: counts, energies, warnings",
        places={"path": "files, folders or patterns"},
    ),
    ("data", "convert"): _Command(
        "molflt.data.structures.convert:convert",
        "any readable files or folder -> compact store",
        places={
            "src": "files, folders or patterns to read",
            "dst": "compact store or folder to write",
        },
    ),
    ("data", "download"): _Command(
        "molflt.data.structures.download:download", "fetch, check and unpack a public data set"
    ),
    ("data", "split"): _Command(
        "molflt.data.text.split:split", "a FASTA file -> train, val, test, by record or cluster"
    ),
    ("train",): _Command(
        "molflt.commands.train:train",
        "train on structures, text or images, or resume",
        "molflt.commands.train:build_parser",
    ),
    ("info",): _Command(
        "molflt.commands.info:info", "what a run is: data, model, steps, best value"
    ),
    ("report",): _Command(
        "molflt.commands.report:report", "a run as one HTML page: curves, errors, settings"
    ),
    ("evaluate",): _Command(
        "molflt.commands.evaluate:evaluate",
        "metrics of a run on splits, tables, plots, submission",
        "molflt.commands.evaluate:build_parser",
    ),
    ("compare",): _Command(
        "molflt.commands.compare:compare",
        "runs side by side: options, size, time, metrics, curves",
        places={"runs": "folders of two training runs or more"},
    ),
    ("predict",): _Command(
        "molflt.commands.predict:predict",
        "energies of structures in any readable file",
        "molflt.commands.predict:build_parser",
    ),
    ("merge",): _Command(
        "molflt.commands.merge:merge", "predictions of several processes -> one file"
    ),
    ("export",): _Command(
        "molflt.commands.export:export", "a run as one folder to use and share: weights, card"
    ),
    ("relax",): _Command(
        "molflt.commands.relax:relax",
        "structures at rest, by a trained potential",
        places={"structures": "files, folders or patterns"},
    ),
    ("generate",): _Command(
        "molflt.commands.generate:generate", "text from a trained language model, or translations"
    ),
    ("schema",): _Command(
        "molflt.commands.schema:schema", "what configurations may hold, for editors (JSON Schema)"
    ),
    ("completion",): _Command(
        "molflt.commands.completion:completion", "a script with which a shell completes options"
    ),
}
_GROUPS = {"data": "inspect, convert, download and split data sets"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The words after ``molflt``; those of the process when None.

    Returns:
        0 on success; 2 for bad input, after one line on stderr; 1 for an error that is a bug here,
        with its traceback in a file; 130 when interrupted. With ``MOLFLT_TRACEBACK=1`` in the
        environment, errors print their traceback instead.
    """
    with guarded_output():
        return _guarded(list(sys.argv[1:] if argv is None else argv))


def _guarded(words: list[str]) -> int:
    """Runs one command; errors become a line and a status."""
    try:
        return _dispatch(words)
    except SystemExit as stop:  # --help and --print_config leave this way
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print("molflt: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has gone; nothing is wrong
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
                f"unknown command {word!r}{_did_you_mean(word, names)}; expected one of "
                f"{', '.join(names)}; see `{where} --help`"
            )
        path = (*path, word)
    return _run(path, words)


def _names_below(path: tuple[str, ...]) -> list[str]:
    """Names that may follow `path`, each once, in the order of the table."""
    depth = len(path)
    return list(dict.fromkeys(key[depth] for key in COMMANDS if key[:depth] == path))


def _overview(path: tuple[str, ...]) -> str:
    prog = " ".join(("molflt", *path))
    lines = [f"usage: {prog} COMMAND ...", "", "commands:"]
    for name in _names_below(path):
        command = COMMANDS.get((*path, name))
        lines.append(f"  {name:<10} {command.summary if command else _GROUPS[name]}")
    lines += ["", f"`{prog} COMMAND --help` lists the options of a command."]
    if not path:
        lines.insert(1, "       molflt --version")
        lines.append("Set MOLFLT_TRACEBACK=1 to see the traceback of an error.")
    return "\n".join(lines)


def _run(path: tuple[str, ...], words: list[str]) -> int:
    parser = _parser(path, words)
    function: Callable[..., object] = pkgutil.resolve_name(COMMANDS[path].function)
    status = function(**parse(parser, words).as_dict())
    return status if isinstance(status, int) and not isinstance(status, bool) else 0


def _parser(path: tuple[str, ...], words: Sequence[str]) -> ArgumentParser:
    from jsonargparse import ArgumentParser

    command, name = COMMANDS[path], " ".join(("molflt", *path))
    function: Callable[..., object] = pkgutil.resolve_name(command.function)
    if command.parser is not None:
        parser: ArgumentParser = pkgutil.resolve_name(command.parser)(words)
    else:
        parser = ArgumentParser()
        for count, (place, text) in enumerate(command.places.items()):
            parser.add_argument(place, nargs=None if count else "+", type=Path, help=text)
        parser.add_function_arguments(
            function, as_group=False, as_positional=not command.places, skip={*command.places}
        )
    if command.parser or command.places:
        parser.usage = parser.usage or f"{name} [--OPTION VALUE ...]"  # else a page long
    recipe = next((each.default for each in parser._actions if each.dest == "recipe"), None)
    parser.prog = name if recipe in (None, DEFAULT) else f"{name} --recipe {recipe}"
    parser.description = _first_paragraphs(function)
    return parser


def _first_paragraphs(function: Callable[..., object]) -> str:
    """The docstring up to its first section; the sections are for readers of the code."""
    text = (function.__doc__ or "").strip()
    text = re.split(r"\n\s*(?:Args|Returns|Raises|Example|Examples|Note):\s*\n", text)[0]
    return re.sub(r"[ \t]*\n[ \t]+", "\n", text).strip()


def _report(error: Exception) -> int:
    """Prints one line about an error and returns the exit status."""
    if os.environ.get("MOLFLT_TRACEBACK") == "1":
        sys.stderr.write("".join(traceback.format_exception(error)))
    status = 2
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = ": ".join([*names, error.strerror])
    elif isinstance(error, ModuleNotFoundError) and error.name is None:
        text = str(error)  # in words of our own
    elif isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("molflt"):
        text = f"the package {error.name!r} is not installed; pip install {error.name}"
    elif isinstance(error, ValueError | OSError):
        text = str(error)
    elif is_out_of_memory(error):
        text = f"out of memory: {str(error) or type(error).__name__}; lower the batch size"
    else:
        status = 1
        text = f"unexpected {type(error).__name__}: {error}; {_write_log(error)}"
    print(f"molflt: error: {' '.join(text.split())}", file=sys.stderr)
    return status


def _write_log(error: Exception) -> str:
    """Writes the traceback to a new file, and says where it is."""
    try:
        with _new_log() as file:
            file.write(printable("".join(traceback.format_exception(error))))
    except OSError:
        return "MOLFLT_TRACEBACK=1 shows the traceback"
    return f"traceback in {file.name}"


def _new_log() -> IO[str]:
    """A file where the user is or, if that cannot be written, among temporary files.

    It never exists before: a link that somebody has put in its place could lead anywhere.
    """
    try:
        log = Path.cwd() / "molflt-error.log"
        log.unlink(missing_ok=True)
        return open(log, "x", encoding="utf-8")
    except OSError:
        return tempfile.NamedTemporaryFile(
            "w", prefix="molflt-error-", suffix=".log", delete=False, encoding="utf-8"
        )
