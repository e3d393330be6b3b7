"""Labeled images in idx files, the format of MNIST."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from molflt.data.images.base import LabeledImages
from molflt.data.packed import unpacked

_MAGIC = b"\0\0\x08"  # unsigned bytes
_AXES = {3: "images (3 axes)", 1: "labels (1 axis)"}
_CHUNK = 4096  # images that are resized at once


class _IdxImages(LabeledImages):
    """Gray images of an idx file, in memory, with the labels of a second file.

    Args:
        path: idx file of three axes, plain or gzipped.
        labels: idx file of one axis; by default the file next to `path` with "labels" for "images"
            and "idx1" for "idx3" in its name.
        size: side of the squares that images are resized to; None keeps their size.
        classes: names of the classes; None for their numbers.
        box: see `LabeledImages._fit`.
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
        file = _labels_next_to(path) if labels is None else labels
        self.labels = _read_file(file, axes=1).long()
        if len(images) != len(self.labels):
            raise ValueError(
                f"{file}: expected a label for each of the {len(images):,} images of {path.name}; "
                f"got {len(self.labels):,} labels; give two files of the same set"
            )
        most = int(self.labels.max())
        self.classes = [str(i) for i in range(most + 1)] if classes is None else list(classes)
        if most >= len(self.classes):
            raise ValueError(
                f"{file}: expected labels below {len(self.classes)}, the number of classes; got "
                f"{most}; train on a set with all classes, or name all of them"
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
    """Reads the bytes of an idx file, plain or gzipped, with this number of axes."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected an idx file of {_AXES[axes]}")
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        with unpacked(path, "gzip") as file:
            content = file.read()
    if len(content) < 4 or content[:3] != _MAGIC:
        raise ValueError(
            f"{path}: expected an idx file of bytes, which begins with 00 00 08; got "
            f"{content[:4].hex(' ') or 'an empty file'}; give an idx file, or a folder of classes"
        )
    if content[3] != axes:
        raise ValueError(
            f"{path}: expected {_AXES[axes]}; got {_AXES.get(content[3], f'{content[3]} axes')}; "
            "give another file"
        )
    head = 4 + 4 * axes
    shape = np.frombuffer(content[4:head].ljust(4 * axes, b"\0"), ">u4").tolist()
    expected, found = math.prod(shape), max(0, len(content) - head)
    if not expected or found != expected:
        raise ValueError(
            f"{path}: expected {expected:,} bytes after the header, for the shape {shape}; got "
            f"{found:,}; the file is truncated, empty or mislabeled; get it again"
        )
    return torch.frombuffer(bytearray(content[head:]), dtype=torch.uint8).view(shape)


def _labels_next_to(path: Path) -> Path:
    """Finds the idx file of the labels by the name of the images."""
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(".gz")
    for candidate in (name, plain, f"{plain}.gz"):
        if candidate != path.name and (path.parent / candidate).is_file():
            return path.parent / candidate
    raise FileNotFoundError(
        f"{path.parent / name}: no such file; expected the labels of {path.name}; give their file "
        "as data.train_labels or data.val_labels"
    )
