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

_PIECE = 2**16  # pairs computed at once; each pair needs hundreds of intermediate numbers
_MANY = 2**18  # for more pairs, intermediate numbers are recomputed in the backward pass
_STEP = 16.0  # Å; bounds of distances are multiples of this
_FARTHEST = 2_000  # Å; Gauss's rule then has about 4,000 points and takes seconds

_R = TypeVar("_R")


class NearPairs(NamedTuple):
    """Pairs of each atom with itself and neighbors or, in graphs without nodes, all atoms."""

    graph: Tensor
    """(pairs,), index of the graph"""
    query: Tensor
    """(pairs,), index of the query, counted from the first atom of the graph"""
    key: Tensor
    """(pairs,), index of the key in the graph; a pair may appear several times, once per image"""
    vector: Tensor
    """(pairs, 3) from query to key, in Å"""

    @classmethod
    def of(
        cls, geometry: Geometry, neighbors: Neighbors | None, alone: Tensor | None
    ) -> "NearPairs":
        """Pairs atoms with themselves and neighbors or, in graphs of `alone`, with all atoms."""
        own = torch.arange(geometry.pos.shape[0], device=geometry.pos.device)
        found: list[tuple[Tensor, ...]] = [(own, own, torch.zeros_like(geometry.pos))]
        if neighbors is not None:
            kept = slice(None) if alone is None else ~alone[geometry.batch[neighbors.center]]
            found.append(tuple(x[kept] for x in neighbors[:3]))
        if alone is not None:
            query, key = _all_pairs(geometry, alone)
            found.append((query, key, nearest_images(geometry, query, key)))
        query, key, vector = (torch.cat(parts) for parts in zip(*found, strict=True))
        graph = geometry.batch[query]
        first = geometry.ptr[graph]
        return cls(graph, query - first, key - first, vector)

    def pairs(self) -> Pairs:
        """Returns the pairs in the format that attention expects, without corrections."""
        return Pairs(self.graph, self.query, self.key, self.vector.new_zeros(1, 1))


class _Found(NamedTuple):
    """Nodes and pairs found for a batch; see `Open`."""

    nodes: GraphNodes | None
    alone: Tensor | None = None
    near: NearPairs | None = None
    on_mesh: Tensor | None = None

    def counts(self) -> Tensor:
        """Counts the nodes of each graph up to the last one with a nonzero weight: (graphs,)."""
        assert self.nodes is not None
        place = torch.arange(1, self.nodes.xi.shape[1] + 1, device=self.nodes.xi.device)
        return ((self.nodes.weights.detach() != 0) * place).amax(dim=1)

    def select(self, graphs: Tensor, total: int) -> "_Found":
        """Selects graphs by index (n,) from `total` graphs; drops padding that only others need."""
        nodes, near = self.nodes, self.near
        if nodes is not None:
            most = max(1, int(self.counts()[graphs].max()))
            nodes = GraphNodes(*(x[graphs, :most] for x in nodes))
        if near is not None:
            place = graphs.new_full((total,), -1)
            place[graphs] = torch.arange(len(graphs), device=graphs.device)
            graph = place[near.graph]
            inside = (graph >= 0).nonzero()[:, 0]
            near = NearPairs(*(x.index_select(0, inside) for x in (graph, *near[1:])))
        alone, on_mesh = (None if x is None else x[graphs] for x in (self.alone, self.on_mesh))
        return _Found(nodes, alone, near, on_mesh)


def _all_pairs(geometry: Geometry, graphs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns all pairs of different atoms in the graphs of a mask: two index tensors (pairs,)."""
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
    """Yields function(pairs, *rest) for each piece of a long list of pairs, to save memory."""
    # Compiled code has one computation graph for all sizes.
    if torch.compiler.is_compiling() or len(pairs[0]) <= _MANY:
        yield function(pairs, *rest)
        return
    for piece in zip(*(x.split(_PIECE) for x in pairs), strict=True):
        yield recomputed(function, type(pairs)(*piece), *rest)


def _bound(distance: Tensor, least: float) -> float:
    """Returns the smallest multiple of `_STEP` that is at least `least` and any distance, in Å."""
    highest = max(least, float(distance.detach().max()) if len(distance) else 0.0)
    if highest > _FARTHEST:
        raise ValueError(
            f"atoms of a molecule are {highest:,.0f} Å apart; expected at most {_FARTHEST:,} Å; "
            "check units (Å), or pass its parts as separate structures"
        )
    return _STEP * math.ceil(highest / _STEP)
