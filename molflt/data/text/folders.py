"""Labelled sequences of bytes that no table holds: a file for each text, and images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from molflt.data.images.files import open_images
from molflt.data.text.fixed import text_of

__all__ = ["read_grey", "read_texts"]

_UNLABELLED = "unsup"  # a folder of the public reviews
_MOST_BYTES = 2**24
_LUMA = torch.tensor([19595, 38470, 7471])  # ITU-R 601 in units of 2^-16, as Pillow rounds it


def read_texts(path: Path, classes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The .txt files in a folder for each class: of a class in the order of numbers in their names.

    Args:
        path: folder with the folders.
        classes: names of the folders.

    Yields:
        What a file holds, by `molflt.data.text.fixed.text_of`, and the index of its class.

    Raises:
        ValueError: naming the folder without classes, with another one, or without texts; or the
            file that is empty or too large.
    """
    wanted = f"expected {' and '.join(classes)}, with a .txt file for each text"
    if not path.is_dir():
        raise ValueError(f"{path}: a file; {wanted}; give the folder that has these")
    for name in classes:
        if not (path / name).is_dir():
            raise ValueError(f"{path}: no folder {name}; {wanted}; change data.root")
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and entry.name[0] != "." and entry.name not in (*classes, _UNLABELLED):
            raise ValueError(f"{path}: unknown class {entry.name}; {wanted}; remove the folder")
    for label, name in enumerate(classes):
        files = sorted((path / name).glob("*.txt"), key=_numbers)
        if not files:
            raise ValueError(f"{path / name}: no .txt file; {wanted}; get the data again")
        for file in files:
            with open(file, "rb") as opened:
                content = opened.read(_MOST_BYTES + 1)
            if not 0 < len(content) <= _MOST_BYTES:
                found = "an empty file" if not content else "more"
                raise ValueError(
                    f"{file}: expected a text of 1 to {_MOST_BYTES:,} bytes; got {found}; get it "
                    "again, or remove it"
                )
            yield text_of(content), label


def _numbers(path: Path) -> list[tuple[int, str]]:
    """Sorts 9_1 before 10_1."""
    return [(int(one or 0), rest) for one, rest in re.findall(r"(\d*)(\D*)", path.name)]


def read_grey(path: Path, classes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Images as sequences of the grey levels of their pixels, row by row.

    Args:
        path: folder of a folder for each class, or idx file of images, with its labels beside it.
        classes: names of the classes, in the order of labels.

    Yields:
        A byte for each pixel, by `molflt.data.text.fixed.text_of`, and the index of the class.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: naming what is damaged, of another size than the first image, or of another
            class.
    """
    images = open_images(path, classes=classes)
    for index in range(len(images)):
        image, label = images[index]
        if images.channels == 3:
            levels = (image.permute(1, 2, 0).int() * _LUMA).sum(dim=-1)
            image = ((levels + 2**15) >> 16).to(torch.uint8)
        yield text_of(image.numpy().tobytes()), int(label)
