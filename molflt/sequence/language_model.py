"""Causal language model: token ids in, a distribution over the next token out."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from molflt.attention import Attention, Stack
from molflt.attention.checks import (
    at_least_one,
    beside_weights,
    known_names,
    no_effect,
    tensors,
    whole,
)
from molflt.attention.positions import PositionName, known_options
from molflt.attention.stack import ATTENTION, MIXER_OPTIONS, StackState
from molflt.sequence.heads import Head, _AdaptiveHead, _PlainHead
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


class LanguageState(NamedTuple):
    """State of decoding after the tokens so far."""

    length: int
    """how many they are"""
    stack: StackState


class LanguageModel(nn.Module):
    """Causal blocks over token embeddings, p(token i + 1 | tokens 0 .. i).

    The decoder of the papers' language models: FLT (arXiv:2302.01925), section 5.1, and NPRF
    (arXiv:2106.12566), section 4.2. Relative encodings see position = index x `position_scale`.

    Args:
        vocabulary: number of token ids; `molflt train` takes it from the data.
        dim: width of tokens.
        heads: attention heads; `dim` is a multiple of it.
        absolute: encoding of positions, added to embeddings: "none" (sufficient with relative
            encodings: causal attention sees how many tokens came before), "sinusoidal"
            (arXiv:1706.03762, section 3.5) or "learned".
        max_length: longest sequence that the model takes; "learned" embeddings, and encodings with
            a table (as their `max_tokens`), need it. None: no limit.
        position: "none" or a key of `molflt.attention.POSITIONS`, shared by all layers, different
            for each head.
        position_options: further arguments of the encoding; `dim` is 1.
        position_scale: distance of neighboring tokens, in the unit of length of the encoding; 1 by
            default.
        embedding_dropout: dropout of embeddings.
        tie_embeddings: use the embeddings as the weights of the output.
        adaptive_cutoffs: ids at which a new, rarer cluster of tokens begins, each with a quarter of
            the width of the one before (adaptive softmax, arXiv:1609.04309; with tied embeddings
            adaptive inputs as well, arXiv:1809.10853). Ids must be sorted by falling frequency.
        stack: further arguments of `molflt.attention.Stack`.

    Attributes:
        head: maps hidden states to log-probabilities.
        of_data: beginnings of names of what belongs to the words of a vocabulary.

    Raises:
        TypeError: an unknown argument.
        ValueError: an option outside its range, or options that do not go together.
    """

    of_data: ClassVar[tuple[str, ...]] = ("head.", "embedding.")

    def __init__(
        self,
        vocabulary: int | None = None,
        dim: int = 128,
        heads: int = 8,
        absolute: Literal["none", "sinusoidal", "learned"] = "none",
        max_length: int | None = None,
        position: PositionName = "none",
        position_options: dict[str, Any] | None = None,
        position_scale: float | None = None,
        embedding_dropout: float = 0.0,
        tie_embeddings: bool = True,
        adaptive_cutoffs: list[int] | None = None,
        **stack: Any,
    ) -> None:
        super().__init__()
        known_names(LanguageModel, stack, Stack, Attention, but=("causal", *MIXER_OPTIONS))
        at_least_one(dim=dim, heads=heads)
        vocabulary = expected_vocabulary(vocabulary)
        check_places(absolute, max_length, position_scale, dim)
        if position == "none":
            no_effect("with position='none'", position_scale=position_scale)
        given = {} if max_length is None else {"max_tokens": max_length}
        options = {**known_options(position, dim=1, **given), **(position_options or {})}
        self.stack = Stack(
            dim,
            heads,
            causal=True,
            position=position,
            position_options=options,
            mixer=ATTENTION,
            mixer_options=None,
            attention_layers=None,
            **stack,
        )
        self._check_axes()
        self.vocabulary = vocabulary
        self.dim = dim
        self.absolute = absolute
        self.max_length = max_length
        self.position_scale = 1.0 if position_scale is None else position_scale
        self.head: Head
        if adaptive_cutoffs is None:
            self.head = _PlainHead(dim, vocabulary)
        else:
            self.head = _AdaptiveHead(dim, vocabulary, adaptive_cutoffs)
        # Tied embeddings are the head's.
        self.embedding = None if tie_embeddings else embedding(vocabulary, dim, dim**-0.5)
        self.places: nn.Embedding | None = None
        if absolute == "learned" and max_length is not None:
            self.places = embedding(max_length, dim, 0.1)
        self.embedding_dropout = nn.Dropout(embedding_dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states: ids (batch, length) -> (batch, length, dim).

        Raises:
            TypeError: something else than a tensor.
            ValueError: another shape, type or device, or (on the CPU) ids beyond the vocabulary.
        """
        out: Tensor = self.stack(*self._embed(tokens, 0))
        return out

    if TYPE_CHECKING:  # torch declares that a call returns anything
        __call__ = forward

    def log_likelihood(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """log p of each target given the tokens up to its place, in nats.

        Args:
            tokens: ids (batch, length).
            targets: ids (batch, length), the next token of each; -1 at the end and at padding.

        Returns: (batch, length), float32 at least; 0 without a target.

        Raises:
            TypeError: something else than tensors.
            ValueError: see `forward`; also for targets.
        """
        tensors(tokens=tokens, targets=targets)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"targets must have the shape of tokens, {tuple(tokens.shape)}; got "
                f"{tuple(targets.shape)}; give one for each token, -1 without a target"
            )
        whole("targets", targets.clamp(min=-1), -1, self.vocabulary - 1, "ids, or none")
        wanted = targets.flatten()
        found = self.head.score(self(tokens).flatten(0, 1), wanted.clamp(min=0))
        return found.where(wanted >= 0, 0.0).view(targets.shape)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Normalized log-probabilities of all ids: (..., dim) -> (..., vocabulary)."""
        return self.head.log_probabilities(hidden)

    @property
    def decodes(self) -> bool:
        """Returns True if `decode` continues from a state instead of recomputing all tokens."""
        position = self.stack.position
        return (position is None or position.decodes) and "quadratic" not in self.stack.mixings

    @property
    def longest(self) -> int | None:
        """Most tokens that the model can be given at once; None without a limit."""
        limit = self.max_length
        return longest_of(self.stack.position, self.position_scale, self.places, limit)

    def decode(
        self, tokens: Tensor, state: LanguageState | None = None
    ) -> tuple[Tensor, LanguageState]:
        """Log-probabilities after new tokens, without going over those before them again.

        Args:
            tokens: new ids (batch, new); one, or a whole prompt.
            state: returned by the call before; None at the beginning. Constant in size for linear
                attention, keys and values of all tokens for softmax.

        Returns:
            Log-probabilities (batch, new, vocabulary), and the state after the last token.

        Raises:
            ValueError: for mechanisms without a state; `decodes` tells.
        """
        hidden, state = self.advance(tokens, state)
        return self.log_probabilities(hidden), state

    def advance(
        self, tokens: Tensor, state: LanguageState | None = None
    ) -> tuple[Tensor, LanguageState]:
        """`decode` without the output layer: hidden states (batch, new, dim), and the state."""
        start = 0 if state is None else state.length
        x, positions = self._embed(tokens, start)
        hidden, last = self.stack.decode(x, positions, None if state is None else state.stack)
        return hidden, LanguageState(start + tokens.shape[1], last)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; use the same seed on every rank."""
        self.stack.redraw_(generator)

    def _embed(self, tokens: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
        """Embeddings (batch, n, dim) and positions (1, n, l) of ids (batch, n) from `start` on.

        None if the stack does not have an encoding.
        """
        tensors(tokens=tokens)
        if tokens.ndim != 2:
            raise ValueError(
                f"tokens must be ids of shape (batch, length); got shape {tuple(tokens.shape)}"
            )
        beside_weights("tokens", tokens, next(self.parameters()))
        whole("tokens", tokens, 0, self.vocabulary - 1, "ids of the vocabulary")
        tokens = tokens.long()  # bytes, too
        end = start + tokens.shape[1]
        expect_length(end, self.longest)
        embed = self.head.embed if self.embedding is None else self.embedding
        x = embed(tokens) * self.dim**0.5
        # # Integers: a token has the same position in forward and in decode.
        index = torch.arange(start, end, device=tokens.device)
        x = self.embedding_dropout(with_places(x, index, self.absolute, self.places))
        return x, self._positions(index, next(self.stack.parameters()).dtype)

    def _check_axes(self) -> None:
        """Raises ValueError for an encoding of other coordinates than tokens have."""
        expect_line(self.stack.position)

    def _positions(self, index: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns positions of tokens with indices (n,), (1, n, l); None without an encoding."""
        return positions_of(index, self.stack, self.position_scale, dtype)
