"""Decoder of an encoder-decoder model: causal blocks that also attend to another sequence."""

from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from molflt.attention.checks import no_effect
from molflt.attention.features.base import Operand
from molflt.attention.keys import check_mask, check_width, without_masked
from molflt.attention.layer import Attention
from molflt.attention.mixing.causal import DecodeState, KeyValues
from molflt.attention.mixing.forms import KeySums, key_sums, query_sums, softmax
from molflt.attention.stack import Block, Stack, StackState

Memory = KeyValues | KeySums

_SELF_ATTENTION_ONLY = ("causal", "gate", "position")


class CrossAttention(Attention):
    """Attention to another sequence, whose keys and values are computed only once.

    Calling `remember` and then `recall` gives the same result as `Attention.forward` with
    `context`. As in T5 (arXiv:1910.10683, section 2.1), relative encodings are not used between two
    sequences. Takes the same arguments as `Attention`, except causal, gate and position.
    """

    def __init__(self, dim: int, heads: int, **attention: Any) -> None:
        unused = {name: attention.get(name) or None for name in _SELF_ATTENTION_ONLY}
        no_effect("in attention to another sequence", **unused)
        super().__init__(dim, heads, **attention)

    def remember(self, context: Tensor, context_mask: Tensor | None = None) -> Memory:
        """Computes the part of attention that depends only on the other sequence.

        For softmax, returns keys and values, O(keys d) numbers. For other mixings, returns sums
        over keys, O(m d) numbers.

        Args:
            context: (batch, keys, dim).
            context_mask: (batch, keys) bool, True where a token exists.
        """
        check_width(self.dim, self.to_key, context=context)
        check_mask(context_mask, context.shape[:2], "context_mask")
        _, source = without_masked(context, context_mask)
        key = self.scaling(self._project(self.to_key, source))
        value = self._project(self.to_value, source)
        mask = None if context_mask is None else context_mask[:, None]
        if self.feature_map is None:
            return KeyValues(key, value, mask)
        return key_sums(Operand(self.feature_map, key, None, mask), value)

    def recall(self, x: Tensor, memory: Memory) -> Tensor:
        """Computes `forward(x, context=..., key_mask=...)` from a memory, without dropout.

        x is (batch * k, tokens, dim), with k consecutive rows for each of the `batch` sequences.
        """
        sequences = len(memory.key if isinstance(memory, KeyValues) else memory.context)
        rows, extra = divmod(len(x), max(1, sequences))
        if extra:
            raise ValueError(f"x must have a multiple of {sequences} sequences; got {len(x)}")
        tokens = x.reshape(sequences, rows * x.shape[1], self.dim)
        query = self.scaling(self._project(self.to_query, tokens))
        if isinstance(memory, KeyValues):
            out = softmax(query, memory.key, memory.value, None, memory.mask)
        else:
            assert self.feature_map is not None
            sums = query_sums(Operand(self.feature_map, query), memory)
            out = sums.extensive() if self.normalize == "none" else sums.ratio(self.floor)
        return self._join(out.to(query.dtype)).view_as(x)


class DecoderState(NamedTuple):
    """Decoding state: one memory of the other sequence per layer, and the state of the stack."""

    memory: list[Memory]
    stack: StackState | None = None


