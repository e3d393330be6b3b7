"""Images without labels, from a file, a folder or an idx file, and contact sheets."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from molflt.data.images.base import LabeledImages
from molflt.data.images.files import _SUFFIXES, _decode, _image_files, _read_file
from molflt.files import write_atomically

__all__ = ["read_alike", "read_images", "write_sheet"]

_COLUMNS = 16
_MARGIN = 2  # pixels between images of the sheet
_LEAST = 56  # minimum width of an image on the sheet, pixels; smaller images are enlarged


def read_images(source: Path, side: int, channels: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the bytes (channels, side, side) of each image, resized to a square.

    Args:
        source: image, folder of images, or idx file of images.
        side: side of the squares in pixels.
        channels: 1 for gray, 3 for color.
    """
    for file, name, image in _images(source, "L" if channels == 1 else "RGB", side):
        pixels = image.expand(1, channels, *image.shape[1:])
        yield name, LabeledImages._fit(pixels, side, file)[0]


def read_alike(source: Path, side: int, channels: int, fit: bool = False) -> Iterator[Tensor]:
    """Yields the bytes (channels, side, side) of images for a pixel model, by default not resized.

    For color models, gray images get three equal channels, as in training.

    Args:
        source: image, folder of images, or idx file of images.
        side: side of the squares in pixels.
        channels: 1 for gray, 3 for color.
        fit: downscale the central squares of larger images, as in training.
    """
    for file, _, image in _images(source, None):
        if len(image) == 1:
            image = image.expand(channels, -1, -1)
        if len(image) != channels:
            raise ValueError(
                f"{file}: expected images of {channels} channels, as in training; got {len(image)};"
                " convert it"
            )
        if fit:
            image = LabeledImages._fit(image[None], side, file, box=True)[0]
        if tuple(image.shape[1:]) != (side, side):
            raise ValueError(
                f"{file}: expected {side} x {side} pixels, as in training; got {image.shape[1]} x "
                f"{image.shape[2]}; resize it, or set --fit true"
            )
        yield image


def _images(
    source: Path, mode: str | None, fitted: int | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the file, name and bytes of each image; `mode` and `fitted` are as for `_decode`."""
    if not source.exists():
        raise FileNotFoundError(
            f"{source}: no such file or folder; expected an image, a folder of images, or an idx "
            "file of images"
        )
    if source.is_file() and "idx" in source.name:
        for place, image in enumerate(_read_file(source, 3)):
            yield str(source), f"{source.name}:{place}", image[None]
        return
    files = [str(source)] if source.is_file() else sorted(_image_files(source))
    if not files:
        raise ValueError(
            f"{source}: expected images ({', '.join(_SUFFIXES)}); got none; give another folder"
        )
    for file in files:
        name = Path(file).name if source.is_file() else os.path.relpath(file, source)
        yield file, name, _decode(file, mode, fitted)


def write_sheet(path: Path, rows: Sequence[Tensor]) -> None:
    """Writes rows of images as a PNG, in strips of 16 columns, enlarged without smoothing.

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
