"""An input of the fuzzer, and the formats that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Case:
    """One input: files in a folder of its own, and the command that reads them.

    Attributes:
        words: after ``molflt``; paths are relative to the folder, which is the current one.
        names: a refusal has to say at least one of them: the file, or the option.
        size: bytes of what is read; None for an input whose memory the user asks for.
        what: how it was made, for reports.
        check: called after acceptance; says what is wrong with the result, None if nothing.
    """

    words: list[str]
    names: tuple[str, ...]
    size: int | None
    what: str
    check: Callable[[], str | None] | None = None


@dataclass(frozen=True)
class Format:
    """A kind of input.

    Attributes:
        make: (draws, folder to write into, folder of seeds) -> the input.
        share: of all inputs, relative to the other formats.
        trains: whether most inputs train a model, which takes longest.
    """

    make: Callable[[Random, Path, Path], Case]
    share: float
    trains: bool = False


def draws_of(seed: int, name: str, index: int) -> Random:
    """The draws of one input, which depend on nothing else."""
    return Random(f"{seed}:{name}:{index}")
