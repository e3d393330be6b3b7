"""What a relative positional encoding is to the mixing: its evaluated face and its base class."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from molflt.attention.parts import Part

MIXINGS = ("linear", "quadratic", "softmax")


class Pairs(NamedTuple):
    """What is added to the positional kernel of single pairs, a sparse matrix per head."""

    batch: Tensor
    """(pairs,)"""
    query: Tensor
    """(pairs,) index of the query"""
    key: Tensor
    """(pairs,) index of the key; a pair may appear several times"""
    weight: Tensor
    """(heads or 1, pairs)"""
    exact: tuple[Tensor, Tensor] | None = None
    """f (heads, pairs) and s (pairs,): s exp(q_i . k_j + f) is added to A_ij beside it"""

    def dense(self, batch: int, queries: int, keys: int) -> Tensor:
        """(batch, heads or 1, queries, keys)."""
        flat = (self.batch * queries + self.query) * keys + self.key
        out = self.weight.new_zeros(len(self.weight), batch * queries * keys)
        return out.index_add(1, flat, self.weight).view(-1, batch, queries, keys).transpose(0, 1)


class Encoding(NamedTuple):
    """A positional encoding evaluated for one batch. Fields that a mechanism does not use are None.

    b is the batch or 1, h the heads or 1.
    """

    bias: Tensor | None = None
    """f(r_i - r_j), added to the logits of softmax: (b, h, queries, keys)"""
    factors: tuple[Part, Part] | None = None
    """N1 (b, h, queries, 2r), N2 (b, h, keys, 2r), appended to queries and keys (FLT); or random
    projections of them"""
    kernel: tuple[Tensor, Tensor] | None = None
    """U (b, h, queries, p), V (b, h, keys, p): phi_i . phi_j is multiplied by U_i . V_j"""
    pairs: Pairs | None = None
    """added to U_i . V_j: the near field"""
    toeplitz: Tensor | None = None
    """log c of a kernel on a grid, multiplied likewise: see `molflt.attention.toeplitz`"""
    transform: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """maps scaled queries and keys, (batch, heads, tokens, d), to those that are compared"""
    matrix: Tensor | None = None
    """the kernel and its pairs as one matrix, formed once for all layers that want it"""

    def dense_kernel(self) -> Tensor | None:
        """U V^T and the pairs as one matrix, (b, h, queries, keys); None without a kernel."""
        if self.kernel is None or self.matrix is not None:
            return self.matrix
        left, right = self.kernel
        kernel = left @ right.transpose(-1, -2)
        if self.pairs is None:
            return kernel
        batch, _, queries, keys = kernel.shape
        return kernel + self.pairs.dense(batch, queries, keys)


class Position(nn.Module):
    """Base class of positional encodings.

    A new one overrides `forward`, says in its class attributes what it can do, and gets a line in
    `POSITIONS`.

    Attributes:
        dim: dimension l of the positions that it takes.
        mixings: those of `MIXINGS` that can use it.
        causal: whether causal attention can use it.
        decodes: whether it leaves linear causal attention a state of constant size.
        redraws: whether its randomness estimates something and should be drawn anew in training, as
            that of random features; nodes of a spectrum are part of what is learned and stay.
        grid: whether tokens must lie on a regular grid in order, so that they cannot be permuted.
    """

    dim: int = 1
    mixings: tuple[str, ...] = MIXINGS
    causal = True
    decodes = True
    redraws = False
    grid = False

    def width(self, head_dim: int) -> int:
        """Width of the queries and keys that reach the feature map, from their own d."""
        return head_dim

    def forward(self, mixing: str, query_positions: Tensor, key_positions: Tensor) -> Encoding:
        """Evaluates the encoding.

        Args:
            mixing: one of `mixings`.
            query_positions: (batch, queries, l).
            key_positions: (batch, keys, l); the same object as the queries' where they are equal.
        """
        raise NotImplementedError

    def expect(self, mixing: str, causal: bool, gate: bool) -> None:
        """Raises ValueError if attention with these choices cannot use the encoding."""
        name = type(self).__name__
        if mixing not in self.mixings:
            raise ValueError(
                f"{name} does not go with mixing={mixing!r}; expected one of "
                f"{', '.join(self.mixings)}; change one of them"
            )
        if causal and not self.causal:
            raise ValueError(f"{name} has no causal form; use causal=False or another position")
        if gate and not self.decodes:
            raise ValueError(f"gate=True needs a running state, which {name} has not; drop one")

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new randomness in place, if there is any; seed the generator alike on all ranks."""


def differences(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """r_i - r_j: (batch, queries, l), (batch, keys, l) -> (batch, queries, keys, l)."""
    return query_positions[:, :, None] - key_positions[:, None]
