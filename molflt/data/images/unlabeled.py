"""Images without labels: one, those of a folder, or those of an idx file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from molflt.data.images.base import LabeledImages
from molflt.data.images.files import _SUFFIXES, _decode, _image_files
from molflt.data.images.idx import _read_file

__all__ = ["read_alike", "read_images"]


def read_images(source: Path, side: int, channels: int) -> Iterator[tuple[str, Tensor]]:
    """Images without labels, one after another, fitted to a square.

    Args:
        source: an image, a folder of images, or an idx file of images.
        side: of the square, pixels.
        channels: 1 for gray, 3 for colors.

    Yields:
        Name of the file, with the place within an idx file, and bytes (channels, side, side).
    """
    for file, name, image in _images(source, "L" if channels == 1 else "RGB", side):
        pixels = image.expand(1, channels, *image.shape[1:])
        yield name, LabeledImages._fit(pixels, side, file)[0]


def read_alike(source: Path, side: int, channels: int, fit: bool = False) -> Iterator[Tensor]:
    """Images as a model of their bytes takes them: nothing is changed but for what is asked.

    Gray images serve a model of colors, as training reads them: all channels are the same.

    Args:
        source: an image, a folder of images, or an idx file of images.
        side: of the squares, pixels.
        channels: 1 for gray, 3 for colors.
        fit: scale the central squares of larger images down, as `LabeledImages._fit` with a box.

    Yields:
        Bytes (channels, side, side).
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
                f"{image.shape[2]}; scale it, or let --fit true do so"
            )
        yield image


def _images(
    source: Path, mode: str | None, fitted: int | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """File, name and bytes (channels, height, width) of each image, those of an idx file gray.

    Args:
        source: an image, a folder of images, in sorted order, or an idx file of images.
        mode: as for `_decode`, of images that are decoded.
        fitted: likewise; given where training reads JPEGs in part, so that pixels are the same.
    """
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
