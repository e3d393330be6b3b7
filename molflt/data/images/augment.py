"""Random variants of training images.

Random numbers are drawn on the CPU for a whole batch, so they do not depend on the device.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Augmentation = Literal["none", "flip", "crop", "flip_crop", "resized_crop", "flip_resized_crop"]

_SCALE = (0.08, 1.0)  # share of the area, as for ImageNet (arXiv:1409.4842, section 6)
_RATIO = (3 / 4, 4 / 3)  # width over height
_TRIES = 10  # boxes drawn before the whole image is used


def augment(images: Tensor, kind: Augmentation, size: int | None = None) -> Tensor:
    """Returns independent random variants of the images of a training batch.

    Args:
        images: images (batch, channels, height, width) of type uint8, or of real numbers in [0, 1].
        kind: transformation of the images: "flip" mirrors them horizontally; "crop" cuts a
            random square from an image larger than `size`, and otherwise from the image with a
            black margin of `size` / 8 on each side; "resized_crop" resizes a box of random area and
            shape. Without a random crop, larger images are cropped to their central squares.
        size: side length of the result in pixels; the height of the images by default.

    Returns:
        Images of shape (batch, channels, size, size). They have the same type as `images`, but
        resized crops are always floating point.
    """
    size = images.shape[-2] if size is None else size
    with torch.device("cpu"):  # regardless of torch's default device
        if kind.startswith("flip"):
            mirrored = (torch.rand(len(images)) < 0.5).to(images.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if kind.endswith("resized_crop"):
            return _random_resized_crop(images, size)
        if kind.endswith("crop"):
            larger = min(images.shape[-2:]) > size
            return _random_crop(images, size, 0 if larger else size // 8)
        return center_crop(images, size)


def center_crop(images: Tensor, size: int) -> Tensor:
    """Crops images to central squares: (..., height, width) -> (..., size, size)."""
    height, width = images.shape[-2:]
    if min(height, width) < size:
        raise ValueError(
            f"expected images of at least {size} x {size}; got {height} x {width}; enlarge them, "
            "or increase data.resize"
        )
    top, left = (height - size) // 2, (width - size) // 2
    return images[..., top : top + size, left : left + size]


def _random_crop(images: Tensor, size: int, padding: int) -> Tensor:
    images = F.pad(images, (padding,) * 4)  # black margin
    center_crop(images, size)  # rejects images that are too small
    count, _, height, width = images.shape
    places = torch.rand(2, count)
    choices = torch.tensor([height - size + 1, width - size + 1])[:, None]
    corners = (places * choices).long().minimum(choices - 1)  # rounding may give `choices`
    rows, columns = (corners[..., None] + torch.arange(size)).to(images.device)
    index = torch.arange(count, device=images.device)[:, None, None]
    # Advanced indices on both sides of a slice put the channels last
    return images[index, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _random_resized_crop(images: Tensor, size: int) -> Tensor:
    """Resizes random boxes to squares with values in [0, 1], as in GoogLeNet, FLT and MAE."""
    # The interpolation does not use a filter, so boxes should not be much larger than the result.
    if not images.is_floating_point():
        images = images.to(torch.get_default_dtype()) / 255
    boxes = _random_boxes(len(images), images.shape[-2:])
    top, left, height, width = boxes.to(images).unbind(dim=1)
    middle = (torch.arange(size).to(images) + 0.5) / size
    # centers of the new pixels in units of `grid_sample`, -1 to 1, each (batch, size)
    rows = 2 * (top[:, None] + height[:, None] * middle) / images.shape[-2] - 1
    columns = 2 * (left[:, None] + width[:, None] * middle) / images.shape[-1] - 1
    grid = torch.stack(
        (columns[:, None].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)), dim=-1
    )
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _random_boxes(count: int, size: tuple[int, int] | torch.Size) -> Tensor:
    """Returns random boxes (count, 4); the columns are top, left, height and width in pixels."""
    # The area, the logarithm of width over height, and the position are uniform. The first of
    # _TRIES boxes that fits is used, or else the whole image.
    full_height, full_width = size
    of_area, of_ratio = torch.rand(2, count, _TRIES)
    places = torch.rand(2, count)
    area = full_height * full_width * (_SCALE[0] + (_SCALE[1] - _SCALE[0]) * of_area)
    low, high = (math.log(end) for end in _RATIO)
    ratio = (low + (high - low) * of_ratio).exp()
    height, width = (area / ratio).sqrt(), (area * ratio).sqrt()  # (count, _TRIES)
    fits = (height <= full_height) & (width <= full_width)
    first = fits.long().argmax(dim=1, keepdim=True)
    whole = torch.tensor([float(full_height), float(full_width)])
    sides = torch.stack((height.gather(1, first)[:, 0], width.gather(1, first)[:, 0]), dim=1)
    sides = torch.where(fits.any(dim=1, keepdim=True), sides, whole)  # (count, 2)
    return torch.cat(((whole - sides) * places.T, sides), dim=1)
