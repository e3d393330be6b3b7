"""Images made of others in training, and the statistics that normalize them.

Random numbers are drawn on the CPU for the whole batch at once, from the global generator or a
given one, so that they do not depend on the device, and a seed per step makes runs resumable.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

__all__ = [
    "Augmentation",
    "augment",
    "center_crop",
    "channel_statistics",
    "random_crop",
    "random_flip",
    "random_resized_crop",
]

Augmentation = Literal["none", "flip", "crop", "flip_crop", "resized_crop", "flip_resized_crop"]

SCALE = (0.08, 1.0)  # share of the image's area, as for ImageNet (arXiv:1409.4842, section 6)
RATIO = (3 / 4, 4 / 3)  # width over height, likewise
TRIES = 10  # of boxes, before the whole image is taken


def augment(
    images: Tensor,
    kind: Augmentation,
    size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random variants of the images of a training batch, each drawn on its own.

    Args:
        images: (batch, channels, height, width), bytes, or real in [0, 1].
        kind: "flip" left to right, "crop" from a black margin of an eighth of the side (or from the
            image itself where it is larger than `size`), "resized_crop" of random area and shape,
            or two of them; without a crop, larger images are cut to their centers.
        size: sides of the result, pixels; the height of the images by default.
        generator: CPU generator; the global one by default.

    Returns:
        (batch, channels, size, size), bytes if `images` are, but for resized crops.

    Raises:
        ValueError: an unknown kind, or images that are smaller than `size` and not resized.
    """
    if kind not in get_args(Augmentation):
        known = ", ".join(get_args(Augmentation))
        raise ValueError(f"augment={kind!r} is unknown; expected one of {known}")
    size = images.shape[-2] if size is None else size
    if kind.startswith("flip"):
        images = random_flip(images, generator)
    if kind.endswith("resized_crop"):
        return random_resized_crop(images, size, generator=generator)
    if kind.endswith("crop"):
        larger = min(images.shape[-2:]) > size
        return random_crop(images, size, 0 if larger else size // 8, generator)
    return center_crop(images, size)


def center_crop(images: Tensor, size: int) -> Tensor:
    """The central squares of images: (..., height, width) -> (..., size, size).

    Raises:
        ValueError: the images are smaller than that.
    """
    height, width = images.shape[-2:]
    if min(height, width) < size:
        raise ValueError(
            f"expected images of at least {size} x {size}; got {height} x {width}; resize them"
        )
    top, left = (height - size) // 2, (width - size) // 2
    return images[..., top : top + size, left : left + size]


def random_flip(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mirrors half of the images, (batch, channels, height, width), left to right."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(-1), images)


def random_crop(
    images: Tensor, size: int, padding: int, generator: torch.Generator | None = None
) -> Tensor:
    """Squares cut out of the images at random places, after a black margin.

    Args:
        images: (batch, channels, height, width).
        size: sides of the squares, pixels.
        padding: width of the margin, pixels.
        generator: CPU generator; the global one by default.

    Raises:
        ValueError: the padded images are smaller than `size`.
    """
    images = F.pad(images, (padding,) * 4)
    count, _, height, width = images.shape
    if min(height, width) < size:
        raise ValueError(
            f"expected padded images of at least {size} x {size} to crop from; got {height} x "
            f"{width}; lower size, or raise the padding"
        )
    places = torch.rand(2, count, generator=generator)  # both are drawn whatever the sizes
    room = torch.tensor([height - size + 1, width - size + 1])
    corners = (places * room[:, None]).long().minimum(room[:, None] - 1)
    rows, columns = (corners[..., None] + torch.arange(size)).to(images.device)
    index = torch.arange(count, device=images.device)[:, None, None]
    # Advanced indices on both sides of a slice put the channels last.
    return images[index, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def random_resized_crop(
    images: Tensor,
    size: int,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random boxes of the images, resized to squares.

    The area is uniform, the logarithm of width over height too, and the place; boxes that do not
    fit are drawn again, and the whole image is taken after ten. GoogLeNet (arXiv:1409.4842),
    section 6, "RandomResizedCrop" of FLT's and MAE's settings. Bilinear without a filter: boxes
    should not be much larger than the result.

    Args:
        images: (batch, channels, height, width), bytes, or real in [0, 1].
        size: sides of the result, pixels.
        scale: least and greatest share of the image's area.
        ratio: least and greatest width over height.
        generator: CPU generator; the global one by default.

    Returns:
        (batch, channels, size, size), real in [0, 1].
    """
    if not images.is_floating_point():
        images = images.to(torch.get_default_dtype()) / 255
    boxes = random_boxes(len(images), images.shape[-2:], scale, ratio, generator)
    top, left, height, width = boxes.to(images).unbind(dim=1)
    middle = (torch.arange(size).to(images) + 0.5) / size  # of the pixels of the result
    rows = 2 * (top[:, None] + height[:, None] * middle) / images.shape[-2] - 1
    columns = 2 * (left[:, None] + width[:, None] * middle) / images.shape[-1] - 1
    grid = torch.stack(
        (columns[:, None].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)), dim=-1
    )
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def random_boxes(
    count: int,
    size: tuple[int, int] | torch.Size,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Boxes of random area, shape and place: (count, 4), top, left, height, width in pixels.

    Args:
        count: how many.
        size: height and width of the image.
        scale: as for `random_resized_crop`.
        ratio: likewise.
        generator: likewise.
    """
    full_height, full_width = size
    area, shape = torch.rand(2, count, TRIES, generator=generator)
    places = torch.rand(2, count, generator=generator)
    area = full_height * full_width * (scale[0] + (scale[1] - scale[0]) * area)
    low, high = (math.log(end) for end in ratio)
    shape = (low + (high - low) * shape).exp()
    height, width = (area / shape).sqrt(), (area * shape).sqrt()
    fits = (height <= full_height) & (width <= full_width)
    first = fits.long().argmax(dim=1, keepdim=True)
    found = fits.any(dim=1)
    whole = torch.tensor([float(full_height), float(full_width)])
    sides = torch.stack((height.gather(1, first)[:, 0], width.gather(1, first)[:, 0]), dim=1)
    sides = torch.where(found[:, None], sides, whole)
    return torch.cat(((whole - sides) * places.T, sides), dim=1)


def channel_statistics(
    images: Dataset[tuple[Tensor, Tensor]], most: int = 2000
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, of images scaled to [0, 1].

    Args:
        images: items (image, label), (channels, height, width) uint8, with a length.
        most: images to read; if there are more, evenly spaced ones.

    Returns:
        (channels,) float64 each; a deviation of 0 is given as 1.
    """
    total = len(images)  # type: ignore[arg-type]
    counts: Tensor | None = None
    for i in range(min(total, most)):
        image = images[i * total // min(total, most)][0]
        bins = image.flatten(1).long() + 256 * torch.arange(len(image))[:, None]
        added = torch.bincount(bins.flatten(), minlength=256 * len(image))
        counts = added if counts is None else counts + added
    assert counts is not None, "a data set is not empty"
    share = counts.view(-1, 256).double()
    share = share / share.sum(dim=1, keepdim=True)
    level = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ level
    std = (share * (level - mean[:, None]).square()).sum(dim=1).sqrt()
    return mean, torch.where(std > 0, std, 1.0)
