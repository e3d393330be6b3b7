"""Images for training and validation as Lightning wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from molflt.data.datamodule import BatchedData
from molflt.data.hub import dataset_loader
from molflt.data.image_augment import center_crop, channel_statistics
from molflt.data.images import IdxImages, LabeledImages, as_bytes, expect_size, open_images

__all__ = ["HubImages", "ImageData"]


class ImageData(BatchedData):
    """Labeled images of one size, in batches of (bytes (channels, size, size), label).

    Args:
        train: images to train on: a folder of a folder per class, an idx file of images (its labels
            beside it), or hf:NAME:SPLIT.
        val: images to validate on, likewise; null with `val_fraction`.
        train_labels: idx file of the labels, if it is not named as that of the images.
        val_labels: likewise.
        val_fraction: share of `train` to validate on instead, the last images of each class.
        image_size: side that images are fitted to, the central square, pixels; null keeps the size
            of the files, which must be squares, all of one size.
        resize: side of the squares that training images are left at, for `task.augment` to cut
            those of `image_size` from; validation images are cut from their centers. Null is
            `image_size`.
        class_names: names of the classes of idx files, in the order of labels.
        batch_size: images in a batch, per device.
        workers: processes that read ahead; 0 reads in the main process.

    Raises:
        ValueError: for options that do not go together or are outside their range.
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
        super().__init__(batch_size, workers)
        if (val is None) == (val_fraction is None):
            raise ValueError(
                "expected either data.val or data.val_fraction; got "
                f"{'neither' if val is None else 'both'}; give one"
            )
        if val_fraction is not None and not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction must be between 0 and 1; got {val_fraction}")
        if image_size is not None and image_size < 1:
            raise ValueError(f"data.image_size must be at least 1; got {image_size}")
        if resize is not None and (image_size is None or resize < image_size):
            raise ValueError(
                f"data.resize must be at least data.image_size={image_size}; got {resize}; give "
                "both, or neither"
            )
        self.sources = {"train": Path(train), "val": Path(train if val is None else val)}
        self.labels = {"train": train_labels, "val": val_labels if val else train_labels}
        self.val_fraction = val_fraction
        self.image_size = image_size
        self.resize = resize or image_size
        self.class_names = class_names
        self.classes: list[str] = []
        self.channels = 0

    def setup(self, stage: str = "fit") -> None:
        """Opens both sets, once.

        Raises:
            FileNotFoundError: naming what is not there.
            ValueError: naming the file that is damaged, or does not go with the others.
        """
        if self.datasets:
            return
        images = {"train": self._open("train", self.class_names)}
        train = images["train"]
        self.classes, self.channels = train.classes, train.channels
        split = self.val_fraction is not None
        images["val"] = train if split else self._open("val", self.classes)
        for use, dataset in images.items():
            self._expect_alike(use, dataset, train)
        indices: dict[str, Tensor | None] = {"train": None, "val": None}
        if self.val_fraction is not None:
            held = held_out(train.labels, self.val_fraction)
            if not bool(held.any()) or bool(held.all()):
                raise ValueError(
                    f"{train.path}: data.val_fraction={self.val_fraction} of {len(train)} images "
                    "leaves none to train or to validate on; change it"
                )
            indices = {"train": (~held).nonzero()[:, 0], "val": held.nonzero()[:, 0]}
        side = self.image_size or train.size[0]
        self.image_size = side
        self.datasets = {
            use: Squares(dataset, indices[use], self.resize or side if use == "train" else side)
            for use, dataset in images.items()
        }

    def sizes(self) -> dict[str, Any]:
        """What the data decide about the model: classes, channels and image_size."""
        self.setup()
        return {
            "classes": len(self.classes),
            "channels": self.channels,
            "image_size": self.image_size,
        }

    def files(self) -> dict[str, bytes]:
        """classes.json: the names of the classes, in the order of the logits."""
        self.setup()
        return {"classes.json": (json.dumps(self.classes, ensure_ascii=False) + "\n").encode()}

    def describe(self) -> list[str]:
        """What the training and the validation set hold, one phrase each."""
        return [
            f"{use} {len(dataset):,} images ({self.sources[use].name})"
            for use, dataset in self.datasets.items()
        ]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation per channel of the training images, scaled to [0, 1].

        (channels,) float64 each. Of all images in memory; of at most 2000, evenly spaced, that must
        be read from files.
        """
        self.setup()
        train = self.datasets["train"]
        most = len(train) if isinstance(train.images, IdxImages) else 2000
        return channel_statistics(train, most)

    def _open(self, use: str, classes: list[str] | None) -> LabeledImages:
        source = self.sources[use]
        if str(source).startswith("hf:"):
            return HubImages(str(source), self.resize, classes)
        return open_images(source, self.labels[use], self.resize, classes)

    def _expect_alike(self, use: str, images: LabeledImages, train: LabeledImages) -> None:
        """Raises ValueError unless images are squares of the training images' size and colors."""
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
                "data.image_size, or use files of one kind"
            )


class HubImages(LabeledImages):
    """Images of a Hugging Face data set, decoded when they are asked for, in colors.

    Args:
        source: "hf:NAME", "hf:NAME:SPLIT"; the split is "train" if none is named. The images are in
            its column "image" or "img", and classes in "label", or "fine_label".
        size: as for `ImageFolder`.
        classes: names of the classes, for a check.

    Raises:
        ModuleNotFoundError: the package `datasets` is not installed.
        ValueError: the columns are not there, or the classes differ.
    """

    def __init__(
        self, source: str, size: int | None = None, classes: Sequence[str] | None = None
    ) -> None:
        load = dataset_loader(source)
        name, _, split = source.removeprefix("hf:").partition(":")
        self.path = Path(source)
        self.rows: Any = load(name, split=split or "train")
        columns = self.rows.features
        image = [column for column in ("image", "img") if column in columns]
        label = [column for column in ("label", "fine_label") if column in columns]
        if not image or not label or not hasattr(columns[label[0]], "names"):
            raise ValueError(
                f"{source}: expected columns image and label (classes); got {', '.join(columns)}; "
                "use another set, or write it as a folder of classes"
            )
        self.column = image[0]
        self.labels = torch.tensor(list(self.rows[label[0]]), dtype=torch.int64)
        self.classes = list(columns[label[0]].names)
        if classes is not None and list(classes) != self.classes:
            raise ValueError(
                f"{source}: expected the {len(classes)} classes trained on; got "
                f"{len(self.classes)} others; validate on the same classes"
            )
        self.channels = 3
        self.fitted = size
        first = self._decoded(0)
        self.size = (first.shape[1], first.shape[2])

    def _decoded(self, index: int) -> Tensor:
        return as_bytes(self.rows[index][self.column], self.fitted, f"{self.path}, row {index}")

    def image(self, index: int) -> Tensor:
        return expect_size(self._decoded(index), self.size, f"{self.path}, row {index}")


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Some of the images, cut to their central squares.

    Args:
        images: all of them.
        index: (n,), which ones; all if None.
        side: of the squares, pixels.
    """

    def __init__(self, images: LabeledImages, index: Tensor | None, side: int) -> None:
        self.images = images
        self.index = index
        self.path = images.path
        self.labels = images.labels if index is None else images.labels[index]
        self.side = side

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[i if self.index is None else int(self.index[i])]
        return center_crop(image, self.side), label


def held_out(labels: Tensor, fraction: float) -> Tensor:
    """Marks the last images of each class, rounded down: (n,) labels -> (n,) bool."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        held[members[len(members) - int(fraction * len(members)) :]] = True
    return held
