"""Image classification."""

from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molflt.data.images.augment import Augmentation, augment
from molflt.data.images.datamodule import ImageData
from molflt.image.classifier import ImageClassifier
from molflt.metrics import Metric
from molflt.tasks.base import Task

_Batch = tuple[Tensor, Tensor]


class _ImageSums(NamedTuple):
    top1: Tensor  # number of images whose label has the highest score
    top5: Tensor  # number of images whose label has one of the five highest scores
    nats: Tensor  # sum of the cross-entropy
    images: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Self:
        """Computes the sums from logits (images, classes) and labels (images,)."""
        of_label = logits.gather(1, labels[:, None])
        # ties and NaN count as errors; otherwise a constant output would always be correct
        rank = (~(logits < of_label)).sum(dim=1)
        nats = F.cross_entropy(logits.double(), labels, reduction="sum")
        return cls((rank <= 1).sum(), (rank <= 5).sum(), nats, torch.tensor(len(labels)))

    def metrics(self) -> dict[str, float]:
        top1, top5, nats, images = (float(part) for part in self)
        return {
            "top1_percent": 100 * top1 / images,
            "top5_percent": 100 * top5 / images,
            "cross_entropy": nats / images,
        }


class ImageTask(Task[_Batch, ImageData]):
    """Cross-entropy of image classes.

    Batches consist of uint8 images (batch, channels, height, width) and labels (batch,).

    Args:
        model: `molflt.image.ImageClassifier`, or a model with the same `forward`.
        label_smoothing: fraction of the target that is spread evenly over all classes in training.
        augment: augmentation of training images; see `molflt.data.images.augment.augment`.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: ImageClassifier
    unit = "images"
    sums: ClassVar[type[_ImageSums]] = _ImageSums
    metrics: ClassVar = {
        "top1_percent": Metric("top-1", "%", digits=2, largest_is_best=True),
        "top5_percent": Metric("top-5", "%", digits=2, largest_is_best=True),
        "cross_entropy": Metric("cross-entropy", "nats", "log", measured_in=("val",)),
    }
    best = "top1_percent"

    def __init__(
        self,
        model: nn.Module,
        label_smoothing: float = 0.0,
        augment: Augmentation = "none",
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        self.label_smoothing = label_smoothing
        self.augment = augment

    def prepare(self, data: ImageData) -> None:
        """Stores the channel means and standard deviations of the training set in the model."""
        self.model.set_normalizer(*data.datasets["train"].statistics())

    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _ImageSums]:
        images, labels = batch
        size = self.model.image_size  # images may be larger, to allow random crops
        logits = self.model(augment(images, self.augment, size))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return loss, _ImageSums.of(logits.detach(), labels)

    def validation_sums(self, batch: _Batch) -> _ImageSums:
        images, labels = batch
        return _ImageSums.of(self.model(images), labels)
