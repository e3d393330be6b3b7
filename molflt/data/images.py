"""Labeled images from files: idx files as of MNIST, and folders of classes.

Both are map-style data sets of (image, label): bytes (channels, height, width) and an int64.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from molflt.data.image_augment import center_crop

__all__ = ["IdxImages", "ImageFolder", "LabeledImages", "as_bytes", "expect_size", "open_images"]

SUFFIXES = (".png", ".jpg", ".jpeg")
UNSIGNED_BYTE = 0x08  # the idx format's code
AXES = {3: "images (3 axes)", 1: "labels (1 axis)"}
CHUNK = 4096  # images that are resized at once
DEEP = ("I", "F")  # modes of more than 8 bits, which Pillow would clip


class LabeledImages(Dataset[tuple[Tensor, Tensor]]):
    """Base of data sets of labeled images of one size.

    Attributes:
        path: where they come from.
        labels: (n,) int64, index of the class of each image.
        classes: names of the classes.
        channels: color channels.
        size: height and width, pixels.
    """

    path: Path
    labels: Tensor
    classes: list[str]
    channels: int
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.image(index), self.labels[index]

    def image(self, index: int) -> Tensor:
        """One image, (channels, height, width) uint8."""
        raise NotImplementedError


class IdxImages(LabeledImages):
    """Gray images of an idx file, in memory, with the labels of a second one.

    Args:
        path: idx file of three axes, plain or gzipped.
        labels: idx file of one axis; by default the file beside it that is named alike, with
            "labels" for "images" and "idx1" for "idx3".
        size: side of a square that images are fitted to (see `fit`); None leaves them as they are.
        classes: names of the classes; their numbers if None.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: naming the file that is damaged, mislabeled, or has labels beyond the classes.
    """

    def __init__(
        self,
        path: Path,
        labels: Path | None = None,
        size: int | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.path = path
        images = read_idx(path, axes=3)
        beside = labels_beside(path) if labels is None else labels
        self.labels = read_idx(beside, axes=1).long()
        if len(images) != len(self.labels):
            raise ValueError(
                f"{beside}: expected a label for each of the {len(images):,} images of {path.name};"
                f" got {len(self.labels):,} labels; give the two files of one set"
            )
        most = int(self.labels.max())
        self.classes = [str(i) for i in range(most + 1)] if classes is None else list(classes)
        if most >= len(self.classes):
            raise ValueError(
                f"{beside}: expected labels below {len(self.classes)}, the number of classes; got "
                f"{most}; train on a set with all classes, or name them all"
            )
        self.images = images[:, None]
        if size is not None and self.images.shape[-2:] != (size, size):
            self.images = torch.cat([fit(part, size) for part in self.images.split(CHUNK)])
        self.channels = 1
        self.size = (self.images.shape[-2], self.images.shape[-1])

    def image(self, index: int) -> Tensor:
        return self.images[index]


class ImageFolder(LabeledImages):
    """Images below a folder per class, decoded when they are asked for, in colors.

    Args:
        path: folder that holds a folder for each class; its name is the name of the class.
        size: side of a square that images are fitted to (see `fit`); None expects that all are of
            the size of the first one.
        classes: names of the classes, in the order of labels; by default all folders, sorted.

    Raises:
        ValueError: naming the folder without classes or images, or of an unknown class; when an
            image is read, naming the file that cannot be decoded or has another size.
    """

    def __init__(
        self, path: Path, size: int | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self.path = path
        found = sorted(
            entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != "."
        )
        if not found:
            idx = sorted(entry.name for entry in path.glob("*idx3*"))
            hint = f"or give the file {path / idx[0]}" if idx else f"as in {path}/cat/1.png"
            raise ValueError(
                f"{path}: expected a folder of images for each class; got none; make them, {hint}"
            )
        self.classes = found if classes is None else list(classes)
        if unknown := sorted(set(found) - set(self.classes)):
            raise ValueError(
                f"{path}: expected folders of the {len(self.classes)} classes trained on; got "
                f"{', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''} besides; rename or "
                "remove them"
            )
        self.files: list[str] = []
        labels: list[int] = []
        for name in found:
            files = sorted(_image_files(path / name))
            if not files:
                raise ValueError(
                    f"{path / name}: expected images ({', '.join(SUFFIXES)}); got none; remove the "
                    "folder, or fill it"
                )
            self.files += files
            labels += [self.classes.index(name)] * len(files)
        self.labels = torch.tensor(labels)
        self.channels = 3
        self.fitted = size
        first = decode(self.files[0], size)
        self.size = (first.shape[1], first.shape[2])

    def image(self, index: int) -> Tensor:
        image = decode(self.files[index], self.fitted)
        return expect_size(image, self.size, self.files[index])


def open_images(
    source: Path,
    labels: Path | None = None,
    size: int | None = None,
    classes: Sequence[str] | None = None,
) -> LabeledImages:
    """Opens labeled images, whatever holds them.

    Args:
        source: folder of classes, or an idx file of images.
        labels: idx file of the labels, if it is not beside that of the images.
        size: side of a square that images are fitted to (see `fit`), pixels.
        classes: names of the classes.

    Raises:
        FileNotFoundError: there is nothing at `source`.
        ValueError: what is there is damaged or of an unknown kind.
    """
    if source.is_dir():
        return ImageFolder(source, size, classes)
    if not source.exists():
        raise FileNotFoundError(
            f"{source}: no such file or folder; expected a folder of classes, an idx file of "
            "images, or hf:NAME"
        )
    return IdxImages(source, labels, size, classes)


def read_idx(path: Path, axes: int) -> Tensor:
    """Bytes of an idx file, plain or gzipped, of so many axes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: naming the file that is no idx file, of other axes, empty, or of another length
            than its header says.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected an idx file of {AXES[axes]}")
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    opener: Any = gzip.open if zipped else open
    # A damaged header may ask for more than there is memory; deflate packs less than 1:1100
    most = path.stat().st_size * (1100 if zipped else 1)
    try:
        with opener(path, "rb") as file:
            return _read_idx(file, path, axes, most)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected a whole gzip file; got a damaged or truncated one ({error}); get it "
            "again"
        ) from None


