"""Base class for labeled images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from molflt.data.images.augment import _center_crop

__all__ = ["LabeledImages"]


class LabeledImages(Dataset[tuple[Tensor, Tensor]], ABC):
    """Base class for data sets of labeled images of equal size.

    Items are (image, label): bytes (channels, height, width) and an int64.

    Attributes:
        path: source of the images.
        labels: index of the class of each image, (n,) int64.
        classes: names of the classes.
        channels: number of color channels.
        size: height and width in pixels.
        in_memory: True if reading all images is cheap.
    """

    in_memory: bool = False
    path: Path
    labels: Tensor
    classes: list[str]
    channels: int
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.image(index), self.labels[index]

    @abstractmethod
    def image(self, index: int) -> Tensor:
        """Returns an image, (channels, height, width) uint8."""

    @staticmethod
    def _fit(images: Tensor, size: int, name: str, box: bool = False) -> Tensor:
        """Resizes the shorter side of images to `size`, and crops the longer side to it.

        Args:
            images: (n, channels, height, width) uint8.
            size: side of the result in pixels.
            name: name of the images, for messages.
            box: set each pixel to the mean of the area that it covers, see `_box`; otherwise the
                filter is bilinear and twice as wide.
        """
        height, width = images.shape[-2:]
        if (height, width) == (size, size):
            return images
        if box:
            return _box(_center_crop(images, min(height, width)), size, name)
        scale = size / min(height, width)
        sides = [max(size, round(height * scale)), max(size, round(width * scale))]
        resized = F.interpolate(images, size=sides, mode="bilinear", antialias=True)
        return _center_crop(resized, size)

    def statistics(self, most: int = 2000) -> tuple[Tensor, Tensor]:
        """Returns the mean and standard deviation of each channel, for images scaled to [0, 1].

        Args:
            most: maximum number of images to read, evenly spaced.

        Returns:
            (channels,) float64 each; a deviation of 0 becomes 1.
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
