"""Batches of images for training and validation."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from molflt.data.batches import BatchedData, held_out
from molflt.data.images.files import MOST_DECODED, LabeledImages, open_images


class ImageData(BatchedData[LabeledImages]):
    """Batches of labeled uint8 images; each image has the shape (channels, size, size).

    Args:
        train: training images: a folder with one subfolder per class, or an idx file of images
            (with the file of labels next to it).
        val: validation images, in any form that `train` accepts; null with `val_fraction`.
        train_labels: idx file of the training labels, if its name cannot be derived from `train`.
        val_labels: idx file of the validation labels, if its name cannot be derived from `val`.
        val_fraction: share of `train` to validate on, taken from the end of each class.
        image_size: side length in pixels; images are resized to central squares of this size. Null
            keeps the size of the images, which must then be squares of equal size.
        resize: side length of the training images before `task.augment` cuts them to `image_size`;
            validation images are cropped to their central squares. Null means `image_size`.
        class_names: names of the classes in idx files, in the order of the labels.
        batch_size: number of images in a batch, per device.
        workers: number of processes that prefetch data; 0 reads in the main process.
    """

    items = "images"

    def __init__(
        self,
        train: Path,
        val: Path | None = None,
        train_labels: Path | None = None,
        val_labels: Path | None = None,
        val_fraction: float | None = None,
        image_size: int | None = None,
        resize: int | None = None,
        class_names: list[str] | None = None,
        batch_size: int = 128,
        workers: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, {"train": train, "val": val or train})
        if (val is None) == (val_fraction is None):
            raise ValueError(
                "expected either data.val or data.val_fraction; got "
                f"{'neither' if val is None else 'both'}; set one of them"
            )
        if val_labels is not None and val is None:
            raise ValueError(
                f"data.val_labels has no effect with data.val_fraction={val_fraction}, which takes "
                "images from data.train; omit one of them"
            )
        self.labels = {"train": train_labels, "val": val_labels if val else train_labels}
        self.val_fraction = val_fraction
        self.image_size = image_size
        self.resize = resize or image_size
        self.class_names = class_names
        self.classes: list[str] = []
        self.channels = 0

    def setup(self, stage: str = "fit") -> None:
        if self.datasets:
            return
        train = self._open("train", self.class_names)
        self.classes, self.channels = train.classes, train.channels
        val = train if self.val_fraction is not None else self._open("val", self.classes)
        self._expect_alike("train", train, train)
        self._expect_alike("val", val, train)
        of_train, of_val = torch.arange(len(train)), torch.arange(len(val))
        if self.val_fraction is not None:
            held = held_out(train.labels, self.val_fraction, train.path, "images")
            of_train, of_val = (~held).nonzero()[:, 0], held.nonzero()[:, 0]
        self.image_size = self.image_size or train.size[0]
        self.datasets = {
            "train": train.squares(of_train, self.resize or self.image_size),
            "val": val.squares(of_val, self.image_size),
        }

    def sizes(self) -> dict[str, int]:
        self.setup()
        return {
            "classes": len(self.classes),
            "channels": self.channels,
            "image_size": self.datasets["val"].size[0],
        }

    def files(self) -> dict[str, bytes]:
        """Returns the content of classes.json: the class names in the order of the logits."""
        self.setup()
        return {"classes.json": (json.dumps(self.classes, ensure_ascii=False) + "\n").encode()}

    def _described(self, use: str) -> str:
        return f"{super()._described(use)} ({Path(self.sources[use]).name})"

    def _digest(self, use: str, most: int | None = None) -> str:
        """Returns a digest of all labels and images; at most `MOST_DECODED` are decoded."""
        images = self.datasets[use]
        labels = hashlib.sha256(images.labels.numpy().tobytes()).hexdigest()
        return labels[:16] + super()._digest(use, most if images.in_memory else MOST_DECODED)[:48]

    def for_evaluation(self, use: str) -> LabeledImages:
        """Returns the images of a data set, cropped to central squares as in validation."""
        self.setup()
        images = self.datasets[use]
        return images.squares(torch.arange(len(images)), self.datasets["val"].size[0])

    def _open(self, use: str, classes: list[str] | None) -> LabeledImages:
        return open_images(Path(self.sources[use]), self.labels[use], self.resize, classes)

    def _expect_alike(self, use: str, images: LabeledImages, train: LabeledImages) -> None:
        (height, width), path = images.size, images.path
        if height != width:
            raise ValueError(
                f"{path}: expected square images; got {height} x {width} pixels; set "
                "data.image_size to resize them"
            )
        if images.size != train.size or images.channels != train.channels:
            raise ValueError(
                f"{path}: expected {use} images of {train.size[0]} pixels and {train.channels} "
                f"channels, as in training; got {height} and {images.channels}; set "
                "data.image_size, or use files of the same kind"
            )


class PixelData(ImageData):
    """Batches of images without classes, for models that predict the bytes of images.

    Args:
        train: training images: a folder with or without one subfolder per class, or an idx file of
            images (with the file of labels next to it).
        image_size: side length in pixels; images are downscaled to central squares of this size, in
            which each pixel is the mean of the area that it covers. Null keeps the size of the
            images, which must then be squares of equal size.
        batch_size: number of images in a batch, per device.
        images: further arguments of `ImageData`.
    """

    def __init__(
        self, train: Path, image_size: int | None = None, batch_size: int = 64, **images: Any
    ) -> None:
        super().__init__(
            train,
            image_size=image_size,
            batch_size=batch_size,
            resize=None,
            class_names=None,
            **images,
        )

    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in super().sizes().items() if name != "classes"}

    def files(self) -> dict[str, bytes]:
        return {}

    def _open(self, use: str, classes: list[str] | None) -> LabeledImages:
        source, labels = Path(self.sources[use]), self.labels[use]
        return open_images(source, labels, self.resize, box=True, flat=True)