class Decoder(nn.Module):
    """Causal blocks with cross-attention between self-attention and the feed-forward network.

    This is the decoder of arXiv:1706.03762, section 3.1, fig. 1. NPRF (arXiv:2106.12566), section
    4.3, uses it with kernelized self- and cross-attention and a relative encoding.

    Args:
        dim: width of tokens; a multiple of `heads`.
        heads: number of attention heads.
        layers: number of blocks.
        attention_dropout: dropout rate of self- and cross-attention.
        stack: further arguments of `Stack` and `Attention`. Arguments of `Attention` apply to self-
            and cross-attention, except position and gate, which apply only to self-attention.
    """

    def __init__(
        self,
        dim: int = 128,
        heads: int = 8,
        layers: int = 4,
        *,
        attention_dropout: float = 0.0,
        **stack: Any,
    ) -> None:
        super().__init__()
        unused = {name: stack.pop(name, None) for name in ("refinements", "causal")}
        no_effect("in a decoder, which is causal and applied once", **unused)
        self.stack = Stack(
            dim, heads, layers, causal=True, attention_dropout=attention_dropout, **stack
        )
        # `dropout` in `stack` applies to the blocks
        shared = signature(Attention).parameters.keys() - {"dropout", *_SELF_ATTENTION_ONLY}
        options = {name: value for name, value in stack.items() if name in shared}
        if options.get("normalize") == "unmasked":  # equals "masked" without a position
            del options["normalize"]
        eps = self.stack._blocks()[0].attention_norm.eps
        self.cross = nn.ModuleList(
            CrossAttention(dim, heads, dropout=attention_dropout, **options) for _ in range(layers)
        )
        self.cross_norms = nn.ModuleList(nn.LayerNorm(dim, eps) for _ in range(layers))

    @property
    def decodes(self) -> bool:
        """True if `step` continues from a state instead of recomputing all tokens."""
        return self.stack.decodes

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        positions: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Applies the blocks to x as in `Stack.forward`, without changing its shape.

        Args:
            x: (batch, tokens, dim).
            context: (batch or 1, keys, dim), tokens of the other sequence.
            positions: (batch, tokens, l), for the encoding of self-attention, if any.
            context_mask: (batch or 1, keys) bool, True where a token of the other sequence exists.
        """
        check_width(self.stack.dim, self.cross, x=x, context=context)
        check_mask(context_mask, context.shape[:2], "context_mask")
        encoding = self.stack._evaluate(self.stack._encoded_for, x, positions, None)
        for block, cross, norm in self._layers():
            mixed = block.attention(block._normalized(x, block.attention_norm), encoding=encoding)
            x = block._residual(x, mixed, block.attention_norm)
            mixed = cross(block._normalized(x, norm), context=context, key_mask=context_mask)
            x = block._feed_forward(block._residual(x, mixed, norm))
        return self.stack.norm(x)

    def remember(self, context: Tensor, context_mask: Tensor | None = None) -> DecoderState:
        """Returns the state before the first token; see `forward` for the arguments."""
        return DecoderState([c.remember(context, context_mask) for _, c, _ in self._layers()])

    def step(
        self, x: Tensor, state: DecoderState, positions: Tensor | None = None
    ) -> tuple[Tensor, DecoderState]:
        """Applies all blocks to new tokens without recomputing earlier tokens.

        `forward(x, context)` equals `step(x, remember(context))[0]`, even in several steps.

        Args:
            x: (batch * k, new tokens, dim), with k consecutive rows for each remembered sequence.
            state: state returned by the previous call, or by `remember` at the start.
            positions: (batch * k or 1, new tokens, l), positions of the new tokens.
        """
        encoding, key_positions = self.stack._evaluate_new(x, positions, state.stack)
        states = [None] * len(self.cross) if state.stack is None else state.stack.blocks
        new_states: list[DecodeState] = []
        layers = zip(self._layers(), states, state.memory, strict=True)
        for (block, cross, norm), block_state, memory in layers:
            attention = cast(Attention, block.attention)
            normalized = block._normalized(x, block.attention_norm)
            mixed, new_state = attention.decode(normalized, state=block_state, encoding=encoding)
            new_states.append(new_state)
            x = block._residual(x, mixed, block.attention_norm)
            mixed = cross.recall(block._normalized(x, norm), memory)
            x = block._feed_forward(block._residual(x, mixed, norm))
        return self.stack.norm(x), state._replace(stack=StackState(key_positions, new_states))

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; see `Stack.redraw_`."""
        self.stack.redraw_(generator)
        for _, cross, _ in self._layers():
            cross.redraw_(generator)

    def _layers(self) -> list[tuple[Block, CrossAttention, nn.Module]]:
        layers = zip(self.stack.blocks, self.cross, self.cross_norms, strict=True)
        return cast(list[tuple[Block, CrossAttention, nn.Module]], list(layers))
