"""Labeled images from idx files, folders of classes, and Hugging Face data sets."""

from __future__ import annotations

import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from molflt.data.images.base import LabeledImages
from molflt.data.packed import dataset_loader, unpacked
from molflt.files import shown

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["open_images"]

_MAGIC = b"\0\0\x08"  # unsigned bytes
_AXES = {3: "images (3 axes)", 1: "labels (1 axis)"}
_CHUNK = 4096  # images that are resized at once
_SUFFIXES = (".png", ".jpg", ".jpeg")
_GRAY = ("1", "L", "LA")
_DEEP = ("I", "F")  # modes of more than 8 bits, which Pillow would clip
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow runs programs for some others


def open_images(
    source: Path,
    labels: Path | None = None,
    size: int | None = None,
    classes: Sequence[str] | None = None,
    box: bool = False,
    flat: bool = False,
) -> LabeledImages:
    """Opens labeled images.

    Args:
        source: folder with one subfolder per class, idx file of images, or hf:OWNER/NAME.
        labels: idx file of the labels, if its name cannot be derived from that of the images.
        size: side in pixels of the squares to which images are resized; None keeps their size.
        classes: names of the classes, in the order of labels.
        box: each pixel of a resized image is the mean of the area that it covers.
        flat: accept a folder of images without subfolders, as one class.
    """
    if labels is not None and (str(source).startswith("hf:") or source.is_dir()):
        raise ValueError(
            f"{labels}: a file of labels has no effect with {source}, which contains classes; omit "
            "data.train_labels or data.val_labels"
        )
    if str(source).startswith("hf:"):
        return _HubImages(str(source), size, classes, box)
    if source.is_dir():
        return _ImageFolder(source, size, classes, box, flat)
    if not source.exists():
        raise FileNotFoundError(
            f"{source}: no such file or folder; expected a folder of classes, an idx file of "
            "images, or hf:OWNER/NAME"
        )
    return _IdxImages(source, labels, size, classes, box)


def _decode(path: str, mode: str | None, fitted: int | None = None) -> Tensor:
    """Reads an image as bytes (channels, height, width)."""
    from PIL import Image

    with _decoding(path), Image.open(path, formats=_FORMATS) as image:
        if fitted is not None:
            image.draft(mode, (fitted, fitted))
        image.load()
    return _as_bytes(image, path, mode or ("L" if image.mode in _GRAY else "RGB"))


def _as_bytes(image: Image, name: str, mode: str = "RGB") -> Tensor:
    """Returns the bytes of an image; raises ValueError for more than 8 bits per channel."""
    if image.mode[0] in _DEEP:
        raise ValueError(
            f"{name}: expected 8 bits per channel; got mode {image.mode}; convert the image"
        )
    pixels = torch.from_numpy(np.array(image.convert(mode)))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1)


class _DecodedImages(LabeledImages):
    """Base class for color images that are decoded on demand."""

    channels = 3

    def __init__(self, fitted: int | None, box: bool = False) -> None:
        self.fitted, self.box = fitted, box
        first = self._fitted(0)
        self.size = (first.shape[1], first.shape[2])

    @abstractmethod
    def _name(self, index: int) -> str:
        """Returns the name of an image, for messages."""

    @abstractmethod
    def _decoded(self, index: int) -> Tensor:
        """Returns an image, (3, height, width) uint8."""

    def _fitted(self, index: int) -> Tensor:
        pixels = self._decoded(index)
        if self.fitted is not None:
            pixels = self._fit(pixels[None], self.fitted, self._name(index), self.box)[0]
        return pixels.contiguous()

    def image(self, index: int) -> Tensor:
        image = self._fitted(index)
        if tuple(image.shape[1:]) != self.size:
            raise ValueError(
                f"{self._name(index)}: expected {self.size[0]} x {self.size[1]} pixels, as in the "
                f"first image; got {image.shape[1]} x {image.shape[2]}; set data.image_size to "
                "resize all"
            )
        return image


