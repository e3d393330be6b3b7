"""Parts of the page, which page.html renders with escaped text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Details", "Figure", "Grid", "Lines", "Part", "Section", "Table"]


class Table(NamedTuple):
    """A table whose first column contains the row headers."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str
    text_columns: int = 1
    """number of columns with text; the others contain numbers, aligned right"""
    most: int = 30
    """largest number of rows to show"""


class Figure(NamedTuple):
    """A picture."""

    src: str
    width: int
    alt: str
    caption: str


class Grid(NamedTuple):
    """Figures next to each other."""

    parts: Sequence[Figure]
    pairs: bool = False
    """figures with two panels each"""


class Details(NamedTuple):
    """A collapsed part."""

    summary: str
    inside: Sequence[Table]


class Lines(NamedTuple):
    """Preformatted lines."""

    lines: Sequence[str]


Part = Table | Figure | Grid | Details | Lines | str
"""A string is a paragraph."""


class Section(NamedTuple):
    """A section of the page with a heading."""

    name: str
    """target of links"""
    title: str
    parts: Sequence[Part]
