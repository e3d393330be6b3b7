"""Command lines of scripts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def described(text: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help shows a docstring line by line."""
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog, description=text, formatter_class=kind)


def parsed(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """Options of a script that starts other programs; what follows -- stays as it is, in `words`.

    Args:
        parser: of the options before it.
        words: the command line; that of the process if None.
    """
    words = sys.argv[1:] if words is None else words
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.words = words[cut + 1 :]
    return options


def trainings(
    parser: argparse.ArgumentParser, words: list[str] | None, seeds: Sequence[int] = ()
) -> argparse.Namespace:
    """Options of a script that trains, those of the parser first; see `parsed`.

    Args:
        parser: see there, likewise `words`.
        words: see there.
        seeds: by default; where there are none, the script has no such option.
    """
    if seeds:
        parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    return parsed(parser, words)
