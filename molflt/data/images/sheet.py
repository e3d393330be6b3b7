"""Contact sheets: images next to each other in one PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from molflt.files import write_atomically

__all__ = ["write_sheet"]

_COLUMNS = 16
_MARGIN = 2  # pixels of the sheet
_LEAST = 56  # pixels of a side of an image on the sheet; smaller images are enlarged


def write_sheet(path: Path, rows: Sequence[Tensor]) -> None:
    """Writes rows of images as a PNG, in strips of 16 columns; pixels are repeated, not smoothed.

    Args:
        path: file to write.
        rows: (n, channels, height, width) uint8 each, of equal shapes; images with the same index
            are in one column.
    """
    from PIL import Image

    if path.suffix != ".png":
        raise ValueError(f"{path}: expected a name that ends in .png; rename it")
    count, channels, height, width = rows[0].shape
    columns, zoom = min(count, _COLUMNS), max(1, -(-_LEAST // width))
    step = zoom * height + _MARGIN, zoom * width + _MARGIN
    lines = [row[start : start + columns] for start in range(0, count, columns) for row in rows]
    sides = (len(lines) * step[0] + _MARGIN, columns * step[1] + _MARGIN, channels)
    sheet = np.full(sides, 255, dtype=np.uint8)
    for i, line in enumerate(lines):
        for j, image in enumerate(line):
            pixels = image.permute(1, 2, 0).cpu().numpy().repeat(zoom, 0).repeat(zoom, 1)
            top, left = _MARGIN + i * step[0], _MARGIN + j * step[1]
            sheet[top : top + zoom * height, left : left + zoom * width] = pixels
    content = io.BytesIO()
    Image.fromarray(sheet[..., 0] if channels == 1 else sheet).save(content, format="PNG")
    write_atomically(path, content.getvalue())
