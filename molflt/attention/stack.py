"""The Transformer block, and a stack of blocks with refinement."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from molflt.attention.causal import DecodeState
from molflt.attention.encoding import Encoding, Position
from molflt.attention.fourier import Mixer
from molflt.attention.kernels import head_width, one_of
from molflt.attention.layer import Attention
from molflt.attention.positions import make_position

NORMS = ("pre", "post")


class Block(nn.Module):
    """Transformer block of token mixing and feed-forward network.

    Args:
        attention: the attention layer, or a mixer of FNet; its `dim` is the width of the block.
        ffn_dim: hidden width of the feed-forward network (GELU).
        dropout: probability of dropout after attention and in the feed-forward network.
        norm: where LayerNorm stands. "pre": x + Attention(LN x); "post": LN(x + Attention(x)), as
            in FNet (arXiv:2105.03824) and BERT.
    """

    def __init__(
        self, attention: Attention | Mixer, ffn_dim: int, dropout: float = 0.0, norm: str = "pre"
    ) -> None:
        super().__init__()
        one_of("norm", norm, NORMS)
        dim = attention.dim
        self.attention = attention
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(
            nn.Linear(dim, ffn_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(ffn_dim, dim)
        )
        self.dropout = nn.Dropout(dropout)
        self.norm = norm

    def forward(
        self,
        x: Tensor,
        encoding: Encoding | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
    ) -> Tensor:
        """Arguments and result as for `Attention.forward`."""
        mixed = self.attention(self._before(x), encoding, key_mask, key_index)
        return self._after(x, mixed)

    def decode(
        self, x: Tensor, encoding: Encoding | None = None, state: DecodeState | None = None
    ) -> tuple[Tensor, DecodeState]:
        """Arguments and result as for `Attention.decode`."""
        if not isinstance(self.attention, Attention):
            raise ValueError(
                f"{type(self.attention).__name__} mixes all tokens at once and cannot decode; use "
                "causal attention"
            )
        mixed, state = self.attention.decode(self._before(x), encoding, state)
        return self._after(x, mixed), state

    def _before(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention_norm(x) if self.norm == "pre" else x
        return out

    def _after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.dropout(mixed)
        if self.norm == "pre":
            out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
            return out
        x = self.attention_norm(x)
        out = self.ffn_norm(x + self.dropout(self.ffn(x)))
        return out


class StackState(NamedTuple):
    """Decode states of all blocks in all passes, and the positions of the tokens so far."""

    positions: Tensor
    """(batch, tokens, l)"""
    blocks: list[DecodeState]


class Stack(nn.Module):
    """Distinct blocks, applied several times with shared weights, one mask for all of them.

    The output of each pass is fed back as the input of the next (`refinements` passes), as in
    3D-Graphormer (arXiv:2203.04810) and FLT's OC20 experiment. The encoding is evaluated once.

    Args:
        blocks: the distinct layers. FNet's hybrid is mixers with attention in the last blocks.
        position: positional encoding shared by all blocks, or None.
        refinements: number of passes.
    """

    def __init__(
        self, blocks: Sequence[Block], position: Position | None = None, refinements: int = 1
    ) -> None:
        super().__init__()
        if not blocks or refinements < 1:
            raise ValueError(
                f"a Stack needs at least one block and one pass; got layers={len(blocks)}, "
                f"refinements={refinements}"
            )
        self.blocks = nn.ModuleList(blocks)
        self.position = position
        self.refinements = refinements
        attentions = [b.attention for b in blocks if isinstance(b.attention, Attention)]
        if position is not None and not attentions:
            raise ValueError(
                f"{type(position).__name__} needs attention, and no block has any; leave it out"
            )
        self.mixings = sorted({attention.mixing for attention in attentions})
        post = blocks[-1].norm == "post"
        self.norm = nn.Identity() if post else nn.LayerNorm(blocks[0].attention.dim)

    def forward(
        self,
        x: Tensor,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
    ) -> Tensor:
        """Refines tokens.

        Args:
            x: (batch, tokens, dim).
            query_positions: (batch, tokens, l), centred per graph; needed by a position module.
            key_positions: (batch, keys, l), from the same centre; the queries' if None.
            key_mask: (batch, keys), True where a key exists.
            key_index: (batch, keys), as in `Attention.forward`.

        Returns:
            (batch, tokens, dim), normalized by a last LayerNorm.
        """
        if key_positions is None:
            key_positions = query_positions
        encodings = {}
        if self.position is not None:
            if query_positions is None or key_positions is None:
                raise ValueError(
                    f"{type(self.position).__name__} needs positions; pass them, (batch, tokens, "
                    f"{self.position.dim})"
                )
            for mixing in self.mixings:
                encodings[mixing] = self.position(mixing, query_positions, key_positions)
        for _ in range(self.refinements):
            x = self.one_pass(x, encodings, key_mask, key_index)
        out: Tensor = self.norm(x)
        return out

    def one_pass(
        self,
        x: Tensor,
        encodings: Mapping[str, Encoding],
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
    ) -> Tensor:
        """All blocks once, without the last LayerNorm: for models that act between passes.

        Args:
            x: (batch, tokens, dim).
            encodings: evaluated for each of `mixings`, or empty.
            key_mask: as for `forward`.
            key_index: as for `forward`.
        """
        keys = x.shape[1] if key_index is None else key_index.shape[1]
        shared = dict(encodings)
        for block in self._blocks():
            mixing = block.attention.mixing
            if mixing in shared and isinstance(block.attention, Attention):
                shared[mixing] = block.attention.prepared(shared[mixing], x.shape[1], keys)
            x = block(x, shared.get(mixing), key_mask, key_index)
        return x

    def decode(
        self, x: Tensor, positions: Tensor, state: StackState | None = None
    ) -> tuple[Tensor, StackState]:
        """Causal refinement of new tokens; see `Attention.decode`.

        Args:
            x: (batch, new tokens, dim).
            positions: (batch, new tokens, l), of the new tokens.
            state: returned by the call before; None at the beginning.

        Raises:
            ValueError: for mechanisms without a state to decode from.
        """
        if self.position is not None and not self.position.decodes:
            raise ValueError(
                f"{type(self.position).__name__} leaves no state of constant size to decode from; "
                "call forward on the whole sequence, or choose a spectral position"
            )
        so_far = positions
        if "softmax" in self.mixings and state is not None:  # linear attention needs the new ones
            so_far = torch.cat((state.positions, positions), dim=1)
        encodings = {}
        if self.position is not None:
            for mixing in self.mixings:
                keys = so_far if mixing == "softmax" else positions
                encodings[mixing] = self.position(mixing, positions, keys)
        before = iter(state.blocks) if state is not None else None
        after: list[DecodeState] = []
        for _ in range(self.refinements):
            for block in self._blocks():
                encoding = encodings.get(block.attention.mixing)
                x, last = block.decode(x, encoding, None if before is None else next(before))
                after.append(last)
        return self.norm(x), StackState(so_far, after)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features of every block in place, and the noise of stochastic encodings.

        Nodes of a spectral mask stay as they are: the mask is learned with them.
        """
        if self.position is not None and self.position.redraws:
            self.position.redraw_(generator)
        for block in self._blocks():
            block.attention.redraw_(generator)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))


