"""Translation: prediction of the next target token."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from molflt.metrics import Metric
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.tasks.base import Task
from molflt.tasks.language import perplexity

_Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class _TargetSums(NamedTuple):
    nats: Tensor  # negative log-likelihood
    smoothed: Tensor  # loss with smoothed labels, which training minimizes
    tokens: Tensor

    def metrics(self) -> dict[str, float]:
        nats, smoothed = float(self.nats / self.tokens), float(self.smoothed / self.tokens)
        return {"perplexity": perplexity(nats), "mean_loss": smoothed}


class TranslationTask(Task[_Batch, object]):
    """Cross-entropy of the next target token, given the source and the previous target tokens.

    Batches consist of source ids and their mask, each (batch, n), and of target input ids and
    labels, each (batch, t). Labels are -1 for padding. Perplexity is computed without label
    smoothing. BLEU is computed by `molflt evaluate`.

    Args:
        model: `molflt.sequence.EncoderDecoder`.
        label_smoothing: fraction of the target that is spread evenly over all ids.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: EncoderDecoder
    unit = "tokens"
    sums: ClassVar[type[_TargetSums]] = _TargetSums
    metrics: ClassVar = {
        "perplexity": Metric("perplexity", scale="log", digits=2),
        "mean_loss": Metric("loss", "nats", measured_in=("val",)),
    }
    best = "perplexity"

    def __init__(self, model: nn.Module, label_smoothing: float = 0.1, **optimization: Any) -> None:
        super().__init__(model, **optimization)
        self.label_smoothing = label_smoothing

    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _TargetSums]:
        source, source_mask, inputs, targets = batch
        hidden = self.model(source, inputs, source_mask)
        score, smoothed = self.model.log_likelihood(hidden, targets, self.label_smoothing)
        tokens = torch.tensor(len(score))
        sums = _TargetSums(-score.detach().sum(), -smoothed.detach().sum(), tokens)
        return -smoothed.mean(), sums

    def size(self, batch: _Batch) -> int:
        return int((batch[3] >= 0).sum())
