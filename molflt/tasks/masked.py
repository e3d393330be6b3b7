"""Masked language modeling as in BERT (arXiv:1810.04805, section 3.1).

The model predicts hidden tokens and, optionally, whether the second part of a pair follows the
first. Random numbers are passed as arguments: training draws new numbers at each step, and
validation derives them from the tokens of each sequence, independently of the batch.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molflt.attention.checks import not_negative, positive, share
from molflt.metrics import Metric
from molflt.tasks.base import Task
from molflt.tasks.language import perplexity

if TYPE_CHECKING:
    from molflt.data.text.datamodule import PieceBlocks, TokenizedText
    from molflt.sequence.masked import MaskedLanguageModel


_Batch = tuple[Tensor, Tensor, Tensor]


class _GapSums(NamedTuple):
    nats: Tensor  # negative log-likelihood of hidden tokens
    right: Tensor  # number of correctly predicted hidden tokens
    gaps: Tensor
    pairs_right: Tensor  # number of correctly classified pairs
    pairs: Tensor

    def metrics(self) -> dict[str, float]:
        nats, right, gaps, pairs_right, pairs = (float(part) for part in self)
        found = {
            "perplexity": perplexity(nats / max(1.0, gaps)),
            "accuracy_percent": 100 * right / max(1.0, gaps),
        }
        return found | ({"next_sentence_percent": 100 * pairs_right / pairs} if pairs else {})


class MaskedTask(Task[_Batch, "TokenizedText"]):
    """Mean negative log-likelihood of hidden tokens, in nats, plus the next-sentence loss.

    Batches consist of ids, types and a mask, each (batch, length); the mask is False for padding.
    Training hides different tokens at every step; in validation, the choice depends only on the
    sequence.

    Args:
        model: `molflt.sequence.MaskedLanguageModel`.
        mask_rate: fraction of tokens to predict.
        mask_share: fraction of the tokens to predict that is replaced by the mask token.
        random_share: fraction of the tokens to predict that is replaced by random tokens. The
            remaining tokens to predict are unchanged.
        optimization: further arguments of `molflt.tasks.base.Task`.
    """

    model: MaskedLanguageModel
    unit = "tokens"
    sums: ClassVar[type[_GapSums]] = _GapSums
    metrics: ClassVar = {
        "perplexity": Metric("perplexity of masked tokens", scale="log", digits=2),
        "accuracy_percent": Metric("masked-token accuracy", "%", digits=2, largest_is_best=True),
        "next_sentence_percent": Metric(
            "next-sentence accuracy", "%", digits=2, largest_is_best=True
        ),
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
        share(mask_rate=mask_rate)
        positive(mask_rate=mask_rate)
        not_negative(mask_share=mask_share, random_share=random_share)
        if mask_share + random_share > 1:
            raise ValueError(
                "task.mask_share and task.random_share must be at most 1 together; got "
                f"{mask_share} and {random_share}"
            )
        self.shares = {"rate": mask_rate, "mask_share": mask_share, "random_share": random_share}

    def prepare(self, data: TokenizedText) -> None:
        """Stores the special ids in the model and checks that validation hides tokens."""
        self.model.set_special(data.tokenizer.mask, data.tokenizer.special)
        self.expect_gaps(data.datasets["val"], data.sources["val"])

    def loss(self, batch: _Batch, progress: float) -> tuple[Tensor, _GapSums]:
        return self._loss_and_sums(batch, Draws.new(batch[0]))

    def validation_sums(self, batch: _Batch) -> _GapSums:
        return self._loss_and_sums(batch, Draws.of_content(batch[0], batch[2]))[1]

    def size(self, batch: _Batch) -> int:
        return batch[0].numel()

    def expect_gaps(self, blocks: PieceBlocks, name: str) -> None:
        """Raises ValueError if no token of the text is hidden; the perplexity would then be 1."""
        for i in range(len(blocks)):
            tokens, types, there = (x[None].to(self.model.mask_id.device) for x in blocks[i])
            chosen = self.gaps((tokens, types, there), Draws.of_content(tokens, there))[1]
            if bool((chosen >= 0).any()):
                return
        raise ValueError(
            f"{name}: expected hidden tokens among its {blocks.tokens:,}; got none with "
            f"task.mask_rate={self.shares['rate']:g}; use a longer text"
        )

    def gaps(self, batch: _Batch, draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hides tokens and swaps second parts.

        Returns the input ids, the targets, the mask (False for padding) and the pair labels; see
        `hide` and `swap_parts`.
        """
        tokens, types, there = batch
        label = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        if self.model.next_sentence is not None:
            tokens, there, label = swap_parts(tokens, types, there, draws.sequences)
        mask_id, ordinary = self.model.mask_id, self.model.ordinary
        seen, targets = hide(tokens, there, draws.tokens, mask_id, ordinary, **self.shares)
        return seen, targets, there, label

    def _loss_and_sums(self, batch: _Batch, draws: Draws) -> tuple[Tensor, _GapSums]:
        model = self.model
        seen, targets, there, label = self.gaps(batch, draws)
        hidden = model(seen, batch[1], there)
        found = model.log_likelihood(hidden, targets)
        loss = -found.sum() / max(1, len(found))
        with torch.no_grad():
            gaps = targets >= 0
            right = (model.head.best(hidden[gaps]) == targets[gaps]).sum()
        pairs = torch.tensor(0), torch.tensor(0)
        if model.next_sentence is not None:
            logits = model.follows(hidden)
            loss = loss + F.cross_entropy(logits.float(), label)
            pairs = (logits.argmax(dim=1) == label).sum(), torch.tensor(len(label))
        nats = -found.detach().double().sum()
        return loss, _GapSums(nats, right, torch.tensor(len(found)), *pairs)