class _ImageFolder(_DecodedImages):
    """Images in one folder per class, named after the class; arguments as for `open_images`."""

    def __init__(
        self,
        path: Path,
        size: int | None = None,
        classes: Sequence[str] | None = None,
        box: bool = False,
        flat: bool = False,
    ) -> None:
        self.path = path
        found = sorted(
            entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != "."
        )
        if flat and not found:
            found = ["."]
        elif not found:
            idx = sorted(entry.name for entry in path.glob("*idx3*"))
            hint = f"give the file {path / idx[0]}" if idx else f"make them, as in {path}/cat/1.png"
            raise ValueError(
                f"{path}: expected a folder of images for each class; got none; {hint}"
            )
        elif unused := sorted(filter(_is_image, os.listdir(path))):
            warnings.warn(
                f"{path}: {len(unused)} images outside the folders of classes are ignored, such as "
                f"{shown(unused[0])}; move them into a folder, or away",
                stacklevel=3,
            )
        self.classes = found if classes is None else list(classes)
        if unknown := sorted(set(found) - set(self.classes)):
            raise ValueError(
                f"{path}: expected folders of the {len(self.classes)} trained classes; got "
                f"{', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''} as well; rename or "
                "remove them"
            )
        self.files: list[str] = []
        labels: list[int] = []
        for name in found:
            files = sorted(_image_files(path / name))
            if not files:
                raise ValueError(
                    f"{path / name}: expected images ({', '.join(_SUFFIXES)}); got none; remove "
                    "the folder, or fill it"
                )
            self.files += files
            labels += [self.classes.index(name)] * len(files)
        self.labels = torch.tensor(labels)
        super().__init__(size, box)

    def _name(self, index: int) -> str:
        return self.files[index]

    def _decoded(self, index: int) -> Tensor:
        # Reading a JPEG at a reduced size uses a filter other than a box
        return _decode(self.files[index], "RGB", None if self.box else self.fitted)


class _HubImages(_DecodedImages):
    """Images of a Hugging Face data set."""

    def __init__(
        self,
        source: str,
        size: int | None = None,
        classes: Sequence[str] | None = None,
        box: bool = False,
    ) -> None:
        load = dataset_loader(source)
        name, _, split = source.removeprefix("hf:").partition(":")
        self.path = Path(source)
        self.rows = load(name, split=split or "train")
        columns = self.rows.features
        image = [column for column in ("image", "img") if column in columns]
        label = [column for column in ("label", "fine_label") if column in columns]
        names = getattr(columns[label[0]], "names", None) if label else None
        if not image or names is None:
            raise ValueError(
                f"{source}: expected columns image and label (classes); got {', '.join(columns)}; "
                "use another set, or write it as a folder of classes"
            )
        self.column = image[0]
        self.labels = torch.tensor(list(self.rows[label[0]]), dtype=torch.int64)
        self.classes = list(names)
        if bool((hidden := self.labels < 0).any()):
            raise ValueError(
                f"{source}: expected the class of each image; got label {int(self.labels.min())} "
                f"in {int(hidden.sum()):,} of {len(hidden):,} rows, perhaps hidden; give a "
                "split with labels"
            )
        if classes is not None and list(classes) != self.classes:
            raise ValueError(
                f"{source}: expected the {len(classes)} trained classes; got "
                f"{len(self.classes)} others; validate on the same classes"
            )
        super().__init__(size, box)

    def _name(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def _decoded(self, index: int) -> Tensor:
        with _decoding(self._name(index)):
            image = cast("Image", self.rows[index][self.column])
        return _as_bytes(image, self._name(index))


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Adds the name of the image to Pillow's errors."""
    try:
        yield
    except Exception as error:  # decoders raise many classes
        raise ValueError(
            f"{name}: expected an image; it cannot be decoded ({error}); get it again, or remove it"
        ) from None


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _image_files(folder: Path) -> list[str]:
    """Lists the images below a folder; follows links but visits each folder only once."""
    seen: set[str] = set()
    found: list[str] = []
    for where, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        found += [os.path.join(where, name) for name in filter(_is_image, names)]
    return found


class _IdxImages(LabeledImages):
    """Gray images of an idx file, in memory, with the labels of a second file."""

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
    """Reads the bytes of an idx file, plain or gzipped, that has the given number of axes."""
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
    """Finds the idx file of the labels from the name of the file of images."""
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(".gz")
    for candidate in (name, plain, f"{plain}.gz"):
        if candidate != path.name and (path.parent / candidate).is_file():
            return path.parent / candidate
    raise FileNotFoundError(
        f"{path.parent / name}: no such file; expected the labels of {path.name}; give their file "
        "as data.train_labels or data.val_labels"
    )
