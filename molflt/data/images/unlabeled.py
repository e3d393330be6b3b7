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

    Raises:
        FileNotFoundError: there is nothing at `source`.
        ValueError: naming the file that is damaged or no image, or a folder without any.
    """
    _expect_there(source)
    fit = LabeledImages._fit
    if source.is_file() and "idx" in source.name:
        for place, image in enumerate(_read_file(source, 3)):
            gray = image.expand(1, channels, *image.shape)
            yield f"{source.name}:{place}", fit(gray, side, str(source))[0]
        return
    for file in _named_files(source):
        image = fit(_decode(file, "L" if channels == 1 else "RGB")[None], side, file)[0]
        yield (Path(file).name if source.is_file() else os.path.relpath(file, source)), image


def read_alike(source: Path, side: int, channels: int, fit: bool = False) -> Iterator[Tensor]:
    """Images as a model of their bytes takes them: nothing is changed but for what is asked.

    Args:
        source: an image, a folder of images, or an idx file of images.
        side: of the squares, pixels.
        channels: 1 for gray, 3 for colors.
        fit: scale the central squares of larger images down, as `LabeledImages._fit` with a box.

    Yields:
        Bytes (channels, side, side).

    Raises:
        FileNotFoundError: there is nothing at `source`.
        ValueError: naming the file that is damaged, no image, or of other channels or another size.
    """
    _expect_there(source)
    if source.is_file() and "idx" in source.name:
        images = ((str(source), image[None]) for image in _read_file(source, 3))
    else:
        images = ((file, _decode(file, None)) for file in _named_files(source))
    for name, image in images:
        if len(image) != channels:
            raise ValueError(
                f"{name}: expected images of {channels} channels, as in training; got {len(image)};"
                " convert it"
            )
        if fit:
            image = LabeledImages._fit(image[None], side, name, box=True)[0]
        if tuple(image.shape[1:]) != (side, side):
            raise ValueError(
                f"{name}: expected {side} x {side} pixels, as in training; got {image.shape[1]} x "
                f"{image.shape[2]}; scale it, or let --fit true do so"
            )
        yield image


def _expect_there(source: Path) -> None:
    if not source.exists():
        raise FileNotFoundError(
            f"{source}: no such file or folder; expected an image, a folder of images, or an idx "
            "file of images"
        )


def _named_files(source: Path) -> list[str]:
    """An image, or the images of a folder, sorted; ValueError if it has none."""
    files = [str(source)] if source.is_file() else sorted(_image_files(source))
    if not files:
        raise ValueError(
            f"{source}: expected images ({', '.join(_SUFFIXES)}); got none; give another folder"
        )
    return files
