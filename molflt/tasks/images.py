"""The class of an image."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molflt.data.image_augment import Augmentation, augment
from molflt.tasks.base import Task

__all__ = ["ImageTask", "image_metrics", "image_sums"]

Batch = tuple[Tensor, Tensor]


class ImageTask(Task):
    """Cross-entropy of image classes.

    Batches are images, (batch, channels, height, width) uint8, and labels (batch,).

    Args:
        model: `molflt.image.ImageClassifier`, or what has its forward.
        label_smoothing: share of the target that is spread over all classes, in training.
        augment: what is done to training images; see `molflt.data.image_augment.augment`.
        optimization: arguments of `molflt.tasks.base.Task`.
    """

    unit = "images"
    sums_width = 4
    train_metrics = ("top1_percent", "top5_percent")
    val_metrics = ("top1_percent", "top5_percent", "cross_entropy")
    best = "top1_percent"
    best_is_largest = True

    def __init__(
        self,
        model: nn.Module,
        label_smoothing: float = 0.0,
        augment: Augmentation = "none",
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"task.label_smoothing must lie in [0, 1); got {label_smoothing}")
        self.label_smoothing = label_smoothing
        self.augment = augment

    def prepare(self, data: Any) -> None:
        """Stores mean and standard deviation of the training set's channels in the model."""
        set_normalizer: Any = self.model.set_normalizer
        set_normalizer(*data.statistics())

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        size: Any = self.model.image_size  # data.resize may have left more to cut from
        logits = self.model(augment(images, self.augment, size))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return loss, image_sums(logits.detach(), labels)

    def sums(self, batch: Batch) -> Tensor:
        """As :func:`image_sums`."""
        images, labels = batch
        return image_sums(self.model(images), labels)

    def summarize(self, sums: Tensor) -> dict[str, float]:
        """As :func:`image_metrics`."""
        return image_metrics(sums)

    def size(self, batch: Batch) -> int:
        """Images."""
        return len(batch[1])


def image_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Images with the right class first, among the first five, cross-entropy, count: (4,) float64.

    Args:
        logits: (images, classes).
        labels: (images,).
    """
    own = logits.gather(1, labels[:, None])
    # ties count against the model: a constant output is not right about every image
    rank = (logits >= own).sum(dim=1)
    nats = F.cross_entropy(logits.double(), labels, reduction="sum")
    parts = [(rank <= 1).sum(), (rank <= 5).sum(), nats, torch.tensor(len(labels))]
    return torch.stack([part.to(logits.device, torch.float64) for part in parts])


def image_metrics(sums: Tensor) -> dict[str, float]:
    """Percent of images with the right class first, among the first five; nats per image."""
    top1, top5, nats, count = sums.tolist()
    return {
        "top1_percent": 100 * top1 / count,
        "top5_percent": 100 * top5 / count,
        "cross_entropy": nats / count,
    }