def make_stack(
    dim: int = 128,
    heads: int = 8,
    layers: int = 4,
    ffn_dim: int = 256,
    refinements: int = 1,
    norm: str = "pre",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    position: str = "none",
    position_options: dict[str, Any] | None = None,
    **attention: Any,
) -> Stack:
    """Blocks of attention with one positional encoding, from names and numbers.

    Args:
        dim: width of tokens; a multiple of `heads`.
        heads: attention heads.
        layers: distinct layers.
        ffn_dim: hidden width of the feed-forward networks.
        refinements: passes through the layers with shared weights.
        norm: "pre" or "post", see `Block`.
        dropout: dropout of blocks.
        attention_dropout: see `Attention`.
        position: "none" or a key of `POSITIONS`, shared by all layers, different for each head.
        position_options: further arguments of the encoding.
        attention: further arguments of `Attention`.

    Raises:
        ValueError: an unknown choice, or choices that do not go together.
    """
    width = head_width(dim, heads)
    encoding = make_position(position, heads, width, **(position_options or {}))
    blocks = []
    for _ in range(layers):
        layer = Attention(dim, heads, position=encoding, dropout=attention_dropout, **attention)
        blocks.append(Block(layer, ffn_dim, dropout, norm))
    return Stack(blocks, encoding, refinements)