class Draws(NamedTuple):
    """Uniform random numbers in [0, 1)."""

    tokens: Tensor
    """shape (3, batch, length); see `hide`"""
    sequences: Tensor
    """shape (batch,); see `swap_parts`"""

    @staticmethod
    def new(tokens: Tensor) -> Draws:
        """Draws new random numbers for ids (batch, length) with torch's default generator."""
        whole = torch.rand(3, *tokens.shape, device=tokens.device)
        return Draws(whole, torch.rand(len(tokens), device=tokens.device))

    @staticmethod
    def of_content(tokens: Tensor, there: Tensor) -> Draws:
        """Derives the numbers of each sequence from its tokens, independently of the padding.

        The numbers are 1 for padding, where the mask `there`, of shape (batch, length), is False.
        """
        whole = torch.ones(3, *tokens.shape)
        each = torch.empty(len(tokens))
        for i, (row, mask) in enumerate(zip(tokens.cpu(), there.cpu(), strict=True)):
            own = row[mask].to(torch.int64)
            digest = hashlib.sha256(own.numpy().tobytes()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            whole[:, i, mask] = torch.rand(3, len(own), generator=generator)
            each[i] = torch.rand((), generator=generator)
        return Draws(whole.to(tokens.device), each.to(tokens.device))


def hide(
    tokens: Tensor,
    there: Tensor,
    draws: Tensor,
    mask_id: Tensor,
    ordinary: Tensor,
    rate: float = 0.15,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Hides random tokens.

    Args:
        tokens: (batch, length), ids.
        there: (batch, length), False for padding.
        draws: (3, batch, length), uniform in [0, 1), for the choice of hidden tokens, the kind of
            replacement and the random token.
        mask_id: id of the mask token, a scalar.
        ordinary: (vocabulary,), True for ids that may be hidden or drawn.
        rate, mask_share, random_share: see `MaskedTask`.

    Returns:
        Input ids and targets, each (batch, length); targets are -1 for tokens that are not hidden.
    """
    chosen = there & ordinary[tokens] & (draws[0] < rate)
    anything = ordinary.nonzero()[:, 0]
    index = (draws[2].clamp(max=1 - 2**-24) * len(anything)).long()
    masked = chosen & (draws[1] < mask_share)
    replaced = chosen & ~masked & (draws[1] < mask_share + random_share)
    seen = torch.where(masked, mask_id.to(tokens.dtype), tokens)
    seen = torch.where(replaced, anything[index].to(tokens.dtype), seen)
    return seen, tokens.where(chosen, -1)


def swap_parts(
    tokens: Tensor, types: Tensor, there: Tensor, draws: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces about half of the second parts with the second part of the previous sequence.

    Args:
        tokens: (batch, length), ids. A batch of one sequence is not changed.
        types: (batch, length), 1 in the second part and in the padding after it; the same in all
            rows.
        there: (batch, length), False for padding.
        draws: (batch,), uniform in [0, 1).

    Returns:
        The tokens, the mask (False for padding), and the labels, of shape (batch,): 0 for original
        pairs, 1 for swapped pairs.
    """
    wrong = (draws < 0.5) & torch.tensor(len(tokens) > 1, device=tokens.device)
    moved = wrong[:, None] & (types == 1)
    return (
        torch.where(moved, tokens.roll(1, dims=0), tokens),
        torch.where(moved, there.roll(1, dims=0), there),
        wrong.long(),
    )
