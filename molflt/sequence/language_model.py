"""Causal models of tokens and of the bytes of images."""

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from molflt.attention import Stack
from molflt.attention.checks import at_least_one, tensors, whole
from molflt.attention.stack import ATTENTION, StackState
from molflt.sequence.heads import Head, _AdaptiveHead, _PlainHead
from molflt.sequence.places import TokenModel, embedding, expect_targets

LEVELS = 256  # number of possible values of a byte
START = 0  # start token, which has the value of a black byte


class LanguageState(NamedTuple):
    """Decoding state after the tokens processed so far."""

    length: int
    """number of tokens processed so far"""
    stack: StackState


class LanguageModel(TokenModel):
    """Causal model of token sequences, p(token i + 1 | tokens 0 .. i).

    This is the language model of FLT (arXiv:2302.01925), section 5.1, and NPRF (arXiv:2106.12566),
    section 4.2.

    Args:
        vocabulary: number of token ids; `molflt train` takes it from the data.
        dim: width of tokens.
        heads: number of attention heads, a divisor of `dim`.
        absolute: encoding of positions, added to embeddings: "none", "sinusoidal" or "learned".
        tie_embeddings: use the embeddings as the weights of the output layer.
        adaptive_cutoffs: ids at which clusters of rarer tokens begin. Each cluster has a quarter of
            the width of the previous cluster (adaptive softmax, arXiv:1609.04309; with tied
            embeddings, also adaptive inputs, arXiv:1809.10853). Ids must be sorted by decreasing
            frequency.
        options: further arguments of `TokenModel` and `molflt.attention.Stack`.

    Attributes:
        head: layer that maps hidden states to log-probabilities.
        of_data: prefixes of the names of tensors that depend on the vocabulary.
    """

    stack: Stack
    of_data: ClassVar[tuple[str, ...]] = ("head.", "embedding.")

    def __init__(
        self,
        vocabulary: int | None = None,
        dim: int = 128,
        heads: int = 8,
        absolute: Literal["none", "sinusoidal", "learned"] = "none",
        tie_embeddings: bool = True,
        adaptive_cutoffs: list[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            vocabulary,
            dim,
            heads,
            absolute,
            causal=True,
            mixer=ATTENTION,
            mixer_options=None,
            attention_layers=None,
            **options,
        )
        self.head: Head
        if adaptive_cutoffs is None:
            self.head = _PlainHead(dim, self.vocabulary)
        else:
            self.head = _AdaptiveHead(dim, self.vocabulary, adaptive_cutoffs)
        # Tied embeddings belong to the head.
        self.embedding = None if tie_embeddings else embedding(self.vocabulary, dim, dim**-0.5)
        self._set_places(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the hidden states of token ids: (batch, length) -> (batch, length, dim)."""
        return self.stack(*self._embed(tokens, 0))

    def log_likelihood(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Computes log p of each target given the tokens before it, in nats: (batch, length).

        The result is in at least float32, and 0 where the target is -1.

        Args:
            tokens: ids (batch, length).
            targets: ids (batch, length) of the next tokens; -1 at the end and at padding.
        """
        has_target = expect_targets(tokens, targets, self.vocabulary)
        ids = targets.long().where(has_target, 0).flatten()
        log_p = self.head.score(self(tokens).flatten(0, 1), ids)
        return log_p.view(targets.shape).where(has_target, 0.0)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns normalized log-probabilities of all ids: (..., dim) -> (..., vocabulary)."""
        return self.head.log_probabilities(hidden)

    @property
    def decodes(self) -> bool:
        """True if `decode` continues from a state instead of recomputing all tokens."""
        return self.stack.decodes

    def decode(
        self, tokens: Tensor, state: LanguageState | None = None
    ) -> tuple[Tensor, LanguageState]:
        """Computes log-probabilities after new tokens without recomputing earlier tokens.

        Returns log-probabilities (batch, new, vocabulary) and the state after the last token.

        Args:
            tokens: new ids (batch, new); a single token or a whole prompt.
            state: state returned by the previous call; None at the start. Its size is constant for
                linear attention; for softmax, it contains the keys and values of all tokens.
        """
        hidden, state = self.advance(tokens, state)
        return self.log_probabilities(hidden), state

    def advance(
        self, tokens: Tensor, state: LanguageState | None = None
    ) -> tuple[Tensor, LanguageState]:
        """Computes hidden states (batch, new, dim) and the next state; see `decode`."""
        start = 0 if state is None else state.length
        x, positions = self._embed(tokens, start)
        hidden, last = self.stack.decode(x, positions, None if state is None else state.stack)
        return hidden, LanguageState(start + tokens.shape[1], last)

    def _embed(self, tokens: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
        """Returns embeddings (batch, n, dim) and positions (1, n, l); indices begin at `start`."""
        ids, index = self._ids("tokens", tokens, start)
        embed = self.head.embed if self.embedding is None else self.embedding
        x = self._with_places(embed(ids) * self.dim**0.5, index)
        return self.embedding_dropout(x), self._positions(index)


class PixelModel(LanguageModel):
    """Causal model of the bytes of an image, p(byte i | bytes 0 .. i - 1).

    This is the image generation model of NPRF (arXiv:2106.12566), appendix A.5, table 6. Bytes are
    ordered by row, then by pixel, then by channel (red, green, blue). Token i is byte i - 1 (the
    first token is `START`) and has the position of byte i, which it predicts.

    One-dimensional relative encodings use the position i times `position_scale`. Three-dimensional
    encodings (`position_options` with `dim: 3`) use (row, column, channel) relative to the first
    byte, times `position_scale`.

    Args:
        channels: number of channels of an image, 1 or 3; inferred from the data if null.
        image_size: side length of the square images, in pixels; inferred from the data if null.
        absolute: encoding of the positions of bytes: "learned", "sinusoidal" or "none"; see
            `molflt.sequence.LanguageModel`.
        language: further arguments of `molflt.sequence.LanguageModel`.
    """

    of_data: ClassVar[tuple[str, ...]] = ()
    _axes = (1, 3)  # index of the byte, or (row, column, channel)

    def __init__(
        self,
        channels: int | None = None,
        image_size: int | None = None,
        absolute: Literal["none", "sinusoidal", "learned"] = "learned",
        **language: Any,
    ) -> None:
        if channels is None or image_size is None:
            raise ValueError(f"expected numbers; got {channels=}, {image_size=}")
        at_least_one(channels=channels, image_size=image_size)
        self.channels, self.image_size = channels, image_size
        super().__init__(
            vocabulary=LEVELS,
            max_length=channels * image_size**2,
            absolute=absolute,
            adaptive_cutoffs=None,
            **language,
        )

    @property
    def longest(self) -> int:
        """Number of bytes in an image."""
        return self.channels * self.image_size**2

    def bytes_of(self, images: Tensor) -> Tensor:
        """Converts images (batch, channels, image_size, image_size) to bytes (batch, `longest`)."""
        tensors(images=images)
        shape = (self.channels, self.image_size, self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != shape:
            raise ValueError(
                f"images must be (batch, {', '.join(map(str, shape))}); got {tuple(images.shape)}; "
                "resize them, or build the model for their size"
            )
        whole("images", images, 0, LEVELS - 1, "bytes (255 times an image in [0, 1])")
        return images.permute(0, 2, 3, 1).flatten(1).long()

    def images_of(self, values: Tensor) -> Tensor:
        """Converts bytes (batch, `longest`) to uint8 images, the inverse of `bytes_of`."""
        grid = (self.image_size, self.image_size, self.channels)
        return values.unflatten(1, grid).permute(0, 3, 1, 2).to(torch.uint8)

    def image_log_likelihood(self, images: Tensor) -> Tensor:
        """Returns log p of each byte given the preceding bytes, in nats: (batch, `longest`).

        Bytes are in the order of `bytes_of`.

        Args:
            images: bytes (batch, channels, image_size, image_size).
        """
        values = self.bytes_of(images)
        before = torch.cat((torch.full_like(values[:, :1], START), values[:, :-1]), dim=1)
        return self.log_likelihood(before, values)

    def _coordinates(self, index: Tensor) -> Tensor:
        if self.stack.position is None or self.stack.position.dim == 1:
            return super()._coordinates(index)
        pixel = index // self.channels
        axes = (pixel // self.image_size, pixel % self.image_size, index % self.channels)
        return torch.stack(axes, dim=-1)
