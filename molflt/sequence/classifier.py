"""Classifier of sequences and sequence pairs."""

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from molflt.attention.checks import at_least_one, one_of, share
from molflt.sequence.encoder import EncoderModel


class SequenceClassifier(EncoderModel):
    """Encoder, tanh layer on the first token or on the mean of all tokens, and linear classifier.

    BERT is fine-tuned in this form (arXiv:1810.04805, section 4.1). A pair of sequences is passed
    as one sequence whose parts have different types.

    Args:
        vocabulary: number of token ids; `molflt train` sets it from the data.
        classes: number of classes; 1 for a real-valued score; inferred from the data if null.
        pool: input of the classifier: the first "token", as in BERT, or the "mean" of all tokens.
        head_dropout: dropout before the classifier.
        encoder: further arguments of `molflt.sequence.TokenEncoder`.
    """

    #: prefixes of the names of tensors that depend on each data file
    of_data: ClassVar = {"classes.json": ("classify.",), "tokenizer.json": ("encoder.words.",)}

    def __init__(
        self,
        vocabulary: int | None = None,
        classes: int | None = None,
        pool: Literal["token", "mean"] = "token",
        head_dropout: float = 0.1,
        **encoder: Any,
    ) -> None:
        one_of("pool", pool, ("token", "mean"))
        share(head_dropout=head_dropout)
        if classes is None:
            raise ValueError("classes must be at least 1; got None; take it from the data")
        at_least_one(classes=classes)
        super().__init__(vocabulary, **encoder)
        self.classes, self.pool = classes, pool
        self.pooler = nn.Linear(self.encoder.dim, self.encoder.dim)
        self.head_dropout = nn.Dropout(head_dropout)
        self.classify = nn.Linear(self.encoder.dim, classes)

    def forward(
        self, tokens: Tensor, types: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Returns logits (batch, classes) or scores (batch, 1); see `TokenEncoder.forward`."""
        hidden = self.encoder(tokens, types, key_mask)
        if self.pool == "token":
            pooled = hidden[:, 0]
        elif key_mask is None:
            pooled = hidden.mean(dim=1)
        else:
            mask = key_mask[..., None].to(hidden.dtype)
            pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return self.classify(self.head_dropout(self.pooler(pooled).tanh()))
