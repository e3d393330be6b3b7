"""Bidirectional encoder of token sequences, and models that consist of it and output layers."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from molflt.attention import TOKEN_MIXERS, Attention, Stack
from molflt.attention.checks import at_least_one, known_names, one_of, share, whole
from molflt.attention.stack import MixerName, Redrawn
from molflt.sequence.heads import MaskedHead
from molflt.sequence.places import TokenModel, embedding, expect_first, expect_targets

_STD = 0.02  # standard deviation of embeddings, as in BERT


class TokenEncoder(TokenModel):
    """Embeddings of words, positions and types, followed by a stack of blocks.

    With attention, this is BERT (arXiv:1810.04805), section 3; with the mixer "fourier", it is FNet
    (arXiv:2105.03824), section 4.1. With linear attention and a relative encoding, it is the
    encoder of NPRF (arXiv:2106.12566), section 4.1.

    Args:
        vocabulary: number of token ids.
        dim: width of tokens.
        heads: number of attention heads, a divisor of `dim`.
        types: number of token types, such as 2 for the two sentences of a pair.
        absolute: encoding of positions, added to embeddings: "learned" (BERT), "sinusoidal" or
            "none".
        max_length: maximum sequence length, for "learned" positions, encodings with a table, and
            mixers with a matrix over all tokens. Other options do not need it. BERT uses 512.
        project_embeddings: add a linear layer after the normalized embeddings, as in FNet.
        mixer: token mixer: "attention", or a key of `molflt.attention.TOKEN_MIXERS`.
        mixer_options: further arguments of the mixer; its `max_tokens` defaults to `max_length`.
        norm_eps: constant that LayerNorm adds to the variance.
        options: further arguments of `TokenModel` and `molflt.attention.Stack`.
    """

    stack: Stack

    def __init__(
        self,
        vocabulary: int | None = None,
        dim: int = 128,
        heads: int = 8,
        types: int = 2,
        absolute: Literal["none", "sinusoidal", "learned"] = "learned",
        max_length: int = 512,
        project_embeddings: bool = False,
        mixer: MixerName = "attention",
        mixer_options: dict[str, Any] | None = None,
        norm_eps: float = 1e-5,
        **options: Any,
    ) -> None:
        at_least_one(types=types)
        if mixer in TOKEN_MIXERS and TOKEN_MIXERS[mixer].takes_max_tokens:
            mixer_options = {"max_tokens": max_length, **(mixer_options or {})}
        super().__init__(
            vocabulary,
            dim,
            heads,
            absolute,
            causal=False,
            max_length=max_length,
            mixer=mixer,
            mixer_options=mixer_options,
            norm_eps=norm_eps,
            **options,
        )
        self.words = embedding(self.vocabulary, dim, _STD)
        self.types = embedding(types, dim, _STD)
        self._set_places(_STD)
        self.embedding_norm = nn.LayerNorm(dim, norm_eps)
        self.projection = nn.Linear(dim, dim) if project_embeddings else None

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens; None for no limit."""
        tables = (getattr(block.attention, "max_tokens", None) for block in self.stack.blocks)
        limits = [n for n in (self._table, *tables) if n is not None]
        return min(limits) if limits else None

    def forward(
        self, tokens: Tensor, types: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Returns the hidden states of all tokens, of shape (batch, length, dim).

        Args:
            tokens: ids (batch, length).
            types: types of tokens (batch, length); None if all types are 0.
            key_mask: mask (batch, length), True where a token exists; None means no padding.
                Padding follows the tokens and does not affect results.
        """
        ids, index = self._ids("tokens", tokens)
        if key_mask is not None:
            expect_first("key_mask", key_mask, tokens)
        x = self.words(ids)
        if types is None:
            x = x + self.types.weight[0]
        else:
            whole("types", types, 0, self.types.num_embeddings - 1, "types of tokens")
            x = x + self.types(types.long())
        x = self.embedding_norm(self._with_places(x, index))
        x = self.embedding_dropout(x if self.projection is None else self.projection(x))
        return self.stack(x, self._positions(index), key_mask=key_mask)


class EncoderModel(Redrawn):
    """Base class for models that consist of an encoder and output layers."""

    def __init__(self, vocabulary: int | None, **encoder: Any) -> None:
        known_names(type(self), encoder, TokenEncoder, TokenModel, Stack, Attention)
        super().__init__()
        self.encoder = TokenEncoder(vocabulary, **encoder)
        self.vocabulary = self.encoder.vocabulary


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

    def __init__(
        self, vocabulary: int | None = None, next_sentence: bool | None = None, **encoder: Any
    ) -> None:
        super().__init__(vocabulary, **encoder)
        dim, eps = self.encoder.dim, self.encoder.embedding_norm.eps
        self.head = MaskedHead(self.encoder.words, encoder.get("activation", "gelu"), eps)
        self.pooler = nn.Linear(dim, dim) if next_sentence else None
        self.next_sentence = nn.Linear(dim, 2) if next_sentence else None
        self.mask_id = nn.Buffer(torch.tensor(-1))
        self.ordinary = nn.Buffer(torch.ones(self.vocabulary, dtype=torch.bool))

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
