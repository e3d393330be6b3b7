"""The next token of a text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from molflt.tasks.base import Task

__all__ = ["LanguageTask", "language_metrics"]

Batch = tuple[Tensor, Tensor]


class LanguageTask(Task):
    """Mean negative log-likelihood of the next token, in nats.

    Batches are pairs of input and target tokens, (batch, length) each; targets below 0 do not
    count. Perplexity is exp of the mean over all tokens of a split, whatever the batches.
    """

    unit = "tokens"
    sums_width = 2
    train_metrics = ("perplexity",)
    val_metrics = ("perplexity", "bits_per_token")
    best = "perplexity"

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sums = self._sums(batch)
        return sums[0] / sums[1].clamp(min=1), sums.detach().double()

    def sums(self, batch: Batch) -> Tensor:
        """Negative log-likelihood in nats, and number of tokens."""
        return self._sums(batch).double()

    def summarize(self, sums: Tensor) -> dict[str, float]:
        """As :func:`language_metrics`."""
        return language_metrics(float(sums[0] / sums[1]))

    def size(self, batch: Batch) -> int:
        """Tokens."""
        return batch[0].numel()

    def _sums(self, batch: Batch) -> Tensor:
        log_likelihood: Any = self.model.log_likelihood
        score = log_likelihood(*batch)
        return torch.stack([-score.sum(), (batch[1] >= 0).sum().to(score.dtype)])


def language_metrics(nats: float) -> dict[str, float]:
    """Perplexity and bits per token, from the mean negative log-likelihood in nats."""
    # a diverging run has a perplexity beyond the range of numbers
    perplexity = math.exp(nats) if nats < 700 else math.inf
    return {"perplexity": perplexity, "bits_per_token": nats / math.log(2)}
