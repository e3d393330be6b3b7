"""Parts of the page; page.html renders them with escaped text and embedded pictures."""

from __future__ import annotations

import base64
import io
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from molflt.files import shown
from molflt.plots.figure import DPI

__all__ = ["Details", "Figure", "Grid", "Lines", "Part", "Pictures", "Section", "Table"]

_LARGEST_SVG = 250_000  # bytes; larger pictures are drawn as PNG
_LARGEST_PNG = 500_000  # bytes; larger pictures are reduced to a palette
_BUDGET = 2_500_000  # total bytes of all pictures, for a page of at most 3 MB


class Table(NamedTuple):
    """A table whose first column contains the row headers."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str
    text_columns: int = 1
    """number of text columns; the other columns contain right-aligned numbers"""
    most: int = 30
    """maximum number of rows to show"""


class Figure(NamedTuple):
    """A picture."""

    src: str
    width: int
    alt: str
    caption: str


class Grid(NamedTuple):
    """Figures arranged side by side."""

    parts: Sequence[Figure]
    pairs: bool = False
    """True for figures with two panels each"""


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


class Pictures:
    """Makes figures until the page would become too large."""

    def __init__(self) -> None:
        self._left = _BUDGET

    def drawn(self, alt: str, caption: str, draw: Callable[[Path], object]) -> Figure:
        """Draws a figure as SVG or, if that is large, as PNG; `alt` describes it in words."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "picture.svg"
            draw(file)
            if file.stat().st_size > _LARGEST_SVG:
                file = file.with_suffix(".png")
                draw(file)
            content = file.read_bytes()
        if file.suffix == ".png":
            return self._png(content, alt, caption, alt)
        points = re.search(rb'<svg[^>]*? width="([\d.]+)pt"', content)
        width = round(float(points[1]) * 96 / 72) if points else 720
        return self._figure("svg+xml", content, width, alt, caption, alt)

    def kept(self, file: Path, alt: str, caption: str) -> Figure:
        """Returns a PNG file of the run as a figure."""
        return self._png(file.read_bytes(), alt, caption, str(file))

    def _png(self, content: bytes, alt: str, caption: str, name: str) -> Figure:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                width = image.width
                image.load()
                if len(content) > _LARGEST_PNG:
                    buffer = io.BytesIO()
                    image.convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
                    content = buffer.getvalue()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(
                f"{name}: expected a PNG; {shown(str(error), 100)}; evaluate the run again"
            ) from None
        return self._figure("png", content, round(width * 96 / DPI), alt, caption, name)

    def _figure(
        self, kind: str, content: bytes, width: int, alt: str, caption: str, name: str
    ) -> Figure:
        data = base64.b64encode(content).decode()
        if len(data) > self._left:
            raise ValueError(
                f"{name}: not shown, because the page would become larger than 3 MB; open the file "
                "in the run"
            )
        self._left -= len(data)
        return Figure(f"data:image/{kind};base64,{data}", width, alt, caption)
