"""Images without labels, and contact sheets."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.data.images.augment import center_crop
from molflt.data.images.files import _decode, _image_files, _is_image, _read_idx, fitted
from molflt.files import write_atomically

_COLUMNS = 16
_MARGIN = 2  # pixels between images of the sheet
_LEAST = 56  # minimum width in pixels of an image on the sheet; smaller images are enlarged


def read_images(
    source: Path, side: int, channels: int, resize: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the bytes (channels, side, side) of each image, as in validation.

    `source` is an image, a folder of images, or an idx file. `channels` is 1 (gray) or 3 (color).
    `resize` is the side before the central square is cut.
    """
    for name, image in _images(source, "L" if channels == 1 else "RGB", resize):
        resized = fitted(image.expand(1, channels, -1, -1), name, resize)
        yield name, center_crop(resized[0], side)


def read_alike(source: Path, side: int, channels: int, fit: bool = False) -> Iterator[Tensor]:
    """Yields the bytes (channels, side, side) of each image, for a pixel model.

    Accepts the same sources as `read_images`. Gray images are repeated to three channels for color
    models. With `fit`, the central squares of larger images are downscaled. Otherwise, images of a
    different size raise a ValueError.
    """
    for name, image in _images(source, None):
        if len(image) not in (1, channels):
            raise ValueError(
                f"{name}: expected images of {channels} channels, as in training; got "
                f"{len(image)}; convert it"
            )
        image = image.expand(channels, -1, -1)
        image = fitted(image[None], name, side, box=True)[0] if fit else image
        if tuple(image.shape[1:]) != (side, side):
            raise ValueError(
                f"{name}: expected {side} x {side} pixels, as in training; got {image.shape[1]} x "
                f"{image.shape[2]}; resize it, or set --fit true"
            )
        yield image


def _images(
    source: Path, mode: str | None, size: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and bytes of each image; see `_decode` for `mode` and `size`."""
    if source.is_dir():
        for file in _image_files(source):
            yield os.path.relpath(file, source), _decode(file, mode, size)
    elif "idx" in source.name and not _is_image(Path(source.name)):
        for place, image in enumerate(_read_idx(source, axes=3)):
            yield f"{source.name}:{place}", image[None]
    else:
        yield source.name, _decode(str(source), mode, size)


def write_sheet(path: Path, rows: Sequence[Tensor]) -> None:
    """Writes rows of images to a PNG file, in strips of 16 columns; enlarges small images.

    All rows are uint8 tensors of the same shape (n, channels, height, width); images with the same
    index are in the same column.
    """
    from PIL import Image

    count, _, _, width = rows[0].shape
    columns, zoom = min(count, _COLUMNS), math.ceil(_LEAST / width)
    lines = []
    for start in range(0, count, columns):
        for row in rows:
            strip = row[start : start + columns].cpu()
            strip = strip.repeat_interleave(zoom, dim=2).repeat_interleave(zoom, dim=3)
            strip = F.pad(strip, (_MARGIN, 0, _MARGIN, 0), value=255)
            white = strip.new_full((columns - len(strip), *strip.shape[1:]), 255)
            lines.append(torch.cat((*strip, *white), dim=2))
    sheet = F.pad(torch.cat(lines, dim=1), (0, _MARGIN, 0, _MARGIN), value=255)
    pixels = sheet.permute(1, 2, 0).numpy()
    content = io.BytesIO()
    Image.fromarray(pixels[..., 0] if len(sheet) == 1 else pixels).save(content, format="PNG")
    write_atomically(path, content.getvalue())
