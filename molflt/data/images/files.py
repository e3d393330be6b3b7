"""Images from idx files and folders, with and without labels, and contact sheets."""

from __future__ import annotations

import gzip
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from molflt.data.images.augment import center_crop
from molflt.files import shown, unpacked, write_atomically

_MAGIC = {3: b"\0\0\x08\x03", 1: b"\0\0\x08\x01"}  # type (unsigned byte) and number of axes
_CHUNK = 4096  # images that are resized at once
MOST_DECODED = 2000
"""Maximum number of image files that are decoded for statistics and digests."""
_SAMPLE = 20  # images that are decoded to find out if a folder is gray
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_GRAY = ("1", "L", "LA")
_DEEP = ("I", "F")  # modes with more than 8 bits, which Pillow would clip
_Fit = Callable[[Tensor, str], Tensor]  # takes images (n, channels, height, width) and their name
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow runs programs for some others
_COLUMNS = 16  # of a contact sheet
_MARGIN = 2  # pixels between images of the sheet
_LEAST = 56  # minimum width in pixels of an image on the sheet; smaller images are enlarged


@dataclass(eq=False, repr=False)
class LabeledImages(Dataset[tuple[Tensor, Tensor]]):
    """Labeled images of equal size.

    Each item is a uint8 image of shape (channels, height, width) and its label, an int64 scalar.

    Args:
        path: source of the images.
        labels: int64 index of the class of each image in `classes`, of shape (n,).
        classes: names of the classes.
        read: function that returns the image at an index.
        names: names of the images, for messages; by default their indices.
        in_memory: True if reading all images is cheap.

    Attributes:
        channels: number of channels of the images.
        size: height and width of the images.
    """

    path: Path
    labels: Tensor
    classes: list[str]
    read: Callable[[int], Tensor]
    names: Sequence[str] | None = None
    in_memory: bool = False

    def __post_init__(self) -> None:
        self.channels, *sides = self.read(0).shape
        self.size = (sides[0], sides[1])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.read(index)
        first = (self.channels, *self.size)
        if image.shape != first:
            name = f"{self.path}, image {index}" if self.names is None else self.names[index]
            raise ValueError(
                f"{name}: expected {first} (channels, rows, columns), as in the first image; got "
                f"{tuple(image.shape)}; convert the image, or set data.image_size to resize all"
            )
        return image, self.labels[index]

    def squares(self, index: Tensor, side: int) -> LabeledImages:
        """Returns the images at indices `index` (n,), cropped to their central squares."""
        read = partial(self._square, index, side)
        labels, in_memory = self.labels[index], self.in_memory
        return LabeledImages(self.path, labels, self.classes, read, in_memory=in_memory)

    def _square(self, index: Tensor, side: int, place: int) -> Tensor:
        return center_crop(self[int(index[place])][0], side)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Returns the mean and standard deviation of each channel, for images scaled to [0, 1].

        If images are decoded from files, `MOST_DECODED` evenly spaced images are read. Both tensors
        have shape (channels,) and type float64; a standard deviation of 0 is replaced by 1.
        """
        count = len(self) if self.in_memory else min(len(self), MOST_DECODED)
        levels = torch.zeros(self.channels, 256, dtype=torch.int64)
        for i in range(count):
            for total, channel in zip(levels, self[i * len(self) // count][0], strict=True):
                total += torch.bincount(channel.flatten(), minlength=256)
        share = levels.double() / levels.sum(dim=1, keepdim=True)  # (channels, 256)
        level = torch.arange(256, dtype=torch.float64) / 255
        mean = share @ level
        std = (share * (level - mean[:, None]).square()).sum(dim=1).sqrt()
        return mean, torch.where(std > 0, std, 1.0)


def fitted(images: Tensor, name: str, size: int | None, box: bool = False) -> Tensor:
    """Resizes images (n, channels, height, width) and crops them to squares, unless `size` is None.

    With `box`, each pixel is the mean of the area that it covers, and images must be at least as
    large as the result. Otherwise, an antialiased bilinear filter of twice the width is used.
    `name` names the images in messages.
    """
    height, width = images.shape[-2:]
    if size is None or (height, width) == (size, size):
        return images
    if box:
        return _box(center_crop(images, min(height, width)), size, name)
    scale = size / min(height, width)
    sides = [max(size, round(height * scale)), max(size, round(width * scale))]
    resized = F.interpolate(images, size=sides, mode="bilinear", antialias=True)
    return center_crop(resized, size)


def _box(images: Tensor, size: int, name: str) -> Tensor:
    """Downscales square images; each pixel is the rounded mean of the area that it covers."""
    side = images.shape[-1]
    if side < size:
        raise ValueError(
            f"{name}: expected at least {size} pixels on the shorter side; got {side}; decrease "
            "data.image_size, or remove the image"
        )
    ends = torch.arange(size + 1, dtype=torch.float64)[:, None] * (side / size)
    pixel = torch.arange(side, dtype=torch.float64)
    covered = torch.minimum(ends[1:], pixel + 1) - torch.maximum(ends[:-1], pixel)
    share = (covered.clamp(min=0) * (size / side)).float()  # [new pixel, old pixel]
    return (share @ images.float() @ share.T).round().to(torch.uint8)


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
        source: folder with one subfolder per class, or idx file of images.
        labels: idx file of the labels, if its name cannot be derived from the name of the images.
        size: side, in pixels, of the squares to which images are resized; None keeps the sizes.
        classes: names of the classes, in the order of labels.
        box: average over the area of each pixel when resizing, as in `fitted`.
        flat: accept a folder of images without subfolders, as one class; gray images then have one
            channel instead of three, if a sample of the images in the folder is gray.
    """
    fit = partial(fitted, size=size, box=box)
    if labels is not None and source.is_dir():
        raise ValueError(
            f"{labels}: a file of labels has no effect with {source}, which contains classes; omit "
            "data.train_labels or data.val_labels"
        )
    if source.is_dir():
        # A JPEG that is decoded at a reduced size is not averaged over boxes
        return _open_folder(source, classes, fit, None if box else size, flat)
    return _open_idx(source, labels, classes, fit)


