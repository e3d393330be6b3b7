"""Equivariant messages between neighbors: what surrounds each atom, angles included."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from molflt.graph.geometry import _sum_by
from molflt.graph.near import in_pieces
from molflt.graph.neighbors import Neighbors
from molflt.graph.radial import radial_waves, softened

_NUM_BASIS = 8
_SCALE = 0.25  # of sums over some 16 neighbors: tokens keep their size


class _Edges(NamedTuple):
    """Pairs of neighbors as messages see them."""

    center: Tensor
    """(pairs,) atom index"""
    neighbor: Tensor
    """(pairs,) atom index"""
    basis: Tensor
    """(pairs, functions) of the distance, 0 with all derivatives at the cutoff"""
    direction: Tensor
    """(pairs, 3, 1), from center to neighbor, of length 1 from 0.1 Å on"""


class EquivariantMessages(nn.Module):
    """PaiNN's interactions and updates (arXiv:2102.03150, eqs. 7 to 10, fig. 2).

    Each atom has invariant tokens s and, from the first layer on, vectors v that turn with the
    structure. A neighbor j adds s_j' f(|r_ij|) to s_i and v_j g(|r_ij|) + s_j' h(|r_ij|) r_ij /
    |r_ij| to v_i; then lengths and products of an atom's vectors enter its tokens, which makes them
    depend on angles. Filters f, g, h end smoothly, with all derivatives, at the cutoff.

    Args:
        dim: width of tokens and number of vectors.
        layers: interactions with an update each; atoms see as many cutoffs far.
        cutoff: radius of the neighborhood, Å.
    """

    def __init__(self, dim: int, layers: int, cutoff: float) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.layers = nn.ModuleList(_Interaction(dim, first=i == 0) for i in range(layers))

    def forward(self, tokens: Tensor, neighbors: Neighbors) -> Tensor:
        """Tokens (atoms, dim) and pairs to tokens that know of their neighborhoods."""
        basis = radial_waves(neighbors.distance, _NUM_BASIS, self.cutoff)
        # goes to 0, not to NaN, where two atoms approach one place
        square = neighbors.vector.square().sum(dim=-1, keepdim=True)
        direction = neighbors.vector / softened(square).sqrt()
        shared = basis.to(tokens.dtype), direction.to(tokens.dtype)[..., None]
        edges = _Edges(neighbors.center, neighbors.neighbor, *shared)
        vectors = None
        for layer in self.layers:
            tokens, vectors = layer(tokens, vectors, edges)
        return tokens


class _Interaction(nn.Module):
    """One layer; the first finds no vectors."""

    def __init__(self, dim: int, first: bool) -> None:
        super().__init__()
        parts = 2 if first else 3
        self.norm = nn.LayerNorm(dim)
        self.message = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, parts * dim))
        self.filter = nn.Linear(_NUM_BASIS, parts * dim, bias=False)
        self.project = nn.Linear(dim, 2 * dim, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, 3 * dim))

    def forward(
        self, tokens: Tensor, vectors: Tensor | None, edges: _Edges
    ) -> tuple[Tensor, Tensor]:
        """Tokens (atoms, dim) and vectors (atoms, 3, dim) to the next ones."""
        message = self.message(self.norm(tokens)) * _SCALE
        for more_tokens, more_vectors in in_pieces(self._sums, edges, message, vectors):
            tokens = tokens + more_tokens
            vectors = more_vectors if vectors is None else vectors + more_vectors
        assert vectors is not None
        first, second = self.project(vectors).chunk(2, dim=-1)
        length = (second.square().sum(dim=-2) + 1).sqrt() - 1  # without a kink at 0
        gates = self.update(torch.cat((self.norm(tokens), length), dim=-1))
        own, product, turn = gates.chunk(3, dim=-1)
        tokens = tokens + own + product * (first * second).sum(dim=-2)
        return tokens, vectors + turn.unsqueeze(-2) * first

    def _sums(
        self, edges: _Edges, message: Tensor, vectors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Contribution of some pairs to tokens, (atoms, dim), and to vectors, (atoms, 3, dim)."""
        center, neighbor, basis, direction = edges
        filtered = self.filter(basis) * message.index_select(0, neighbor)
        scalar, along, *turned = filtered.chunk(2 if vectors is None else 3, dim=-1)
        added = along[:, None] * direction
        if vectors is not None:
            added = torch.addcmul(added, turned[0][:, None], vectors.index_select(0, neighbor))
        return _sum_by(scalar, center, len(message)), _sum_by(added, center, len(message))
