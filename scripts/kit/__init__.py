"""Shared parts of the scripts.

A benchmark, run by `scripts/run.py`, is a module below cost/, accuracy/ or training/. Its docstring
starts with its title. It defines

    measure(...) -> Rows      keyword options with defaults, which are those of the command
    table(rows) -> str        Markdown
    draw(png, rows)           if there is a picture
    QUICK                     options of its smallest size

or a dictionary BENCHMARKS of several `Benchmark` by name. Rows are written to the CSV and read back
before the table and the picture are made.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Benchmark(NamedTuple):
    """One of several benchmarks of a module, with the same attributes as a module of one."""

    title: str
    measure: Callable[..., list[dict[str, Any]]]
    table: Callable[..., str]
    QUICK: Mapping[str, Any]
    draw: Callable[..., None] | None = None
    STUDY: Any = None
