"""Transformer block, and a stack of blocks that is applied repeatedly."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack, cast

import torch
from torch import Tensor, nn

from molflt.attention.checks import (
    _head_width,
    at_least_one,
    from_options,
    known_names,
    no_effect,
    one_of,
)
from molflt.attention.encodings import Encoding
from molflt.attention.fnet import TOKEN_MIXERS, Mixer
from molflt.attention.keys import Keys, check_width, finite_positions, without_masked
from molflt.attention.layer import Attention
from molflt.attention.mixing.causal import DecodeState
from molflt.attention.positions import make_position
from molflt.attention.positions.base import Position, Positioned

_NormName = Literal["pre", "post"]
_ActivationName = Literal["gelu", "gelu_tanh"]
ATTENTION = "attention"

# The command line takes the choices of this option from its type.
if TYPE_CHECKING:
    MixerName = str
else:
    MixerName = Literal[(ATTENTION, *TOKEN_MIXERS)]

ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}  # torch's names for the approximations


class Redrawn(nn.Module):
    """Base class for models whose parts have random features."""

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place; use the same seed on every rank."""
        for part in self.children():
            if hasattr(part, "redraw_"):
                cast(Any, part).redraw_(generator)


class Block(nn.Module):
    """Transformer block: token mixing and a feed-forward network.

    Args:
        attention: attention layer or FNet mixer; its `dim` is the width of the block.
        ffn_dim: hidden width of the feed-forward network.
        dropout: dropout rate after attention and in the feed-forward network.
        norm: position of LayerNorm. "pre": x + Attention(LN x); "post": LN(x + Attention(x)), as in
            FNet (arXiv:2105.03824) and BERT.
        activation: "gelu", or "gelu_tanh", the tanh approximation with which FNet was trained.
        norm_eps: constant that LayerNorm adds to the variance.
    """

    def __init__(
        self,
        attention: Attention | Mixer,
        ffn_dim: int,
        dropout: float = 0.0,
        norm: _NormName = "pre",
        activation: _ActivationName = "gelu",
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        one_of("norm", norm, ("pre", "post"))
        one_of("activation", activation, ACTIVATIONS)
        at_least_one(ffn_dim=ffn_dim)
        dim = attention.dim
        self.attention = attention
        self.attention_norm = nn.LayerNorm(dim, norm_eps)
        self.ffn_norm = nn.LayerNorm(dim, norm_eps)
        gelu = nn.GELU(ACTIVATIONS[activation])
        self.ffn = nn.Sequential(
            nn.Linear(dim, ffn_dim), gelu, nn.Dropout(dropout), nn.Linear(ffn_dim, dim)
        )
        self.dropout = nn.Dropout(dropout)
        self.norm = norm

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        encoding: Encoding | None = None,
        **keys: Unpack[Keys],
    ) -> Tensor:
        """Applies the block; see `Attention.forward` for the arguments and the result."""
        check_width(self.attention.dim, self.ffn, x=x)
        normalized = self._normalized(x, self.attention_norm)
        mixed = self.attention(normalized, positions, encoding=encoding, **keys)
        return self._feed_forward(self._residual(x, mixed, self.attention_norm))

    def decode(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        state: DecodeState | None = None,
        *,
        encoding: Encoding | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, DecodeState]:
        """Applies the block to new tokens; see `Attention.decode`."""
        check_width(self.attention.dim, self.ffn, x=x)
        normalized = self._normalized(x, self.attention_norm)
        mixed, state = cast(Attention, self.attention).decode(
            normalized, positions, state, encoding=encoding, key_positions=key_positions
        )
        return self._feed_forward(self._residual(x, mixed, self.attention_norm)), state

    def _normalized(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Returns the input of a sublayer with the LayerNorm `norm`."""
        return norm(x) if self.norm == "pre" else x

    def _residual(self, x: Tensor, update: Tensor, norm: nn.Module) -> Tensor:
        """Returns the residual sum of a sublayer with the LayerNorm `norm`."""
        x = x + self.dropout(update)
        return x if self.norm == "pre" else norm(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._residual(x, self.ffn(self._normalized(x, self.ffn_norm)), self.ffn_norm)


class StackState(NamedTuple):
    """Decoding states of all blocks in all passes and, for softmax, positions of decoded tokens."""

    positions: Tensor | None
    blocks: list[DecodeState]


class Stack(Positioned):
    """Stack of blocks, applied once or several times with the same weights and the same encoding.

    The output of each pass is the input of the next pass (`refinements` passes), as in
    3D-Graphormer (arXiv:2203.04810) and FLT's OC20 experiment. The encoding is evaluated only once.

    Args:
        dim: width of tokens; a multiple of `heads`.
        heads: number of attention heads.
        layers: number of distinct layers.
        ffn_dim: hidden width of the feed-forward networks.
        refinements: number of passes through the layers, with shared weights.
        norm: "pre" or "post"; see `Block`.
        activation: activation of the feed-forward networks; see `Block`.
        norm_eps: constant that LayerNorm adds to the variance.
        mixer: token mixer: "attention", or a key of `TOKEN_MIXERS`, such as "fourier" for FNet
            (arXiv:2105.03824).
        mixer_options: further arguments of the mixer.
        attention_layers: number of final layers that use attention instead of the mixer, 0 by
            default; FNet's hybrid model has 2 (section 4.1).
        dropout: dropout rate in the blocks.
        attention_dropout: see `Attention`.
        position: encoding, shared by all layers and separate for each head: "none", a key of
            `POSITIONS`, or a `Position`.
        position_options: further arguments of the encoding if `position` is a name.
        attention: further arguments of `Attention`.
    """

    def __init__(
        self,
        dim: int = 128,
        heads: int = 8,
        layers: int = 4,
        *,
        ffn_dim: int = 256,
        refinements: int = 1,
        norm: _NormName = "pre",
        activation: _ActivationName = "gelu",
        norm_eps: float = 1e-5,
        mixer: MixerName = "attention",
        mixer_options: Mapping[str, object] | None = None,
        attention_layers: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        position: str | Position | None = "none",
        position_options: Mapping[str, object] | None = None,
        **attention: Any,
    ) -> None:
        known_names(Stack, attention, Attention)
        if isinstance(position, str):
            width = _head_width(dim, heads)
            mixing = attention.get("mixing", "linear")
            options = position_options or {}
            position = make_position(position, heads, width, mixing=mixing, **options)
        else:
            no_effect("if position is a module", position_options=position_options)
        num_mixers = _count_mixers(
            layers, mixer, mixer_options, attention_layers, attention_dropout, attention
        )
        blocks = []
        for number in range(layers):
            layer: Attention | Mixer
            if number < num_mixers:
                given = mixer_options or {}
                layer = from_options(TOKEN_MIXERS[mixer], given, "mixer_options.", dim=dim)
            else:
                # a direct call, from which jsonargparse reads the options of the command line
                layer = Attention(
                    dim, heads, position=position, dropout=attention_dropout, **attention
                )
            blocks.append(Block(layer, ffn_dim, dropout, norm, activation, norm_eps))
        self._assemble(blocks, position, refinements)

    @classmethod
    def of(
        cls, blocks: Sequence[Block], position: Position | None = None, refinements: int = 1
    ) -> Self:
        """Builds a stack from existing blocks with attention or mixers.

        `position` is the encoding with which their attention layers were built, or None.
        """
        stack = cls.__new__(cls)
        stack._assemble(blocks, position, refinements)
        return stack

    def _assemble(
        self, blocks: Sequence[Block], position: Position | None, refinements: int
    ) -> None:
        super().__init__(None)
        if not blocks or refinements < 1:
            raise ValueError(
                f"expected at least one block and pass; got layers={len(blocks)}, {refinements=}"
            )
        attentions = [b.attention for b in blocks if isinstance(b.attention, Attention)]
        name = type(position).__name__
        if position is not None and not attentions:
            raise ValueError(f"{name} needs attention, which no block has; remove it")
        for number, attention in enumerate(attentions):
            if attention.position is not position:
                raise ValueError(
                    "Attention(position=...) and Stack.of(blocks, position) need the same object; "
                    f"got {type(attention.position).__name__} in block {number}, and {name}"
                )
            attention.share_position()
        self.blocks = nn.ModuleList(blocks)
        self.dim = blocks[0].attention.dim
        self.position = position
        self.refinements = refinements
        self.mixings = sorted({attention.mixing for attention in attentions})
        self._encoded_for = attentions[0].encoded_for if attentions else "linear"
        post, eps = blocks[-1].norm == "post", blocks[0].attention_norm.eps
        self.norm = nn.Identity() if post else nn.LayerNorm(self.dim, eps)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        **keys: Unpack[Keys],
    ) -> Tensor:
        """Applies all passes and, unless `norm` is "post", a final LayerNorm.

        Args:
            x: (batch, tokens, dim), as the result.
            positions: (batch, tokens, l), centered for each graph; for the encoding, if any.
            key_positions: (batch, keys, l), relative to the same center; required with `key_index`,
                and by default the positions of the queries.
            keys: key_mask, key_weight and key_index; see `Keys`.
        """
        mask = keys.get("key_mask")
        x, _ = without_masked(x, mask, keys.get("key_index"))
        positions, key_positions = finite_positions(positions, key_positions, keys)
        encoding = self._evaluate(self._encoded_for, x, positions, key_positions)
        for _ in range(self.refinements):
            x = self.one_pass(x, encoding, **keys)
        return self.norm(x)

    def one_pass(self, x: Tensor, encoding: Encoding | None, **keys: Unpack[Keys]) -> Tensor:
        """Applies all blocks once, without the final LayerNorm, using a precomputed encoding."""
        for block in self._blocks():
            uses_encoding = isinstance(block.attention, Attention)
            x = block(x, encoding=encoding if uses_encoding else None, **keys)
        return x

    def decode(
        self, x: Tensor, positions: Tensor | None = None, state: StackState | None = None
    ) -> tuple[Tensor, StackState]:
        """Applies all causal passes to new tokens; see `Attention.decode`."""
        encoding, key_positions = self._evaluate_new(x, positions, state)
        blocks = self._blocks() * self.refinements
        states = [None] * len(blocks) if state is None else state.blocks
        new_states: list[DecodeState] = []
        for block, block_state in zip(blocks, states, strict=True):
            x, new_state = block.decode(x, state=block_state, encoding=encoding)
            new_states.append(new_state)
        return self.norm(x), StackState(key_positions, new_states)

    def _evaluate_new(
        self, x: Tensor, positions: Tensor | None, state: StackState | None
    ) -> tuple[Encoding | None, Tensor | None]:
        """Returns the encoding of new tokens that follow a state, and the positions to remember."""
        key_positions = positions
        past = None if state is None else state.positions
        if self._encoded_for == "softmax" and past is not None and positions is not None:
            # Linear attention needs only the new keys.
            rows = max(len(past), len(positions))  # 1, or one row for each sequence
            key_positions = torch.cat([r.expand(rows, -1, -1) for r in (past, positions)], dim=1)
        return self._evaluate(self._encoded_for, x, positions, key_positions), key_positions

    @property
    def decodes(self) -> bool:
        """True if `decode` continues from a state instead of recomputing all tokens."""
        position = self.position
        return (position is None or position.decodes) and "quadratic" not in self.mixings

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Redraws the random features of all blocks and the noise of the position in place."""
        if self.position is not None and self.position.redraws:
            self.position.redraw_(generator)
        for block in self._blocks():
            block.attention.redraw_(generator)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))


def _count_mixers(
    layers: int,
    mixer: str,
    mixer_options: Mapping[str, object] | None,
    attention_layers: int | None,
    attention_dropout: float,
    attention: Mapping[str, object],
) -> int:
    """Returns the number of initial layers that use the mixer instead of attention."""
    one_of("mixer", mixer, (ATTENTION, *TOKEN_MIXERS))
    if mixer == ATTENTION:
        why = f"with mixer={ATTENTION!r}"
        no_effect(why, mixer_options=mixer_options, attention_layers=attention_layers)
        return 0
    count = attention_layers or 0
    if not 0 <= count < max(layers, 1):
        raise ValueError(f"attention_layers must be 0 to {layers - 1} for {layers=}; got {count}")
    if attention.get("causal"):
        raise ValueError(f"mixer={mixer!r} mixes all tokens and needs causal=False; got True")
    if not count:
        defaults = signature(Attention).parameters
        changed = {name: x for name, x in attention.items() if x != defaults[name].default}
        no_effect(
            f"with mixer={mixer!r} and no attention_layers",
            **changed,
            attention_dropout=attention_dropout or None,
        )
    return layers - count
