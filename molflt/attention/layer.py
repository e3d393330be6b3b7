"""Attention, the pre-LayerNorm Transformer block, and a stack of blocks with refinement."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention import mixing
from molflt.attention.feature_maps import FEATURE_MAPS, FeatureMap
from molflt.attention.positions import SpectralPosition

MIXINGS = ("linear", "quadratic", "softmax")


class Encoding(NamedTuple):
    """A relative positional encoding evaluated for one batch; the face that the mixing needs."""

    factors: tuple[Tensor, Tensor] | None = None  # N1 (b, h, queries, 2r), N2 (b, h, keys, 2r)
    bias: Tensor | None = None  # (b, h, queries, keys)


def encode(
    position: SpectralPosition | None, mixing: str, query_positions: Tensor, key_positions: Tensor
) -> Encoding:
    """Evaluates a position module: the exact mask for softmax, else its factors.

    Args:
        position: the module, or None for attention without positions.
        mixing: one of `MIXINGS`.
        query_positions: (batch, queries, l), centred per graph.
        key_positions: (batch, keys, l), from the same centre.
    """
    if position is None:
        return Encoding()
    if mixing == "softmax":
        return Encoding(bias=position.bias(query_positions[:, :, None] - key_positions[:, None]))
    return Encoding(factors=position.factors(query_positions, key_positions))


class Attention(nn.Module):
    """Multi-head attention with a relative positional encoding in additive placement.

    Kernelized: A_ij = phi(q^_i) . phi(k^_j) with q^ = [N1, q d^(-1/4)], k^ = [N2, k d^(-1/4)], FLT
    (arXiv:2302.01925), eq. 3. Softmax: A_ij = exp(q_i . k_j / sqrt(d) + f(r_i - r_j)), eq. 1.

    Args:
        dim: width of tokens; a multiple of `heads`.
        heads: number of heads.
        mixing: "linear" (O(N)), "quadratic" (the same through the N x N matrix) or "softmax".
        feature_map: key of `FEATURE_MAPS`; not used by softmax.
        num_features: random or learned features m per head.
        projection: how random features are drawn, key of `PROJECTIONS`.
        position_width: columns that the factors of the encoding append (`position.width`).
        normalize_qk: divide queries and keys by their norms, logits in [-1, 1] (NPRF,
            arXiv:2106.12566, section 3.3).
        dropout: attention dropout. Softmax drops single weights; kernelized attention, which has
            no single weights, drops whole keys per head.

    Raises:
        ValueError: an unknown choice, or `dim` is no multiple of `heads`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mixing: str = "linear",
        feature_map: str = "positive",
        num_features: int = 64,
        projection: str = "orthogonal",
        position_width: int = 0,
        normalize_qk: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} must be a multiple of heads={heads}; change one of them")
        if mixing not in MIXINGS:
            raise ValueError(f"mixing={mixing!r} is unknown; expected one of {', '.join(MIXINGS)}")
        if feature_map not in FEATURE_MAPS:
            raise ValueError(
                f"feature_map={feature_map!r} is unknown; expected one of {', '.join(FEATURE_MAPS)}"
            )
        self.dim = dim
        self.heads = heads
        self.mixing = mixing
        self.normalize_qk = normalize_qk
        self.dropout = dropout
        self.to_query = nn.Linear(dim, dim)
        self.to_key = nn.Linear(dim, dim)
        self.to_value = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.feature_map: FeatureMap | None = None
        if mixing != "softmax":
            self.feature_map = FEATURE_MAPS[feature_map](
                dim // heads + position_width, heads, num_features, projection
            )

    def forward(
        self,
        x: Tensor,
        encoding: Encoding | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
    ) -> Tensor:
        """Mixes tokens.

        Args:
            x: (batch, tokens, dim).
            encoding: result of `encode`.
            key_mask: (batch, keys), True where a key exists.
            key_index: (batch, keys), the token that each key copies; by default key j is token j.
                Periodic images of an atom are keys with the atom's index and their own positions.

        Returns:
            (batch, tokens, dim).
        """
        encoding = encoding or Encoding()
        query, key, value = self._split(x, key_index)
        mask = None if key_mask is None else key_mask[:, None]
        if self.feature_map is None:
            dropout = self.dropout if self.training else 0.0
            out = mixing.softmax(query, key, value, encoding.bias, mask, dropout)
        else:
            if self.training and self.dropout:
                mask = _drop_keys(key, mask, self.dropout)
            query, key = self._features(query, key, encoding, mask)
            mix = mixing.linear if self.mixing == "linear" else mixing.quadratic
            out = mix(query, key, value)
        return self.to_out(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, key_index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries and keys, and values: (batch, heads, tokens, d) each."""
        d = self.dim // self.heads
        query, key, value = (
            to(x).unflatten(-1, (self.heads, d)).transpose(1, 2)
            for to in (self.to_query, self.to_key, self.to_value)
        )
        if self.normalize_qk:
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        else:
            query, key = query * d**-0.25, key * d**-0.25
        if key_index is not None:
            index = key_index[:, None, :, None].expand(-1, self.heads, -1, d)
            key, value = key.gather(2, index), value.gather(2, index)
        return query, key, value

    def _features(
        self, query: Tensor, key: Tensor, encoding: Encoding, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """phi of [N1, q] and [N2, k], in float32 at least."""
        if self.feature_map is None:
            raise RuntimeError("softmax attention has no features")
        with torch.autocast(query.device.type, enabled=False):
            query, key = mixing.at_least_float32(query), mixing.at_least_float32(key)
            if encoding.factors is not None:
                left, right = encoding.factors
                query = torch.cat((left.to(query.dtype), query), dim=-1)
                key = torch.cat((right.to(key.dtype), key), dim=-1)
            features: tuple[Tensor, Tensor] = self.feature_map(query, key, mask)
            return features

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features in place (see `FeatureMap.redraw_`)."""
        if self.feature_map is not None:
            self.feature_map.redraw_(generator)

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return f"dim={self.dim}, heads={self.heads}, mixing={self.mixing!r}"


def _drop_keys(key: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    """Random (batch, heads, keys) mask; the normalizer makes rescaling by 1 / (1 - rate) moot."""
    kept = torch.rand(key.shape[:-1], device=key.device) >= rate
    return kept if mask is None else kept & mask


class Block(nn.Module):
    """Pre-LayerNorm Transformer block: x + Attention(LN x), then x + FFN(LN x).

    Args:
        attention: the attention layer; its `dim` is the width of the block.
        ffn_dim: hidden width of the feed-forward network (GELU).
        dropout: probability of dropout after attention and in the feed-forward network.
    """

    def __init__(self, attention: Attention, ffn_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        dim = attention.dim
        self.attention = attention
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(
            nn.Linear(dim, ffn_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(ffn_dim, dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        encoding: Encoding | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
    ) -> Tensor:
        """Arguments and result as for `Attention.forward`."""
        mixed = self.attention(self.attention_norm(x), encoding, key_mask, key_index)
        x = x + self.dropout(mixed)
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class Stack(nn.Module):
    """Distinct blocks, applied several times with shared weights, one mask for all of them.

    The output of each pass is fed back as the input of the next (`refinements` passes), as in
    3D-Graphormer (arXiv:2203.04810) and FLT's OC20 experiment. The encoding is evaluated once.

    Args:
        blocks: the distinct layers.
        position: relative encoding shared by all blocks, or None.
        refinements: number of passes.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        position: SpectralPosition | None = None,
        refinements: int = 1,
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
        attention = blocks[0].attention
        self.mixing = attention.mixing
        self.norm = nn.LayerNorm(attention.dim)

    def forward(
        self,
        x: Tensor,
        query_positions: Tensor,
        key_positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        key_index: Tensor | None = None,
    ) -> Tensor:
        """Refines tokens.

        Args:
            x: (batch, tokens, dim).
            query_positions: (batch, tokens, l), centred per graph.
            key_positions: (batch, keys, l), from the same centre; the queries' if None.
            key_mask: (batch, keys), True where a key exists.
            key_index: (batch, keys), as in `Attention.forward`.

        Returns:
            (batch, tokens, dim), normalized by a last LayerNorm.
        """
        if key_positions is None:
            key_positions = query_positions
        encoding = encode(self.position, self.mixing, query_positions, key_positions)
        for _ in range(self.refinements):
            for block in self.blocks:
                x = block(x, encoding, key_mask, key_index)
        out: Tensor = self.norm(x)
        return out

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features of every block in place; nodes of the mask stay as they are."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.redraw_(generator)
