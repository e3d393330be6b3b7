"""Masked language model."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from molflt.sequence.encoder import EncoderModel
from molflt.sequence.heads import MaskedHead
from molflt.sequence.places import expect_targets


class MaskedLanguageModel(EncoderModel):
    """Encoder that predicts masked tokens and, optionally, whether one sentence follows another.

    This is the pre-training model of BERT (arXiv:1810.04805), section 3.1, with any token encoder.

    Args:
        vocabulary: number of token ids; `molflt train` takes it from the data.
        next_sentence: also predict from the first token whether the second part follows the first
            (arXiv:1810.04805, "next sentence prediction"); inferred from the data if null.
        encoder: further arguments of `molflt.sequence.TokenEncoder`.

    Attributes:
        mask_id: id of the mask token; -1 before `set_special` is called.
        ordinary: mask (vocabulary,), True for ids that may be masked or predicted; False for
            special tokens.
        of_data: prefixes of the names of tensors that depend on each data file.
    """

    of_data: ClassVar = {"tokenizer.json": ("encoder.words.", "head.bias", "mask_id", "ordinary")}
    mask_id: Tensor
    ordinary: Tensor

    def __init__(
        self, vocabulary: int | None = None, next_sentence: bool | None = None, **encoder: Any
    ) -> None:
        super().__init__(vocabulary, **encoder)
        dim, eps = self.encoder.dim, self.encoder.embedding_norm.eps
        self.head = MaskedHead(self.encoder.words, encoder.get("activation", "gelu"), eps)
        self.pooler = nn.Linear(dim, dim) if next_sentence else None
        self.next_sentence = nn.Linear(dim, 2) if next_sentence else None
        self.register_buffer("mask_id", torch.tensor(-1))
        self.register_buffer("ordinary", torch.ones(self.encoder.vocabulary, dtype=torch.bool))

    def set_special(self, mask_id: int, special: list[int]) -> None:
        """Sets the id of the mask token and the ids of all special tokens, including this one."""
        self.mask_id.fill_(mask_id)
        self.ordinary.fill_(True)
        self.ordinary[[mask_id, *special]] = False

    def forward(
        self, tokens: Tensor, types: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Returns hidden states (batch, length, dim); see `TokenEncoder.forward`."""
        return self.encoder(tokens, types, key_mask)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns normalized log-probabilities of all ids: (..., dim) -> (..., vocabulary)."""
        return self.head.log_probabilities(hidden)

    def log_likelihood(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns log p of all masked tokens, in the order of rows: (masked tokens,).

        The result is in at least float32. Logits are computed only for masked tokens.

        Args:
            hidden: hidden states (batch, length, dim) from `forward`.
            targets: ids (batch, length); -1 for tokens that are not masked.
        """
        has_target = expect_targets(hidden, targets, self.vocabulary)
        return self.head.score(hidden[has_target], targets[has_target])

    def follows(self, hidden: Tensor) -> Tensor:
        """Returns logits of "follows" and "does not follow": (batch, length, dim) -> (batch, 2)."""
        if self.pooler is None or self.next_sentence is None:
            raise ValueError("follows() needs a model that was built with next_sentence=True")
        return self.next_sentence(self.pooler(hidden[:, 0]).tanh())
