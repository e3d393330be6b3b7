"""Labeled images from wherever they are: idx files, folders of classes, Hugging Face data sets."""

from __future__ import annotations

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

from molflt.data.hub import dataset_loader
from molflt.data.images.base import LabeledImages
from molflt.data.images.idx import _IdxImages
from molflt.files import shown

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["open_images"]

_SUFFIXES = (".png", ".jpg", ".jpeg")
_GRAY = ("1", "L", "LA")
_DEEP = ("I", "F")  # modes of more than 8 bits, which Pillow would clip
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # whatever the name says; others run programs
_MOST_PIXELS = 2**25  # 300 MB while it is decoded


def open_images(
    source: Path,
    labels: Path | None = None,
    size: int | None = None,
    classes: Sequence[str] | None = None,
    box: bool = False,
    flat: bool = False,
) -> LabeledImages:
    """Opens labeled images, whatever holds them.

    Args:
        source: folder of classes, idx file of images, or hf:OWNER/NAME.
        labels: idx file of the labels, if it is not beside that of the images.
        size: side of a square that images are fitted to, pixels.
        classes: names of the classes.
        box: whether a pixel of a fitted image is the mean of what it covers, in all formats alike.
        flat: take the images of a folder without folders, too, as those of one class.
    """
    if labels is not None and (str(source).startswith("hf:") or source.is_dir()):
        raise ValueError(
            f"{labels}: a file of labels has no effect with {source}, whose images have classes of "
            "their own; leave data.train_labels or data.val_labels out"
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
    """Bytes (channels, height, width) of an image in a mode of Pillow: L is gray, RGB in colors.

    Without a mode, as it is: gray or in colors.
    """
    from PIL import Image

    with _decoding(path), Image.open(path, formats=_FORMATS) as image:
        _check_pixels(image)
        if fitted is not None:
            image.draft(mode, (fitted, fitted))  # a JPEG may be read in part
        image.load()
    return _as_bytes(image, path, mode or ("L" if image.mode in _GRAY else "RGB"))


def _as_bytes(image: Image, name: str, mode: str = "RGB") -> Tensor:
    """Raises ValueError, with the name, for more than 8 bits per channel."""
    if image.mode[0] in _DEEP:
        raise ValueError(
            f"{name}: expected 8 bits per channel; got mode {image.mode}; convert the image"
        )
    pixels = torch.from_numpy(np.array(image.convert(mode)))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1)


class _DecodedImages(LabeledImages):
    """Images that are decoded when they are asked for, in colors.

    A subclass sets path, labels and classes, then calls ``super().__init__``.

    Args:
        fitted: side of a square that images are fitted to; None expects that all are
            of the size of the first one.
        box: how, see `LabeledImages._fit`.
    """

    channels = 3

    def __init__(self, fitted: int | None, box: bool = False) -> None:
        self.fitted, self.box = fitted, box
        first = self._decoded(0)
        self.size = (first.shape[1], first.shape[2])

    @abstractmethod
    def _name(self, index: int) -> str:
        """What messages call an image."""

    @abstractmethod
    def _decoded(self, index: int) -> Tensor:
        """An image, (3, height, width) uint8, of any size unless `fitted`."""

    def image(self, index: int) -> Tensor:
        image = self._decoded(index)
        if tuple(image.shape[1:]) != self.size:
            raise ValueError(
                f"{self._name(index)}: expected {self.size[0]} x {self.size[1]} pixels, as of the "
                f"first image; got {image.shape[1]} x {image.shape[2]}; set data.image_size to "
                "resize all"
            )
        return image

    def _fitted(self, pixels: Tensor, name: str) -> Tensor:
        if self.fitted is not None:
            pixels = self._fit(pixels[None], self.fitted, name, self.box)[0]
        return pixels.contiguous()


class _ImageFolder(_DecodedImages):
    """Images below a folder per class.

    Args:
        path: folder that holds a folder for each class; its name is the name of the class.
        size: side of a square that images are fitted to; None expects that all are of
            the size of the first one.
        classes: names of the classes, in the order of labels; by default all folders, sorted.
        box: how images are scaled, see `LabeledImages._fit`.
        flat: see `open_images`.
    """

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
        if not found:
            idx = sorted(entry.name for entry in path.glob("*idx3*"))
            hint = f"or give the file {path / idx[0]}" if idx else f"as in {path}/cat/1.png"
            raise ValueError(
                f"{path}: expected a folder of images for each class; got none; make them, {hint}"
            )
        elif found != ["."]:
            _warn_of_others(path)
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
        path = self.files[index]
        # A JPEG read in part is scaled by its own transform: no box.
        return self._fitted(_decode(path, "RGB", None if self.box else self.fitted), path)


class _HubImages(_DecodedImages):
    """Images of a Hugging Face data set.

    Args:
        source: "hf:OWNER/NAME" or "hf:OWNER/NAME:SPLIT", by default "train". The images are in
            its column "image" or "img", and classes in "label", or "fine_label".
        size: side of a square that images are fitted to, or None.
        classes: names of the classes, for a check.
        box: how images are scaled, see `LabeledImages._fit`.
    """

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
                f"in {int(hidden.sum()):,} of {len(hidden):,} rows, as where labels are hidden; "
                "name a split that has them"
            )
        if classes is not None and list(classes) != self.classes:
            raise ValueError(
                f"{source}: expected the {len(classes)} classes trained on; got "
                f"{len(self.classes)} others; validate on the same classes"
            )
        super().__init__(size, box)

    def _name(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def _decoded(self, index: int) -> Tensor:
        with _decoding(self._name(index)):
            image = cast("Image", self.rows[index][self.column])
            _check_pixels(image)
        return self._fitted(_as_bytes(image, self._name(index)), self._name(index))


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Names the image that Pillow cannot decode."""
    try:
        yield
    except Exception as error:  # of many kinds, whatever a decoder stumbles over
        raise ValueError(
            f"{name}: expected an image; it cannot be decoded ({error}); get it again, or remove it"
        ) from None


def _check_pixels(image: Image) -> None:
    if (count := image.width * image.height) > _MOST_PIXELS:
        raise ValueError(f"{count:,} pixels; expected at most {_MOST_PIXELS:,}")


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _warn_of_others(path: Path) -> None:
    """Says what stands beside the folders of classes, where nobody reads it."""
    beside = sorted(filter(_is_image, os.listdir(path)))
    if beside:
        warnings.warn(
            f"{path}: {len(beside)} images beside the folders of classes are not used, such as "
            f"{shown(beside[0])}; move them into a folder, or away",
            stacklevel=4,
        )


def _image_files(folder: Path) -> list[str]:
    """Images below a folder, also behind links, but each folder once: links may form a circle."""
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
