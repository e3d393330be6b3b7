"""What all labeled images have in common: map-style data sets of bytes and classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from molflt.data.images.augment import _center_crop

__all__ = ["LabeledImages"]

_NARROWEST = 50  # longer side over the shorter one; resized, the longer grows with it


class LabeledImages(Dataset[tuple[Tensor, Tensor]], ABC):
    """Base of data sets of labeled images of one size.

    Items are (image, label): bytes (channels, height, width) and an int64.

    Attributes:
        path: where they come from.
        labels: (n,) int64, index of the class of each image.
        classes: names of the classes.
        channels: color channels.
        size: height and width, pixels.
        in_memory: whether reading all of them costs little.
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
        """One image, (channels, height, width) uint8."""

    @staticmethod
    def _fit(images: Tensor, size: int, name: str, box: bool = False) -> Tensor:
        """Images resized so that the shorter side is `size`, and the central square of that.

        Args:
            images: (n, channels, height, width) uint8.
            size: pixels.
            name: of the images, for messages.
            box: whether a pixel is the mean of what it covers, see `_box`; else the filter is
                bilinear, twice as wide.

        Returns:
            (n, channels, size, size) uint8.
        """
        height, width = images.shape[-2:]
        if (height, width) == (size, size):
            return images
        if max(height, width) > _NARROWEST * min(height, width):
            raise ValueError(
                f"{name}: expected sides within a factor of {_NARROWEST}; got {height} x {width} "
                "pixels; remove it, or crop it"
            )
        if box:
            return _box(_center_crop(images, min(height, width)), size, name)
        scale = size / min(height, width)
        sides = [max(size, round(height * scale)), max(size, round(width * scale))]
        resized = F.interpolate(images, size=sides, mode="bilinear", antialias=True)
        return _center_crop(resized, size)

    def statistics(self, most: int = 2000) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, of images scaled to [0, 1].

        Args:
            most: images to read; if there are more, evenly spaced ones.

        Returns:
            (channels,) float64 each; a deviation of 0 is given as 1.
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
    """Squares scaled down: each pixel is the mean of the area that it covers, rounded.

    Of half the side it is the mean of 2 x 2 pixels.

    Args:
        images: (n, channels, side, side) uint8.
        size: of the result.
        name: of the images, for messages.
    """
    side = images.shape[-1]
    if side < size:
        raise ValueError(
            f"{name}: expected at least {size} pixels on the shorter side; got {side}; set a "
            "smaller data.image_size, or leave the image out"
        )
    ends = torch.arange(size + 1, dtype=torch.float64)[:, None] * (side / size)
    pixel = torch.arange(side, dtype=torch.float64)
    covered = torch.minimum(ends[1:], pixel + 1) - torch.maximum(ends[:-1], pixel)
    share = (covered.clamp(min=0) * (size / side)).float()  # [new pixel, old pixel]
    return (share @ images.float() @ share.T).round().to(torch.uint8)
