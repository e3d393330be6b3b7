"""Images whose bytes are to be predicted: classes have no part in it, and scaling is a mean."""

from __future__ import annotations

from pathlib import Path

from molflt.data.images.base import LabeledImages
from molflt.data.images.datamodule import ImageData
from molflt.data.images.files import open_images

__all__ = ["PixelData"]


class PixelData(ImageData):
    """Images of one size, in batches as `ImageData` makes them.

    Args:
        train: images to train on: a folder of images, or of a folder per class, an idx file of
            images (its labels next to it), or hf:OWNER/NAME:SPLIT.
        val: images to validate on, likewise; null with `val_fraction`.
        train_labels: idx file of the labels, if it is not named as that of the images.
        val_labels: likewise.
        val_fraction: share of `train` to validate on instead, the last images of each class.
        image_size: side that the central squares of images are scaled down to, each pixel the mean
            of the area that it covers, pixels; null keeps the size of the files, which must be
            squares, all of one size.
        batch_size: images in a batch, per device.
        workers: processes that read ahead; 0 reads in the main process.
    """

    def __init__(
        self,
        train: Path,
        val: Path | None = None,
        train_labels: Path | None = None,
        val_labels: Path | None = None,
        val_fraction: float | None = None,
        image_size: int | None = None,
        batch_size: int = 64,
        workers: int = 0,
    ) -> None:
        super().__init__(
            *(train, val, train_labels, val_labels, val_fraction, image_size),
            batch_size=batch_size,
            workers=workers,
        )

    def sizes(self) -> dict[str, int]:
        """What the data decide about the model: channels and image_size."""
        return {name: size for name, size in super().sizes().items() if name != "classes"}

    def files(self) -> dict[str, bytes]:
        """None: bytes need no names."""
        return {}

    def _open(self, use: str, classes: list[str] | None) -> LabeledImages:
        return open_images(self.sources[use], self.labels[use], self.resize, box=True, flat=True)