def _open_folder(
    path: Path, classes: Sequence[str] | None, fit: _Fit, draft: int | None, flat: bool
) -> LabeledImages:
    entries = sorted(entry for entry in path.iterdir() if entry.name[0] != ".")
    found = [entry.name for entry in entries if entry.is_dir()]
    unused = [entry.name for entry in entries if _is_image(Path(entry.name))]
    if flat and not found:
        found = ["."]
    elif not found:
        raise ValueError(
            f"{path}: expected a folder of images for each class; got none; pass an idx file, or "
            f"create folders, as in {path}/cat/1.png"
        )
    elif unused:
        warnings.warn(
            f"{path}: {len(unused)} images outside the folders of classes are ignored, such as "
            f"{shown(unused[0])}; move them into a folder, or remove them",
            stacklevel=3,
        )
    known = found if classes is None else list(classes)
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(
            f"{path}: expected folders of the {len(known)} trained classes; got "
            f"{', '.join(unknown[:5])} as well; rename or remove them"
        )
    files = {name: _image_files(path / name) for name in found}
    labels = torch.tensor([known.index(name) for name, own in files.items() for _ in own])
    names = [*chain.from_iterable(files.values())]
    sample = names[:: max(1, len(names) // _SAMPLE)] if flat else []
    gray = flat and all(len(_decode(name, None)) == 1 for name in sample)
    read = partial(_read_image, names, None if gray else "RGB", draft, fit)
    return LabeledImages(path, labels, known, read, names)


def _read_image(
    files: Sequence[str], mode: str | None, draft: int | None, fit: _Fit, index: int
) -> Tensor:
    return fit(_decode(files[index], mode, draft)[None], files[index])[0].contiguous()


def _decode(path: str, mode: str | None, size: int | None = None) -> Tensor:
    """Reads an image as a uint8 tensor (channels, height, width).

    `mode` is L or RGB; None keeps gray images gray. JPEG files can be decoded at a reduced size of
    at least `size` pixels. Raises ValueError for gray images of more than 8 bits.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=_FORMATS) as image:
            if size is not None:
                image.draft(mode, (size, size))
            image.load()
            ImageOps.exif_transpose(image, in_place=True)  # photographs may be stored sideways
    except Exception as error:  # decoders raise many kinds of errors
        raise ValueError(
            f"{path}: expected an image; it cannot be decoded ({error}); replace or remove it"
        ) from None
    if image.mode[0] in _DEEP:
        raise ValueError(f"{path}: expected 8 bits per channel; got mode {image.mode}; convert it")
    mode = mode or ("L" if image.mode in _GRAY else "RGB")
    pixels = torch.from_numpy(np.array(image.convert(mode)))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1)


def _is_image(path: Path) -> bool:
    return path.name.lower().endswith(_SUFFIXES) and "/." not in f"/{path}"


def _image_files(folder: Path) -> list[str]:
    found, visited = list[str](), set[str]()
    for where, below, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(where)) in visited:  # links may form a circle
            below.clear()
            continue
        visited.add(real)
        below.sort()  # otherwise the order depends on the disk
        paths = (Path(where, name) for name in names)
        found += [str(path) for path in paths if _is_image(path.relative_to(folder))]
    found.sort()
    if not found:
        raise ValueError(
            f"{folder}: expected images ({', '.join(_SUFFIXES)}); got none; remove the folder, or "
            "add images"
        )
    return found


def _open_idx(
    path: Path, labels: Path | None, classes: Sequence[str] | None, fit: _Fit
) -> LabeledImages:
    images = _read_idx(path, axes=3)[:, None]
    file = _labels_next_to(path) if labels is None else labels
    index = _read_idx(file, axes=1).long()
    if len(images) != len(index):
        raise ValueError(
            f"{file}: expected a label for each of the {len(images):,} images of {path.name}; got "
            f"{len(index):,} labels; pass two files of the same set"
        )
    largest = int(index.max())
    names = [str(i) for i in range(largest + 1)] if classes is None else list(classes)
    if largest >= len(names):
        raise ValueError(
            f"{file}: expected labels below {len(names)}, the number of classes; got {largest}; "
            "train on a set with all classes, or specify all class names"
        )
    images = torch.cat([fit(part, str(path)) for part in images.split(_CHUNK)])
    return LabeledImages(path, index, names, images.__getitem__, in_memory=True)


def _read_idx(path: Path, axes: int) -> Tensor:
    """Reads a uint8 tensor with `axes` axes from a plain or compressed idx file."""
    with open(path, "rb") as file:
        plain = file.read(2) == b"\0\0"  # browsers may unpack a file and keep its name
    with open(path, "rb") if plain else unpacked(path) as file:
        content = file.read()
        if content[:2] == b"\x1f\x8b":  # compressed, but without the extension .gz
            content = gzip.decompress(content)
    head = 4 + 4 * axes
    shape = np.frombuffer(content[4:head].ljust(4 * axes, b"\0"), ">u4").tolist()
    size = math.prod(shape)
    if content[:4] != _MAGIC[axes] or not size or len(content) != head + size:
        raise ValueError(
            f"{path}: expected an idx file that begins with {_MAGIC[axes].hex(' ')}, with {size:,} "
            f"bytes after the header; got {content[:4].hex(' ')} and "
            f"{max(0, len(content) - head):,} bytes; copy it again, or pass a folder of classes"
        )
    return torch.frombuffer(bytearray(content[head:]), dtype=torch.uint8).view(shape)


def _labels_next_to(path: Path) -> Path:
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(".gz")
    for candidate in (name, plain, f"{plain}.gz"):
        if candidate != path.name and (path.parent / candidate).is_file():
            return path.parent / candidate
    raise FileNotFoundError(
        f"{path.parent / name}: no such file; expected the labels of {path.name}; pass their file "
        "as data.train_labels or data.val_labels"
    )


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
