"""Pairs of atoms in a batch whose kernel is computed directly, without nodes."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from molflt.attention.mixing.pairs import Pairs
from molflt.attention.numerics import recomputed
from molflt.attention.positions.spectral import GraphNodes
from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import Neighbors, nearest_images

_PIECE = 2**16  # pairs per piece; each pair has hundreds of intermediate numbers
_MANY = 2**18  # pairs above which intermediate numbers are recomputed in backward
_STEP = 16.0  # Å, step of bounds of distances
_FARTHEST = 2_000  # Å; Gauss's rule then has about 4,000 points and takes seconds

_R = TypeVar("_R")


class NearPairs(NamedTuple):
    """Pairs of each atom with itself, with its neighbors and, in some graphs, with all others."""

    graph: Tensor
    """(pairs,), index of the graph"""
    query: Tensor
    """(pairs,), counted from the first atom of the graph"""
    key: Tensor
    """(pairs,), counted like `query`; a pair may appear several times, once for each image"""
    vector: Tensor
    """(pairs, 3) from query to key, Å"""

    @classmethod
    def of(
        cls, geometry: Geometry, neighbors: Neighbors | None, alone: Tensor | None
    ) -> "NearPairs":
        """Combines neighbors within the cutoff with all pairs of the graphs in `alone`."""
        own = torch.arange(geometry.pos.shape[0], device=geometry.pos.device)
        queries, keys, vectors = [own], [own], [torch.zeros_like(geometry.pos)]
        if neighbors is not None:
            found: tuple[Tensor, ...] = neighbors[:3]
            if alone is not None:
                kept = ~alone[geometry.batch[neighbors.center]]
                found = tuple(x[kept] for x in found)
            for parts, part in zip((queries, keys, vectors), found, strict=True):
                parts.append(part)
        if alone is not None:
            query, key = _all_pairs(geometry, alone)
            queries.append(query)
            keys.append(key)
            vectors.append(nearest_images(geometry, query, key))
        query, key = torch.cat(queries), torch.cat(keys)
        graph = geometry.batch[query]
        first = geometry.ptr[graph]
        return cls(graph, query - first, key - first, torch.cat(vectors))

    def reordered(self, order: Tensor) -> "NearPairs":
        """Returns the pairs after reordering graphs by indices (graphs,)."""
        place = torch.zeros(int(order.max()) + 1, dtype=torch.long, device=order.device)
        place[order] = torch.arange(len(order), device=order.device)
        return self._replace(graph=place[self.graph])

    def part(self, graphs: slice) -> "NearPairs":
        """Returns the pairs of consecutive graphs, with graphs counted from 0."""
        inside = ((self.graph >= graphs.start) & (self.graph < graphs.stop)).nonzero()[:, 0]
        graph, *rest = (x.index_select(0, inside) for x in self)
        return NearPairs(graph - graphs.start, *rest)

    def pairs(self) -> Pairs:
        """Returns the pairs in the input format of attention, without corrections."""
        return Pairs(self.graph, self.query, self.key, self.vector.new_zeros(1, 1))


class _Found(NamedTuple):
    """Nodes and pairs found for a batch; see `Open`."""

    nodes: GraphNodes | None
    alone: Tensor | None = None
    near: NearPairs | None = None

    def counts(self) -> Tensor:
        """Returns the number of nodes of each graph up to the last nonzero weight, (graphs,)."""
        assert self.nodes is not None
        place = torch.arange(1, self.nodes.xi.shape[1] + 1, device=self.nodes.xi.device)
        return ((self.nodes.weights.detach() != 0) * place).amax(dim=1)

    def reordered(self, order: Tensor) -> "_Found":
        """Returns nodes and pairs after reordering graphs by indices (graphs,)."""
        return _Found(
            None if self.nodes is None else GraphNodes(*(x[order] for x in self.nodes)),
            None if self.alone is None else self.alone[order],
            None if self.near is None else self.near.reordered(order),
        )

    def part(self, graphs: slice) -> "_Found":
        """Returns nodes and pairs of consecutive graphs, without padding for other graphs."""
        nodes = self.nodes
        if nodes is not None:
            most = max(1, int(self.counts()[graphs].max()))
            nodes = GraphNodes(*(x[graphs, :most] for x in nodes))
        return _Found(
            nodes,
            None if self.alone is None else self.alone[graphs],
            None if self.near is None else self.near.part(graphs),
        )


def _all_pairs(geometry: Geometry, graphs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ordered pairs of different atoms, (pairs,) twice, of graphs (graphs,) bool."""
    counts = geometry.ptr.diff()
    member = torch.arange(len(geometry.pos), device=counts.device)[graphs[geometry.batch]]
    count = counts[geometry.batch[member]]
    query = member.repeat_interleave(count)
    first = (count.cumsum(0) - count).repeat_interleave(count)
    place = torch.arange(len(query), device=counts.device) - first
    key = geometry.ptr[geometry.batch[query]] + place
    different = query != key
    return query[different], key[different]


def in_pieces(
    function: Callable[..., _R], pairs: tuple[Tensor, ...], *rest: object
) -> Iterator[_R]:
    """Yields function(pairs, *rest) for pieces of a long list of pairs; keeps only results."""
    # Compiled code has one computation graph for all sizes.
    if torch.compiler.is_compiling() or len(pairs[0]) <= _MANY:
        yield function(pairs, *rest)
        return
    for piece in zip(*(x.split(_PIECE) for x in pairs), strict=True):
        yield recomputed(function, type(pairs)(*piece), *rest)


def _bound(distance: Tensor, least: float) -> float:
    """Returns an upper bound of distances, Å, in coarse steps; small moves do not change it."""
    highest = max(least, float(distance.detach().max()) if len(distance) else 0.0)
    if highest > _FARTHEST:
        raise ValueError(
            f"atoms of a molecule are {highest:,.0f} Å apart; expected at most {_FARTHEST:,} Å; "
            "check units (Å), or give its parts as structures of their own"
        )
    return _STEP * math.ceil(highest / _STEP)
