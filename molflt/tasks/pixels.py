"""Image generation: the next byte of an image."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from molflt.metrics import Metric
from molflt.tasks.language import LanguageTask, TokenSums

if TYPE_CHECKING:
    from molflt.sequence.pixels import PixelModel

__all__ = ["PixelTask"]


class _PixelSums(TokenSums):
    # repeated because subclasses of a NamedTuple do not inherit annotations, which training counts
    nats: Tensor
    tokens: Tensor

    def metrics(self) -> dict[str, float]:
        return {"bits_per_dim": float(self.nats / self.tokens) / math.log(2)}


class PixelTask(LanguageTask):
    """Mean negative log-likelihood of the next byte of an image, in nats.

    Batches are images, (batch, channels, height, width) uint8, and labels, which are ignored. Bits
    per dimension are nats / ln 2 / bytes, over all bytes of a split.
    """

    model: PixelModel
    sums: ClassVar[type[_PixelSums]] = _PixelSums
    metrics: ClassVar = {"bits_per_dim": Metric("bits/dim")}
    best = "bits_per_dim"

    def _sums(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        score = self.model.image_log_likelihood(batch[0])
        return -score.sum(), score.new_tensor(score.numel())
