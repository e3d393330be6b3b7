"""Labeled images of idx files, the format of MNIST."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from molflt.data.images.base import LabeledImages
from molflt.data.packed import Unpacked, unpacked

_UNSIGNED_BYTE = 0x08  # the idx format's code
_AXES = {3: "images (3 axes)", 1: "labels (1 axis)"}
_CHUNK = 4096  # images that are resized at once
_BLOCK = 2**22  # bytes that are read at once


class _IdxImages(LabeledImages):
    """Gray images of an idx file, in memory, with the labels of a second one.

    Args:
        path: idx file of three axes, plain or gzipped.
        labels: idx file of one axis; by default the file beside it that is named alike, with
            "labels" for "images" and "idx1" for "idx3".
        size: side of a square that images are fitted to; None leaves them as they are.
        classes: names of the classes; their numbers if None.
        box: how images are scaled, see `LabeledImages._fit`.
    """

    in_memory = True

    def __init__(
        self,
        path: Path,
        labels: Path | None = None,
        size: int | None = None,
        classes: Sequence[str] | None = None,
        box: bool = False,
    ) -> None:
        self.path = path
        images = _read_file(path, axes=3)
        beside = _labels_beside(path) if labels is None else labels
        labels_of = _read_file(beside, axes=1)
        if len(images) != len(labels_of):
            raise ValueError(
                f"{beside}: expected a label for each of the {len(images):,} images of {path.name};"
                f" got {len(labels_of):,} labels; give the two files of one set"
            )
        self.labels = labels_of.long()
        most = int(self.labels.max())
        self.classes = [str(i) for i in range(most + 1)] if classes is None else list(classes)
        if most >= len(self.classes):
            raise ValueError(
                f"{beside}: expected labels below {len(self.classes)}, the number of classes; got "
                f"{most}; train on a set with all classes, or name them all"
            )
        self.images = images[:, None]
        if size is not None and self.images.shape[-2:] != (size, size):
            self.images = torch.cat(
                [self._fit(part, size, str(path), box) for part in self.images.split(_CHUNK)]
            )
        self.channels = 1
        self.size = (self.images.shape[-2], self.images.shape[-1])

    def image(self, index: int) -> Tensor:
        return self.images[index]


def _read_file(path: Path, axes: int) -> Tensor:
    """Bytes of an idx file, plain or gzipped, of so many axes."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected an idx file of {_AXES[axes]}")
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    with unpacked(path, "gzip") if zipped else open(path, "rb") as file:
        return _read(file, path, axes)


def _read(file: BinaryIO | Unpacked, path: Path, axes: int) -> Tensor:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _UNSIGNED_BYTE:
        raise ValueError(
            f"{path}: expected an idx file of bytes, which begins with 00 00 08; got "
            f"{head.hex(' ') or 'nothing'}; give an idx file, or a folder of classes"
        )
    if head[3] != axes:
        raise ValueError(
            f"{path}: expected {_AXES[axes]}; got {_AXES.get(head[3], f'{head[3]} axes')}; give "
            f"the {_AXES[axes].split()[0]} file here"
        )
    sides = file.read(4 * axes)
    shape = np.frombuffer(sides[: len(sides) // 4 * 4], ">u4").tolist()
    expected = math.prod(shape) if len(shape) == axes else 0
    content = bytearray()
    # One byte more than expected, so that a file that goes on is noticed; and no more memory than
    # there is content, whatever the header says
    while expected and (block := file.read(min(expected + 1 - len(content), _BLOCK))):
        content += block
    if not expected or len(content) != expected:
        more = "more" if len(content) > expected else f"{len(content):,}"
        raise ValueError(
            f"{path}: expected {expected:,} bytes after the header, as it says ({shape}); got "
            f"{more}; the file is truncated, empty or mislabeled; get it again"
        )
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _labels_beside(path: Path) -> Path:
    """The idx file of labels that belongs to one of images, by its name."""
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(".gz")
    for candidate in (name, plain, f"{plain}.gz"):
        if candidate != path.name and (path.parent / candidate).is_file():
            return path.parent / candidate
    raise FileNotFoundError(
        f"{path.parent / name}: no such file; expected the labels of {path.name} there; give their "
        "file (data.train_labels, data.val_labels)"
    )
