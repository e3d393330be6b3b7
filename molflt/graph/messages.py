"""Equivariant messages between neighbors, which describe atomic environments including angles."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from molflt.graph.dense import atom_mask, padded, places_of
from molflt.graph.geometry import Geometry, _sum_by
from molflt.graph.neighbors import Neighbors, in_pieces
from molflt.graph.radial import radial_waves, softened

_NUM_BASIS = 8
_SCALE = 0.25  # 1 / sqrt(16); normalizes sums over about 16 neighbors
_SPARSEST = 8  # largest number of matrix elements per pair; beyond it, pairs are gathered


class _Edges(NamedTuple):
    """Pairs of atom indices with functions of their distances."""

    center: Tensor
    neighbor: Tensor
    basis: Tensor
    """(pairs, functions)"""
    direction: Tensor
    """(pairs, 3, 1), from center to neighbor; unit vectors beyond 0.1 Å"""


class _Matrices(NamedTuple):
    """Coefficients of sums over pairs, as one matrix per graph; faster for small graphs."""

    invariant: Tensor
    """(graphs, size, functions * size), functions of the distance by center and neighbor"""
    directed: Tensor
    """(graphs, size * 3, functions * size), the same functions times the direction"""
    mask: Tensor
    """(graphs, size) bool, True where an atom exists; `size` is that of the largest graph"""
    places: Tensor
    """(atoms,), indices of the atoms into the flattened mask"""

    @classmethod
    def of(cls, edges: _Edges, geometry: Geometry) -> "_Matrices | None":
        """Builds matrices; returns None in compiled code or if elements far outnumber pairs."""
        if torch.compiler.is_compiling():
            return None
        mask = atom_mask(geometry)
        graphs, size = mask.shape
        if graphs * size**2 > _SPARSEST * len(edges.center):
            return None
        places = places_of(geometry, mask)
        elements = places[edges.center] * size + places[edges.neighbor] % size

        def summed(of_pairs: Tensor) -> Tensor:
            """Sums over images: (pairs, k, functions) -> (graphs, size * k, functions * size)."""
            sums = _sum_by(of_pairs, elements, graphs * size**2)
            sums = sums.unflatten(0, (graphs, size, size))  # [graph, center, neighbor, k, function]
            return sums.movedim(2, 4).flatten(3, 4).flatten(1, 2)

        basis = edges.basis[:, None]
        return cls(summed(basis), summed(basis * edges.direction), mask, places)

    def padded(self, x: Tensor) -> Tensor:
        """Pads graphs: (atoms, width) -> (graphs, 1, size, width)."""
        return padded(x, self.mask, self.places)[:, None]

    def rows(self, x: Tensor) -> Tensor:
        """Removes padding: (graphs, size, ...) -> (atoms, ...)."""
        return x.flatten(0, 1).index_select(0, self.places)


class EquivariantMessages(nn.Module):
    """PaiNN's interactions and updates (arXiv:2102.03150, eqs. 7 to 10, fig. 2).

    Each atom has invariant tokens s and, after the first layer, vectors v that rotate with the
    structure. A neighbor j adds s_j' f(|r_ij|) to s_i and v_j g(|r_ij|) + s_j' h(|r_ij|) r_ij /
    |r_ij| to v_i. Lengths and products of the vectors of an atom then enter its tokens, which makes
    tokens depend on angles. The filters f, g and h vanish at the cutoff with all derivatives.

    Args:
        dim: width of tokens and number of vectors.
        layers: number of interactions, each followed by an update. The receptive field of an atom
            has a radius of this number times the cutoff.
        cutoff: radius of the neighborhood, in Å.
    """

    def __init__(self, dim: int, layers: int, cutoff: float) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.layers = nn.ModuleList(_Interaction(dim, first=i == 0) for i in range(layers))

    def forward(self, tokens: Tensor, neighbors: Neighbors, geometry: Geometry) -> Tensor:
        """Adds messages to tokens (atoms, dim); `neighbors` are all pairs within the cutoff."""
        basis = radial_waves(neighbors.distance, _NUM_BASIS, self.cutoff)
        # 0 instead of NaN if two atoms coincide
        square = neighbors.vector.square().sum(dim=-1, keepdim=True)
        direction = neighbors.vector / softened(square).sqrt()
        basis, direction = basis.to(tokens.dtype), direction.to(tokens.dtype)[..., None]
        edges = _Edges(neighbors.center, neighbors.neighbor, basis, direction)
        pairs = _Matrices.of(edges, geometry) or edges
        vectors: Tensor | None = None
        for layer in self.layers:
            tokens, vectors = layer(tokens, vectors, pairs)
        return tokens


class _Interaction(nn.Module):
    """One layer of messages; the first layer does not have input vectors."""

    def __init__(self, dim: int, first: bool) -> None:
        super().__init__()
        parts = 2 if first else 3
        self.norm = nn.LayerNorm(dim)
        self.message = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, parts * dim))
        self.filter = nn.Linear(_NUM_BASIS, parts * dim, bias=False)
        self.project = nn.Linear(dim, 2 * dim, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, 3 * dim))

    def forward(
        self, tokens: Tensor, vectors: Tensor | None, pairs: _Edges | _Matrices
    ) -> tuple[Tensor, Tensor]:
        """Updates tokens (atoms, dim) and vectors (atoms, 3, dim)."""
        message = self.message(self.norm(tokens)) * _SCALE
        sums: Iterable[tuple[Tensor, Tensor]]
        if isinstance(pairs, _Matrices):
            sums = [self._sums_by_products(pairs, message, vectors)]
        else:  # one piece at a time, because each has the size of all atoms
            sums = in_pieces(self._sums, pairs, message, vectors)
        for more_tokens, more_vectors in sums:
            tokens = tokens + more_tokens
            vectors = more_vectors if vectors is None else vectors + more_vectors
        assert vectors is not None
        first, second = self.project(vectors).chunk(2, dim=-1)
        length = (second.square().sum(dim=-2) + 1).sqrt() - 1  # without a kink at 0
        gates = self.update(torch.cat((self.norm(tokens), length), dim=-1))
        token_gate, product_gate, vector_gate = gates.chunk(3, dim=-1)
        tokens = tokens + token_gate + product_gate * (first * second).sum(dim=-2)
        return tokens, vectors + vector_gate.unsqueeze(-2) * first

    def _sums(
        self, edges: _Edges, message: Tensor, vectors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes contributions of pairs to tokens (atoms, dim) and vectors (atoms, 3, dim)."""
        center, neighbor, basis, direction = edges
        filtered = self.filter(basis) * message.index_select(0, neighbor)
        parts = filtered.split(self.norm.normalized_shape[0], dim=-1)
        of_tokens, of_vectors = parts[0], parts[1][:, None] * direction
        if vectors is not None:
            of_neighbors = vectors.index_select(0, neighbor)
            of_vectors = torch.addcmul(of_vectors, parts[2][:, None], of_neighbors)
        return _sum_by(of_tokens, center, len(message)), _sum_by(of_vectors, center, len(message))

    def _sums_by_products(
        self, matrices: _Matrices, message: Tensor, vectors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes the same contributions as `_sums` with one matrix product per graph."""
        dim = self.norm.normalized_shape[0]
        # (parts, functions, 1, dim), which multiply padded messages (graphs, 1, size, dim)
        filters = self.filter.weight.unflatten(0, (-1, dim)).transpose(1, 2)[:, :, None]
        parts = message.split(dim, dim=1)
        invariant, directed = matrices.invariant, matrices.directed
        of_tokens = invariant @ (matrices.padded(parts[0]) * filters[0]).flatten(1, 2)
        of_vectors = directed @ (matrices.padded(parts[1]) * filters[1]).flatten(1, 2)
        of_vectors = of_vectors.unflatten(1, (-1, 3))  # (graphs, size, 3, dim)
        if vectors is not None:
            scaled = matrices.padded((parts[2][:, None] * vectors).flatten(1))  # [..., 3 dim]
            of_neighbors = invariant @ (scaled * filters[2].repeat(1, 1, 3)).flatten(1, 2)
            of_vectors = of_vectors + of_neighbors.unflatten(2, (3, -1))
        return matrices.rows(of_tokens), matrices.rows(of_vectors)
