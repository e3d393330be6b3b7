"""Images without labels: a file, the files of a folder, or an idx file."""

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
    """Yields the name and the bytes (channels, side, side) of images, resized to squares.

    Args:
        source: image, folder of images, or idx file of images.
        side: side of the squares in pixels.
        channels: 1 for gray, 3 for colors.
    """
    for file, name, image in _images(source, "L" if channels == 1 else "RGB", side):
        pixels = image.expand(1, channels, *image.shape[1:])
        yield name, LabeledImages._fit(pixels, side, file)[0]


def read_alike(source: Path, side: int, channels: int, fit: bool = False) -> Iterator[Tensor]:
    """Yields the bytes (channels, side, side) of images without resizing, for a pixel model.

    Gray images are accepted by a model of colors, with three equal channels as in training.

    Args:
        source: image, folder of images, or idx file of images.
        side: side of the squares in pixels.
        channels: 1 for gray, 3 for colors.
        fit: scale the central squares of larger images down, as in training.
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
    """Yields file, name and bytes of images; `mode` and `fitted` as for `_decode`."""
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