def _read_idx(file: IO[bytes], path: Path, axes: int, most: int) -> Tensor:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != UNSIGNED_BYTE:
        raise ValueError(
            f"{path}: expected an idx file of bytes, which begins with 00 00 08; got "
            f"{head.hex(' ') or 'nothing'}; give an idx file, or a folder of classes"
        )
    if head[3] != axes:
        raise ValueError(
            f"{path}: expected {AXES[axes]}; got {AXES.get(head[3], f'{head[3]} axes')}; give the "
            f"{AXES[axes].split()[0]} file here"
        )
    sides = file.read(4 * axes)
    shape = np.frombuffer(sides[: len(sides) // 4 * 4], ">u4").tolist()
    expected = math.prod(shape) if len(shape) == axes else 0
    # One byte more than expected, so that a file that goes on is noticed
    content = bytearray(file.read(min(expected + 1, most))) if expected else bytearray()
    if not expected or len(content) != expected:
        more = "more" if len(content) > expected else f"{len(content):,}"
        raise ValueError(
            f"{path}: expected {expected:,} bytes after the header, as it says ({shape}); got "
            f"{more}; the file is truncated, empty or mislabeled; get it again"
        )
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def labels_beside(path: Path) -> Path:
    """The idx file of labels that belongs to one of images, by its name.

    Raises:
        FileNotFoundError: naming what was looked for.
    """
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(".gz")
    for candidate in (name, plain, f"{plain}.gz"):
        if candidate != path.name and (path.parent / candidate).is_file():
            return path.parent / candidate
    raise FileNotFoundError(
        f"{path.parent / name}: no such file; expected the labels of {path.name} there; give their "
        "file (data.train_labels, data.val_labels)"
    )


def fit(images: Tensor, size: int) -> Tensor:
    """Images resized so that the shorter side is `size`, and the central square of that.

    Args:
        images: (n, channels, height, width) uint8.
        size: pixels.

    Returns:
        (n, channels, size, size) uint8.
    """
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    scale = size / min(height, width)
    sides = [max(size, round(height * scale)), max(size, round(width * scale))]
    resized = F.interpolate(images, size=sides, mode="bilinear", antialias=True)
    return center_crop(resized, size)


def decode(path: str, size: int | None) -> Tensor:
    """An image file in colors, (3, height, width) uint8, fitted to a square of `size` if given.

    Raises:
        ValueError: naming the file that cannot be decoded, or has more than 8 bits per channel.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            if size is not None:
                image.draft("RGB", (size, size))  # a JPEG need not be decoded in full
            return as_bytes(image, size, path)
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{path}: expected an image; it cannot be decoded ({error}); get it again, or remove it"
        ) from None


def as_bytes(image: Any, size: int | None, name: str) -> Tensor:
    """A Pillow image in colors, (3, height, width) uint8, fitted to a square of `size` if given.

    Raises:
        ValueError: with the name, if it has more than 8 bits per channel.
    """
    if image.mode[0] in DEEP:
        raise ValueError(
            f"{name}: expected 8 bits per channel; got mode {image.mode}; convert the image"
        )
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return pixels.contiguous() if size is None else fit(pixels[None], size)[0].contiguous()


def expect_size(image: Tensor, size: tuple[int, int], name: str) -> Tensor:
    """The image, (channels, height, width); raises ValueError unless it has that size."""
    if tuple(image.shape[1:]) != size:
        raise ValueError(
            f"{name}: expected {size[0]} x {size[1]} pixels, as of the first image; got "
            f"{image.shape[1]} x {image.shape[2]}; set data.image_size to resize all"
        )
    return image


def _image_files(folder: Path) -> list[str]:
    return [
        os.path.join(where, name)
        for where, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    ]
