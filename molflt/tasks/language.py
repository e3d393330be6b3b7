"""Language modeling: the next token of a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from molflt.metrics import Metric
from molflt.tasks.base import Task

if TYPE_CHECKING:
    from molflt.sequence.language_model import LanguageModel

__all__ = ["LanguageTask", "TokenSums"]

_Batch = tuple[Tensor, Tensor]


class TokenSums(NamedTuple):
    """Sums over tokens."""

    nats: Tensor
    """negative log-likelihood"""
    tokens: Tensor

    def metrics(self) -> dict[str, float]:
        nats = float(self.nats / self.tokens)
        # exp overflows for diverging runs
        perplexity = math.exp(nats) if nats < 700 else math.inf
        return {"perplexity": perplexity, "bits_per_token": nats / math.log(2)}


class LanguageTask(Task[_Batch, object]):
    """Mean negative log-likelihood of the next token, in nats.

    Batches are pairs of input and target tokens, (batch, length) each; targets below 0 are
    ignored. Perplexity is the exponential of the mean over all tokens of a split.
    """

    model: LanguageModel
    unit = "tokens"
    sums: ClassVar[type[TokenSums]] = TokenSums
    metrics: ClassVar = {
        "perplexity": Metric("perplexity", scale="log", digits=1),
        "bits_per_token": Metric("bits per token", measured_in=("val",)),
    }
    best = "perplexity"

    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, TokenSums]:
        nats, tokens = self._sums(batch)
        return nats / tokens.clamp(min=1), self.sums(nats.detach().double(), tokens.double())

    def judge(self, batch: _Batch) -> TokenSums:
        nats, tokens = self._sums(batch)
        return self.sums(nats.double(), tokens.double())

    def size(self, batch: _Batch) -> int:
        """Returns the number of tokens."""
        return batch[0].numel()

    def _sums(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        score = self.model.log_likelihood(*batch)
        return -score.sum(), (batch[1] >= 0).sum().to(score.dtype)
