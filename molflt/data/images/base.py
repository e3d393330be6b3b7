"""Labeled images of equal size, and their conversion to squares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from molflt.data.images.augment import center_crop

__all__ = ["LabeledImages", "fitted"]


class LabeledImages(Dataset[tuple[Tensor, Tensor]]):
    """Labeled images of equal size.

    Items are (image, label): bytes (channels, height, width) and an int64. `size` is (height,
    width).

    Args:
        path: source of the images.
        labels: index of the class of each image, (n,) int64.
        classes: names of the classes.
        read: function that returns the image with an index.
        names: names of the images, for messages; by default their indices.
        in_memory: True if reading all images is cheap.
    """

    def __init__(
        self,
        path: Path,
        labels: Tensor,
        classes: list[str],
        read: Callable[[int], Tensor],
        names: Sequence[str] | None = None,
        in_memory: bool = False,
    ) -> None:
        self.path, self.labels, self.classes = path, labels, classes
        self.read, self.names, self.in_memory = read, names, in_memory
        self.channels, *sides = read(0).shape
        self.size = (sides[0], sides[1])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.image(index), self.labels[index]

    def image(self, index: int) -> Tensor:
        """Returns an image, (channels, height, width) uint8."""
        image = self.read(index)
        if tuple(image.shape[1:]) != self.size:
            name = f"{self.path}, image {index}" if self.names is None else self.names[index]
            raise ValueError(
                f"{name}: expected {self.size[0]} x {self.size[1]} pixels, as in the first image; "
                f"got {image.shape[1]} x {image.shape[2]}; set data.image_size to resize all"
            )
        return image

    def statistics(self, most: int = 2000) -> tuple[Tensor, Tensor]:
        """Returns the mean and standard deviation of each channel, for images scaled to [0, 1].

        At most `most` images are read, evenly spaced. Both tensors are (channels,) float64; a
        deviation of 0 becomes 1.
        """
        count = min(len(self), most)
        levels = torch.zeros(self.channels, 256, dtype=torch.int64)
        for i in range(count):
            for total, channel in zip(levels, self.image(i * len(self) // count), strict=True):
                total += torch.bincount(channel.flatten(), minlength=256)
        share = levels.double()
        share = share / share.sum(dim=1, keepdim=True)
        level = torch.arange(256, dtype=torch.float64) / 255
        mean = share @ level
        std = (share * (level - mean[:, None]).square()).sum(dim=1).sqrt()
        return mean, torch.where(std > 0, std, 1.0)


def fitted(images: Tensor, size: int, name: str, box: bool = False) -> Tensor:
    """Resizes images (n, channels, height, width) and crops their longer sides to squares.

    With `box`, each pixel is the mean of the area that it covers, and images must be at least as
    large as the result; otherwise the filter is bilinear and twice as wide.
    """
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
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
