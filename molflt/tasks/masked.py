"""Masked language modeling: hidden tokens, and optionally whether two parts belong together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molflt.metrics import Metric
from molflt.tasks.base import Task
from molflt.tasks.masking import Draws, hide, swap_parts

if TYPE_CHECKING:
    from molflt.data.text.tokenized import PieceBlocks, TokenizedText
    from molflt.sequence.masked import MaskedLanguageModel

__all__ = ["MaskedTask"]

_Batch = tuple[Tensor, Tensor, Tensor]


class _GapSums(NamedTuple):
    nats: Tensor
    """negative log-likelihood of hidden tokens"""
    right: Tensor
    """hidden tokens with the highest score"""
    gaps: Tensor
    pairs_right: Tensor
    """correctly classified pairs"""
    pairs: Tensor

    def metrics(self) -> dict[str, float]:
        nats, right, gaps, pairs_right, pairs = (float(part) for part in self)
        mean = nats / max(1.0, gaps)
        found = {
            "perplexity": math.exp(mean) if mean < 700 else math.inf,
            "accuracy_percent": 100 * right / max(1.0, gaps),
        }
        return found | ({"next_sentence_percent": 100 * pairs_right / pairs} if pairs else {})


class MaskedTask(Task[_Batch, "TokenizedText"]):
    """Mean negative log-likelihood of hidden tokens, in nats, and next-sentence loss.

    BERT (arXiv:1810.04805), section 3.1. Batches are ids, types and a mask of existing tokens,
    (batch, length) each. Hidden tokens are drawn at every step in training, and depend only on the
    sequence in validation.

    Args:
        model: `molflt.sequence.MaskedLanguageModel`.
        mask_rate: share of tokens to predict.
        mask_share: share of these replaced by the mask.
        random_share: share of these replaced by a random token; the rest is unchanged.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: MaskedLanguageModel
    unit = "tokens"
    sums: ClassVar[type[_GapSums]] = _GapSums
    metrics: ClassVar = {
        "perplexity": Metric("perplexity in gaps", scale="log", digits=2),
        "accuracy_percent": Metric("right in gaps", "%", digits=2, largest_is_best=True),
        "next_sentence_percent": Metric("right of pairs", "%", digits=2, largest_is_best=True),
    }
    best = "perplexity"

    def __init__(
        self,
        model: nn.Module,
        mask_rate: float = 0.15,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        **optimization: Any,
    ) -> None:
        super().__init__(model, **optimization)
        if not 0 < mask_rate < 1:
            raise ValueError(f"task.mask_rate must lie in (0, 1); got {mask_rate}")
        if min(mask_share, random_share) < 0 or mask_share + random_share > 1:
            raise ValueError(
                "task.mask_share and task.random_share must be at least 0 and at most 1 together; "
                f"got {mask_share} and {random_share}"
            )
        self.shares = {"rate": mask_rate, "mask_share": mask_share, "random_share": random_share}

    def prepare(self, data: TokenizedText) -> None:
        """Stores the special ids in the model, and checks that validation hides tokens."""
        self.model.set_special(data.tokenizer.mask, data.tokenizer.special)
        self.expect_gaps(data.datasets["val"], data.sources["val"])

    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _GapSums]:
        loss, sums = self._judged(batch, Draws.new(batch[0]))
        return loss, sums

    def judge(self, batch: _Batch) -> _GapSums:
        return self._judged(batch, Draws.of_content(batch[0], batch[2]))[1]

    def size(self, batch: _Batch) -> int:
        """Returns the number of tokens."""
        return batch[0].numel()

    def expect_gaps(self, blocks: PieceBlocks, name: str) -> None:
        """Raises ValueError for a text without hidden tokens, which would have perplexity 1.

        Args:
            blocks: blocks of the text.
            name: name of the text, for messages.
        """
        for i in range(len(blocks)):
            tokens, types, there = (x[None].to(self.model.mask_id.device) for x in blocks[i])
            told = self.gaps((tokens, types, there), Draws.of_content(tokens, there))[1]
            if bool((told >= 0).any()):
                return
        raise ValueError(
            f"{name}: expected hidden tokens among its {blocks.tokens:,}; got none with "
            f"task.mask_rate={self.shares['rate']:g}; use a longer text"
        )

    def gaps(self, batch: _Batch, draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hides tokens and swaps second parts.

        Returns:
            Input ids, targets (-1 if not hidden) and mask of existing tokens, (batch, length) each,
            and labels of swapped parts, (batch,).
        """
        tokens, types, there = batch
        label = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        if self.model.next_sentence is not None:
            tokens, there, label = swap_parts(tokens, types, there, draws.sequences)
        mask_id, ordinary = self.model.mask_id, self.model.ordinary
        seen, targets = hide(tokens, there, draws.tokens, mask_id, ordinary, **self.shares)
        return seen, targets, there, label

    def _judged(self, batch: _Batch, draws: Draws) -> tuple[Tensor, _GapSums]:
        tokens, types, there = batch
        model, zero = self.model, torch.zeros((), device=tokens.device)
        pairs = model.next_sentence is not None
        seen, targets, there, label = self.gaps(batch, draws)
        hidden = model(seen, types, there)
        found = model.log_likelihood(hidden, targets)
        loss = -found.sum() / max(1, len(found))
        with torch.no_grad():
            gaps = targets >= 0
            best = model.best(hidden[gaps])
            right = (best == targets[gaps]).sum()
        parts = [-found.detach().double().sum(), right, torch.tensor(len(found)), zero, zero]
        if pairs:
            logits = model.follows(hidden)
            loss = loss + F.cross_entropy(logits.float(), label)
            parts[3:] = [(logits.argmax(dim=1) == label).sum(), torch.tensor(len(label))]
        return loss, _GapSums(*(part.to(tokens.device, torch.float64) for part in parts))
