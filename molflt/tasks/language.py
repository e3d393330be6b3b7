"""Language modeling and image generation: prediction of the next token or byte."""

import math
from typing import ClassVar, NamedTuple

from torch import Tensor

from molflt.metrics import Metric
from molflt.sequence.language_model import LanguageModel, PixelModel
from molflt.tasks.base import Task

_Batch = tuple[Tensor, Tensor]


def perplexity(nats: float) -> float:
    """Returns exp(nats), or infinity if the result overflows, as it does in diverging runs."""
    return math.exp(nats) if nats < 700 else math.inf


class _TokenSums(NamedTuple):
    nats: Tensor  # negative log-likelihood
    tokens: Tensor

    def metrics(self) -> dict[str, float]:
        nats = float(self.nats / self.tokens)
        return {"perplexity": perplexity(nats), "bits_per_token": nats / math.log(2)}


class LanguageTask(Task[_Batch, object]):
    """Mean negative log-likelihood of the next token, in nats.

    Batches are pairs of input and target tokens, each of shape (batch, length); targets below 0
    are ignored. Perplexity is the exponential of the mean over all tokens of a split.
    """

    model: LanguageModel
    unit = "tokens"
    sums: ClassVar[type[_TokenSums]] = _TokenSums
    metrics: ClassVar = {
        "perplexity": Metric("perplexity", scale="log", digits=1),
        "bits_per_token": Metric("bits per token", measured_in=("val",)),
    }
    best = "perplexity"

    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _TokenSums]:
        nats, tokens = self._sums(batch)
        return nats / tokens.clamp(min=1), self.sums(nats.detach(), tokens)

    def size(self, batch: _Batch) -> int:
        return batch[0].numel()

    def _sums(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        score = self.model.log_likelihood(*batch)
        return -score.sum(), (batch[1] >= 0).sum().to(score.dtype)


class PixelTask(LanguageTask):
    """Mean negative log-likelihood of the next byte of an image, in nats.

    Batches consist of uint8 images (batch, channels, height, width) and of labels, which are
    ignored. Bits per dimension are the nats of a split divided by ln 2 and by its number of bytes.
    """

    model: PixelModel
    metrics: ClassVar = {"bits_per_dim": Metric("bits/dim")}
    best = "bits_per_dim"

    def _sums(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        score = self.model.image_log_likelihood(batch[0])
        return -score.sum(), score.new_tensor(score.numel())

    def summarize(self, totals: Tensor) -> dict[str, float]:
        """Computes bits per dimension from `totals`, sums over all batches, of shape (fields,)."""
        return {"bits_per_dim": super().summarize(totals)["bits_per_token"]}
