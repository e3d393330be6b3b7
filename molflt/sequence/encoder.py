"""Encoder of token sequences: ids in, one hidden state per token out, all seeing each other."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from molflt.attention import TOKEN_MIXERS, Attention, Stack
from molflt.attention.checks import (
    at_least_one,
    beside_weights,
    known_names,
    no_effect,
    tensors,
    whole,
)
from molflt.attention.positions import PositionName, known_options
from molflt.attention.stack import MixerName
from molflt.sequence.places import (
    check_places,
    embedding,
    expect_length,
    expect_line,
    expected_vocabulary,
    longest_of,
    positions_of,
    with_places,
)

_STD = 0.02  # of embeddings, as BERT's


class TokenEncoder(nn.Module):
    """Embeddings of words, places and types, and a stack of blocks over them.

    BERT (arXiv:1810.04805), section 3, with attention; FNet (arXiv:2105.03824), section 4.1, with
    mixer "fourier"; the encoders of NPRF (arXiv:2106.12566), section 4.1, with linear attention and
    a relative encoding, which sees position = index x `position_scale`.

    Args:
        vocabulary: number of token ids.
        dim: width of tokens.
        heads: attention heads; `dim` is a multiple of it.
        types: number of token types, such as 2 for the two sentences of a pair.
        absolute: encoding of places, added to embeddings: "learned" (BERT), "sinusoidal"
            (arXiv:1706.03762, section 3.5), or "none".
        max_length: longest sequence, where something has to know: "learned" places, encodings with
            a table, and mixers with a matrix of all tokens. Others have no limit. BERT's is 512.
        position: "none" or a key of `molflt.attention.POSITIONS`, shared by all layers.
        position_options: further arguments of the encoding; `dim` is 1.
        position_scale: distance of neighboring tokens, in the unit of length of the encoding; 1 by
            default.
        embedding_dropout: dropout of embeddings.
        project_embeddings: a linear layer behind the normalized embeddings, as FNet has it.
        mixer: what mixes tokens: "attention", or a key of `molflt.attention.TOKEN_MIXERS`.
        mixer_options: further arguments of that mixer; `max_tokens` is `max_length`.
        norm_eps: what LayerNorm adds to the variance.
        stack: further arguments of `molflt.attention.Stack`.

    Raises:
        TypeError: an unknown argument.
        ValueError: an option outside its range, or options that do not go together.
    """

    def __init__(
        self,
        vocabulary: int | None = None,
        dim: int = 128,
        heads: int = 8,
        types: int = 2,
        absolute: Literal["none", "sinusoidal", "learned"] = "learned",
        max_length: int = 512,
        position: PositionName = "none",
        position_options: dict[str, Any] | None = None,
        position_scale: float | None = None,
        embedding_dropout: float = 0.0,
        project_embeddings: bool = False,
        mixer: MixerName = "attention",
        mixer_options: dict[str, Any] | None = None,
        norm_eps: float = 1e-5,
        **stack: Any,
    ) -> None:
        super().__init__()
        known_names(TokenEncoder, stack, Stack, Attention, but=("causal",))
        at_least_one(dim=dim, heads=heads, types=types)
        self.vocabulary = expected_vocabulary(vocabulary)
        check_places(absolute, max_length, position_scale, dim)
        if position == "none":
            no_effect("with position='none'", position_scale=position_scale)
        limit = {"max_tokens": max_length}
        options = {**known_options(position, dim=1, **limit), **(position_options or {})}
        if mixer in TOKEN_MIXERS and TOKEN_MIXERS[mixer].bounded:
            mixer_options = {**limit, **(mixer_options or {})}
        self.stack = Stack(
            dim,
            heads,
            causal=False,
            position=position,
            position_options=options,
            mixer=mixer,
            mixer_options=mixer_options,
            norm_eps=norm_eps,
            **stack,
        )
        expect_line(self.stack.position)
        self.dim = dim
        self.absolute = absolute
        self.position_scale = 1.0 if position_scale is None else position_scale
        self.words = embedding(self.vocabulary, dim, _STD)
        self.types = embedding(types, dim, _STD)
        self.places = embedding(max_length, dim, _STD) if absolute == "learned" else None
        self.embedding_norm = nn.LayerNorm(dim, norm_eps)
        self.projection = nn.Linear(dim, dim) if project_embeddings else None
        self.embedding_dropout = nn.Dropout(embedding_dropout)

    @property
    def longest(self) -> int | None:
        """Most tokens that the model can be given at once; None without a limit."""
        found = longest_of(self.stack.position, self.position_scale, self.places)
        tables = (getattr(block.attention, "max_tokens", None) for block in self.stack.blocks)
        return min((n for n in (found, *tables) if n is not None), default=None)

    def forward(
        self, tokens: Tensor, types: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states.

        Args:
            tokens: ids (batch, length).
            types: of each token, (batch, length); None where all are 0.
            key_mask: (batch, length), True at tokens; None without padding. Padding does not change
                results.

        Returns:
            (batch, length, dim).

        Raises:
            TypeError: something else than tensors.
            ValueError: another shape, ids out of range, or a sequence that is too long.
        """
        tensors(tokens=tokens, types=types, key_mask=key_mask)
        if tokens.ndim != 2 or (types is not None and types.shape != tokens.shape):
            shapes = [tuple(t.shape) for t in (tokens, types) if t is not None]
            raise ValueError(
                "tokens, and types if there are any, must be of one shape (batch, length); got "
                f"{' and '.join(map(str, shapes))}"
            )
        beside_weights("tokens", tokens, self.words.weight)
        whole("tokens", tokens, 0, self.vocabulary - 1, "ids of the vocabulary")
        x, positions = self._embed(tokens.long(), types)
        hidden: Tensor = self.stack(x, positions, key_mask=key_mask)
        return hidden

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; use the same seed on every rank."""
        self.stack.redraw_(generator)

    def _embed(self, tokens: Tensor, types: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Embeddings (batch, n, dim), and positions (1, n, 1) if the stack has an encoding."""
        expect_length(tokens.shape[1], self.longest)
        x = self.words(tokens)
        if types is None:
            x = x + self.types.weight[0]
        else:
            whole("types", types, 0, self.types.num_embeddings - 1, "types of tokens")
            x = x + self.types(types.long())
        index = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_norm(with_places(x, index, self.absolute, self.places))
        x = self.embedding_dropout(x if self.projection is None else self.projection(x))
        dtype = self.words.weight.dtype
        return x, positions_of(index, self.stack, self.position_scale, dtype)
