"""Command lines of scripts that start other programs."""

from __future__ import annotations

import argparse
import sys


def parsed(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """Options of a script; what follows -- stays as it is, in `words`.

    Args:
        parser: of the options before it.
        words: the command line; that of the process if None.
    """
    words = sys.argv[1:] if words is None else words
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.words = words[cut + 1 :]
    return options
