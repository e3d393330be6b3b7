"""Command-line options of scripts."""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def described(text: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser whose help contains a docstring, including its line breaks."""
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog, description=text, formatter_class=kind, allow_abbrev=False)


def parsed(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """Parses options, and stores arguments after -- in `words`; lists contain each value once."""
    words = sys.argv[1:] if words is None else words
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    for name, value in vars(options).items():  # repeated seeds would reduce standard deviations
        setattr(options, name, list(dict.fromkeys(value)) if isinstance(value, list) else value)
    options.words = words[cut + 1 :]
    return options


def refuse_idle(parser: Any, options: Any, why: str, *names: str) -> None:
    """Exits with an error if an option, or an argument after --, is set without an effect."""
    for name in names:
        if getattr(options, name) not in (parser.get_default(name), []):
            parser.error(f"--{name.removeprefix('words')} has no effect {why}; remove it")


def trainings(
    text: str | None, config: str, out: str, seeds: Sequence[int] = ()
) -> argparse.ArgumentParser:
    """Returns a parser with the options that training scripts share; --seeds needs a default."""
    parser = described(text)
    parser.add_argument("--config", type=Path, default=Path(config))
    parser.add_argument("--out", type=Path, default=Path(out))
    if seeds:
        parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--jobs", type=int, default=1, help="simultaneous training runs")
    parser.add_argument("--threads", type=int, default=1, help="threads of each training run")
    return parser


def guarded(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorates a main function: user errors, such as repeated options, are printed in one line."""

    @functools.wraps(main)
    def run(words: list[str] | None = None) -> int:
        own = itertools.takewhile("--".__ne__, sys.argv[1:] if words is None else words)
        names = [word.partition("=")[0] for word in own if word.startswith("--")]
        try:
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{twice[0]}: expected once; got it twice; join the values")
            return main(words) or 0
        except KeyboardInterrupt:
            print("interrupted; run the same command again", file=sys.stderr)
            return 130
        except (ValueError, OSError, ModuleNotFoundError) as error:
            missing = isinstance(error, OSError) and error.filename
            text = f"{error.filename}: {error.strerror}" if missing else error
            name = Path(main.__code__.co_filename).name
            print(f"{name}: error: {text}", file=sys.stderr)
            return 2

    return run
