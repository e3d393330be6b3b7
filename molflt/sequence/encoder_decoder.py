"""Encoder-decoder for translation."""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from molflt.attention import Decoder, Stack
from molflt.attention.checks import no_effect
from molflt.attention.decoder import DecoderState
from molflt.attention.stack import ATTENTION
from molflt.sequence.heads import _PlainHead
from molflt.sequence.places import TokenModel, expect_first, expect_targets


class Translating(NamedTuple):
    """Decoding state: the source and the target tokens decoded so far."""

    length: int  # number of target tokens
    decoder: DecoderState


class EncoderDecoder(TokenModel):
    """Model of p(target token i + 1 | source, target tokens 0 .. i), as in arXiv:1706.03762.

    This is the translation model of NPRF (arXiv:2106.12566), section 4.3. Self-attention of the
    source, self-attention of the target, and cross-attention use the same mechanism unless
    `decoder` changes it. One matrix contains the embeddings of source and target and the weights of
    the output layer. The encoder and the decoder have separate relative encodings; cross-attention
    does not use one.

    Args:
        vocabulary: number of token ids of both languages; `molflt train` sets it from the data.
        dim: width of tokens.
        heads: number of attention heads, a divisor of `dim`.
        absolute: encoding of positions, added to embeddings: "none", "sinusoidal" or "learned",
            shared by source and target.
        decoder: options of the stack that differ in the decoder, such as {"num_features": 24,
            "layers": 3}; null if nothing differs.
        options: further arguments of `TokenModel`, and of `molflt.attention.Stack` for encoder and
            decoder.
    """

    _stack_name = "encoder"
    encoder: Stack
    of_data = ("head.",)  #: prefixes of the names of tensors that depend on the data

    def __init__(
        self,
        vocabulary: int | None = None,
        dim: int = 128,
        heads: int = 8,
        absolute: Literal["none", "sinusoidal", "learned"] = "sinusoidal",
        decoder: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        of_decoder = decoder or {}
        fixed = {name: of_decoder.get(name) for name in ("position", "position_options")}
        no_effect("in the decoder, which has the position of the encoder", **fixed)
        super().__init__(
            vocabulary,
            dim,
            heads,
            absolute,
            causal=False,
            gate=False,
            refinements=1,
            mixer=ATTENTION,
            mixer_options=None,
            attention_layers=None,
            **options,
        )
        shared = {name: value for name, value in options.items() if name not in _OF_TOKENS}
        shared["position_options"] = self._position_options
        self.decoder = Decoder(dim, heads, **{**shared, **of_decoder})
        self.head = _PlainHead(dim, self.vocabulary)
        self._set_places(0.1)

    @property
    def decodes(self) -> bool:
        """True if `advance` continues from a state instead of recomputing all tokens."""
        return self.decoder.decodes

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Returns the hidden states of the source, of shape (batch, n, dim).

        Args:
            source: ids (batch, n).
            source_mask: mask (batch, n), True where a token exists; None means no padding. Padding
                follows the tokens and does not affect results.
        """
        if source_mask is not None:
            expect_first("source_mask", source_mask, source)
        x, positions = self._embed("source", source, 0)
        return self.encoder(x, positions, key_mask=source_mask)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Returns the hidden states of the target, of shape (batch, t, dim).

        Each hidden state depends on the source and on the target tokens up to its position.

        Args:
            source: ids (batch, n).
            target: ids (batch, t); the first id is the start token.
            source_mask: see `encode`.
        """
        return self.decode(target, self.encode(source, source_mask), source_mask)

    def decode(self, target: Tensor, encoded: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Computes `forward` for an encoded source (batch, n, dim)."""
        x, positions = self._embed("target", target, 0)
        return self.decoder(x, encoded, positions, source_mask)

    def begin(self, encoded: Tensor, source_mask: Tensor | None = None) -> Translating:
        """Returns the state before the first token of the target, for an encoded source."""
        return Translating(0, self.decoder.remember(encoded, source_mask))

    def advance(self, tokens: Tensor, state: Translating) -> tuple[Tensor, Translating]:
        """Computes hidden states of new tokens without recomputing earlier tokens.

        Returns hidden states (batch k, new, dim) and the state after the last token.

        Args:
            tokens: ids (batch k, new), with k rows for each source of the state.
            state: state from `begin` or from the previous call. Its size is constant for linear
                attention; for softmax, it contains the keys and values of all tokens.
        """
        x, positions = self._embed("target", tokens, state.length)
        hidden, last = self.decoder.step(x, state.decoder, positions)
        return hidden, Translating(state.length + tokens.shape[1], last)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns normalized log-probabilities of all ids: (..., dim) -> (..., vocabulary)."""
        return self.head.log_probabilities(hidden)

    def log_likelihood(
        self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Computes log p of each target, and the mean of log p under smoothed labels.

        Returns log p and sum_k label_k log p_k, each of shape (targets,), in at least float32.
        Targets of -1 are omitted; the other targets are in the order of rows and positions.

        Args:
            hidden: hidden states (batch, t, dim) from `forward`.
            targets: ids (batch, t) of the next tokens; -1 at padding.
            smoothing: epsilon; the label is 1 - epsilon for the target, and epsilon / vocabulary
                is added for every id (arXiv:1512.00567, section 7).
        """
        has_target = expect_targets(hidden, targets, self.vocabulary)
        ids, states = targets[has_target].long(), hidden[has_target]
        log_p = self.head.score(states, ids)
        if not smoothing:
            return log_p, log_p
        return log_p, log_p + smoothing * self.head.excess(states, ids)

    def _embed(self, name: str, tokens: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
        """Returns embeddings (batch, n, dim) and positions (1, n, 1); indices begin at `start`."""
        ids, index = self._ids(name, tokens, start)
        x = self._with_places(self.head.embed(ids) * self.dim**0.5, index)
        return self.embedding_dropout(x), self._positions(index)


_OF_TOKENS = ("max_length", "position_scale", "embedding_dropout")  # options of `TokenModel` only
