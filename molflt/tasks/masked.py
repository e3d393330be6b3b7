"""Masked language modeling as in BERT (arXiv:1810.04805, section 3.1)."""

import hashlib
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from molflt.data.text.datamodule import PieceBlocks, TokenizedText
from molflt.metrics import Metric
from molflt.sequence.encoder import MaskedLanguageModel
from molflt.tasks.base import Task
from molflt.tasks.language import perplexity

_Batch = tuple[Tensor, Tensor, Tensor]


class _GapSums(NamedTuple):
    nats: Tensor  # negative log-likelihood of hidden tokens
    right: Tensor  # number of correctly predicted hidden tokens
    gaps: Tensor
    pairs_right: Tensor  # number of correctly classified pairs
    pairs: Tensor

    def metrics(self) -> dict[str, float]:
        nats, right, gaps, pairs_right, pairs = (float(part) for part in self)
        metrics = {"perplexity": perplexity(nats / max(1.0, gaps))}
        metrics["accuracy_percent"] = 100 * right / max(1.0, gaps)
        if pairs:
            metrics["next_sentence_percent"] = 100 * pairs_right / pairs
        return metrics


class Draws(NamedTuple):
    """Uniform random numbers in [0, 1)."""

    tokens: Tensor  # (3, batch, length); see `hide`
    sequences: Tensor  # (batch,); see `swap_parts`

    @staticmethod
    def new(tokens: Tensor) -> "Draws":
        """Draws new random numbers for ids (batch, length) with torch's default generator."""
        of_tokens = torch.rand(3, *tokens.shape, device=tokens.device)
        return Draws(of_tokens, torch.rand(len(tokens), device=tokens.device))

    @staticmethod
    def of_content(tokens: Tensor, key_mask: Tensor) -> "Draws":
        """Derives the numbers of each sequence from its tokens, independently of the padding.

        The numbers are 1 for padding, where `key_mask`, of shape (batch, length), is False.
        """
        of_tokens, of_sequences = torch.ones(3, *tokens.shape), torch.empty(len(tokens))
        for i, (row, mask) in enumerate(zip(tokens.cpu(), key_mask.cpu(), strict=True)):
            ids = row[mask].to(torch.int64)
            digest = hashlib.sha256(ids.numpy().tobytes()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            of_tokens[:, i, mask] = torch.rand(3, len(ids), generator=generator)
            of_sequences[i] = torch.rand((), generator=generator)
        return Draws(of_tokens.to(tokens.device), of_sequences.to(tokens.device))


class MaskedTask(Task[_Batch, TokenizedText]):
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
            tokens, types, key_mask = (x[None].to(self.model.mask_id.device) for x in blocks[i])
            if len(self.hidden_ids((tokens, types, key_mask))):
                return
        raise ValueError(
            f"{name}: expected hidden tokens among its {blocks.tokens:,}; got none with "
            f"task.mask_rate={self.shares['rate']:g}; use a longer text"
        )

    def hidden_ids(self, batch: _Batch) -> Tensor:
        """Returns the ids (gaps,) of the tokens that validation hides."""
        targets = self.gaps(batch, Draws.of_content(batch[0], batch[2]))[1]
        return targets[targets >= 0]

    def gaps(self, batch: _Batch, draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hides tokens and swaps second parts.

        Returns the input ids, the targets, the mask (False for padding) and the pair labels; see
        `hide` and `swap_parts`.
        """
        tokens, types, key_mask = batch
        label = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        if self.model.next_sentence is not None:
            tokens, key_mask, label = swap_parts(tokens, types, key_mask, draws.sequences)
        mask_id, ordinary = self.model.mask_id, self.model.ordinary
        inputs, targets = hide(tokens, key_mask, draws.tokens, mask_id, ordinary, **self.shares)
        return inputs, targets, key_mask, label

    def _loss_and_sums(self, batch: _Batch, draws: Draws) -> tuple[Tensor, _GapSums]:
        model = self.model
        inputs, targets, key_mask, label = self.gaps(batch, draws)
        hidden = model(inputs, batch[1], key_mask)
        log_p = model.log_likelihood(hidden, targets)
        loss = -log_p.sum() / max(1, len(log_p))
        with torch.no_grad():
            gaps = targets >= 0
            right = (model.head.best(hidden[gaps]) == targets[gaps]).sum()
        pairs = torch.tensor(0), torch.tensor(0)
        if model.next_sentence is not None:
            logits = model.follows(hidden)
            loss = loss + nn.functional.cross_entropy(logits.float(), label)
            if len(label) > 1:  # a single sequence keeps its second part
                pairs = (logits.argmax(dim=1) == label).sum(), torch.tensor(len(label))
        nats = -log_p.detach().double().sum()
        return loss, _GapSums(nats, right, torch.tensor(len(log_p)), *pairs)


def hide(
    tokens: Tensor,
    key_mask: Tensor,
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
        key_mask: (batch, length), False for padding.
        draws: (3, batch, length), uniform in [0, 1), for the choice of hidden tokens, the kind of
            replacement and the random token.
        mask_id: id of the mask token, a scalar.
        ordinary: (vocabulary,), True for ids that may be hidden or drawn.
        rate, mask_share, random_share: see `MaskedTask`.

    Returns:
        Input ids and targets, each (batch, length); targets are -1 for tokens that are not hidden.
    """
    hidden = key_mask & ordinary[tokens] & (draws[0] < rate)
    masked = hidden & (draws[1] < mask_share)
    replaced = hidden & ~masked & (draws[1] < mask_share + random_share)
    ids = ordinary.nonzero()[:, 0]
    random_ids = ids[(draws[2].clamp(max=1 - 2**-24) * len(ids)).long()]
    inputs = torch.where(masked, mask_id.to(tokens.dtype), tokens)
    inputs = torch.where(replaced, random_ids.to(tokens.dtype), inputs)
    return inputs, tokens.where(hidden, -1)


def swap_parts(
    tokens: Tensor, types: Tensor, key_mask: Tensor, draws: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces about half of the second parts with the second part of the previous sequence.

    Args:
        tokens: (batch, length), ids. A batch of one sequence is not changed.
        types: (batch, length), 1 in the second part and in the padding after it; the same in all
            rows.
        key_mask: (batch, length), False for padding.
        draws: (batch,), uniform in [0, 1).

    Returns:
        The tokens, the mask (False for padding), and the labels, of shape (batch,): 0 for original
        pairs, 1 for swapped pairs.
    """
    swapped = (draws < 0.5) if len(tokens) > 1 else torch.zeros_like(draws, dtype=torch.bool)
    second = swapped[:, None] & (types == 1)
    tokens = torch.where(second, tokens.roll(1, dims=0), tokens)
    key_mask = torch.where(second, key_mask.roll(1, dims=0), key_mask)
    return tokens, key_mask, swapped.long()
