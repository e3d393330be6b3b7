"""Images made of others in training.

Random numbers are drawn on the CPU for the whole batch at once, from the global generator or a
given one, so that they do not depend on the device, and a seed per step makes runs resumable.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Augmentation", "augment"]

Augmentation = Literal["none", "flip", "crop", "flip_crop", "resized_crop", "flip_resized_crop"]

_SCALE = (0.08, 1.0)  # share of the image's area, as for ImageNet (arXiv:1409.4842, section 6)
_RATIO = (3 / 4, 4 / 3)  # width over height, likewise
_TRIES = 10  # of boxes, before the whole image is taken


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
    """
    if kind not in get_args(Augmentation):
        known = ", ".join(get_args(Augmentation))
        raise ValueError(f"augment={kind!r} is unknown; expected one of {known}")
    size = images.shape[-2] if size is None else size
    if kind.startswith("flip"):
        images = _random_flip(images, generator)
    if kind.endswith("resized_crop"):
        return _random_resized_crop(images, size, generator=generator)
    if kind.endswith("crop"):
        larger = min(images.shape[-2:]) > size
        return _random_crop(images, size, 0 if larger else size // 8, generator)
    return _center_crop(images, size)


def _center_crop(images: Tensor, size: int) -> Tensor:
    """The central squares of images: (..., height, width) -> (..., size, size)."""
    height, width = images.shape[-2:]
    if min(height, width) < size:
        raise ValueError(
            f"expected images of at least {size} x {size}; got {height} x {width}; resize them"
        )
    top, left = (height - size) // 2, (width - size) // 2
    return images[..., top : top + size, left : left + size]


def _random_flip(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mirrors half of the images, (batch, channels, height, width), left to right."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(-1), images)


def _random_crop(
    images: Tensor, size: int, padding: int, generator: torch.Generator | None = None
) -> Tensor:
    """Squares cut out of (batch, channels, height, width) at random, after a black margin."""
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


def _random_resized_crop(
    images: Tensor,
    size: int,
    scale: tuple[float, float] = _SCALE,
    ratio: tuple[float, float] = _RATIO,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random boxes of the images, resized to squares.

    The area is uniform, the logarithm of width over height too, and the place; boxes that do not
    fit are drawn again, and the whole image is taken after ten. GoogLeNet (arXiv:1409.4842),
    section 6, "RandomResizedCrop" of FLT's and MAE's settings. Bilinear without a filter: boxes
    should not be much larger than the result.

    Args:
        images: (batch, channels, height, width), bytes, or real in [0, 1], as is the result.
        size: sides of the result, pixels.
        scale: least and greatest share of the image's area.
        ratio: least and greatest width over height.
        generator: CPU generator; the global one by default.
    """
    if not images.is_floating_point():
        images = images.to(torch.get_default_dtype()) / 255
    boxes = _random_boxes(len(images), images.shape[-2:], scale, ratio, generator)
    top, left, height, width = boxes.to(images).unbind(dim=1)
    middle = (torch.arange(size).to(images) + 0.5) / size  # of the pixels of the result
    rows = 2 * (top[:, None] + height[:, None] * middle) / images.shape[-2] - 1
    columns = 2 * (left[:, None] + width[:, None] * middle) / images.shape[-1] - 1
    grid = torch.stack(
        (columns[:, None].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)), dim=-1
    )
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _random_boxes(
    count: int,
    size: tuple[int, int] | torch.Size,
    scale: tuple[float, float] = _SCALE,
    ratio: tuple[float, float] = _RATIO,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Boxes in an image of `size`: (count, 4), top, left, height, width in pixels."""
    full_height, full_width = size
    area, shape = torch.rand(2, count, _TRIES, generator=generator)
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
