"""Classification and scoring of sentences and sentence pairs."""

import math
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molflt.metrics import Metric
from molflt.sequence.encoder import SequenceClassifier
from molflt.tasks.base import Task

_Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class _LabelSums(NamedTuple):
    items: Tensor
    right: Tensor  # number of correctly classified items
    loss: Tensor
    predicted: Tensor  # sum of predicted scores or classes
    label: Tensor
    predicted_square: Tensor
    label_square: Tensor
    product: Tensor

    @classmethod
    def of(cls, predicted: Tensor, label: Tensor, loss: Tensor) -> Self:
        """Computes the sums from predictions (items,), labels (items,) and the summed loss."""
        predicted, label = predicted.detach().double(), label.double()
        parts = (predicted, label, predicted.square(), label.square(), predicted * label)
        sums = (part.sum() for part in parts)
        return cls(torch.tensor(len(label)), (predicted == label).sum(), loss.detach(), *sums)

    def metrics(self) -> dict[str, float]:
        n, right, loss, x, y, xx, yy, xy = (float(part) for part in self)
        variances = (n * xx - x * x) * (n * yy - y * y)  # product, each times n^2
        # 0 if all predictions are equal, as in scikit-learn
        correlation = (n * xy - x * y) / math.sqrt(variances) if variances > 1e-12 * n * n else 0.0
        return {
            "accuracy_percent": 100 * right / n,
            "correlation_percent": 100 * correlation,
            "mean_loss": loss / n,
        }


class SentenceTask(Task[_Batch, object]):
    """Cross-entropy of classes, or squared error of scores.

    Batches consist of ids, types and a mask, each (batch, length), and labels (batch,); the mask is
    False for padding. The correlation is the Pearson correlation; for two classes, it equals the
    Matthews correlation.

    Args:
        model: `molflt.sequence.SequenceClassifier`.
        measure: metric that selects the best weights: accuracy or correlation. null selects
            accuracy for classes and correlation for scores. CoLA uses the correlation.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: SequenceClassifier
    unit = "sentences"
    sums: ClassVar[type[_LabelSums]] = _LabelSums
    metrics: ClassVar = {
        "score_percent": Metric("measure", "%", digits=2, largest_is_best=True),
        "accuracy_percent": Metric("accuracy", "%", digits=2, largest_is_best=True),
        "correlation_percent": Metric("correlation", "%", digits=2, largest_is_best=True),
        "mean_loss": Metric("loss", measured_in=("val",)),
    }
    best = "score_percent"

    def __init__(
        self,
        model: nn.Module,
        measure: Literal["accuracy", "correlation"] | None = None,
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        predicts_scores = self.model.classes == 1
        if predicts_scores and measure == "accuracy":
            raise ValueError(
                "task.measure='accuracy' is for classes, but this task predicts scores; remove it"
            )
        self.measure = measure or ("correlation" if predicts_scores else "accuracy")
        score = self.metrics[self.best]._replace(label=self.measure)
        self.metrics = {**self.metrics, self.best: score}  # type: ignore[misc]  # of this task

    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _LabelSums]:
        tokens, types, key_mask, label = batch
        logits = self.model(tokens, types, key_mask).float()
        if self.model.classes == 1:
            predicted = logits[:, 0]
            loss = F.mse_loss(predicted, label.to(predicted.dtype), reduction="sum")
        else:
            unknown = logits.isnan().any(dim=1)  # argmax would select NaN
            predicted = logits.argmax(dim=1).float().masked_fill(unknown, math.nan)
            loss = F.cross_entropy(logits, label.long(), reduction="sum")
        return loss / len(label), _LabelSums.of(predicted, label, loss)

    def summarize(self, totals: Tensor) -> dict[str, float]:
        """Computes metrics from `totals`, sums of shape (fields,); `measure` comes first."""
        metrics = super().summarize(totals)
        score = metrics[f"{self.measure}_percent"]
        if self.model.classes == 1:
            del metrics["accuracy_percent"]
        return {"score_percent": score, **metrics}
