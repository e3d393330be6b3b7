"""Bidirectional encoder of token sequences, with one hidden state per token."""

from typing import Any, Literal

from torch import Tensor, nn

from molflt.attention import TOKEN_MIXERS, Attention, Stack
from molflt.attention.checks import at_least_one, known_names, whole
from molflt.attention.stack import MixerName, Redrawn
from molflt.sequence.places import TokenModel, embedding, expect_first

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

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.encoder.vocabulary
