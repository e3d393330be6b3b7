"""Pairs of atoms in a batch whose kernel is computed directly, without nodes."""

import math
from collections.abc import Callable, Iterator
from functools import reduce
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
        cls, geometry: Geometry, neighbors: Neighbors | None, without_nodes: Tensor | None
    ) -> "NearPairs":
        """Pairs atoms with themselves and neighbors or, in graphs of the mask, with all atoms."""
        atoms = torch.arange(geometry.pos.shape[0], device=geometry.pos.device)
        groups: list[tuple[Tensor, ...]] = [(atoms, atoms, torch.zeros_like(geometry.pos))]
        if neighbors is not None:
            columns: tuple[Tensor, ...] = neighbors[:3]
            if without_nodes is not None:
                selected = ~without_nodes[geometry.batch[neighbors.center]]
                columns = tuple(x[selected] for x in columns)
            groups.append(columns)
        if without_nodes is not None:
            query, key = _all_pairs(geometry, without_nodes)
            groups.append((query, key, nearest_images(geometry, query, key)))
        query, key, vector = (torch.cat(parts) for parts in zip(*groups, strict=True))
        graph = geometry.batch[query]
        first = geometry.ptr[graph]
        return cls(graph, query - first, key - first, vector)

    def pairs(self) -> Pairs:
        """Returns the pairs in the format that attention expects, without corrections."""
        return Pairs(self.graph, self.query, self.key, self.vector.new_zeros(1, 1))

    def select(self, graphs: Tensor, total: int) -> "NearPairs":
        """Returns the pairs of graphs with indices (n,) among `total`, which become 0 to n - 1."""
        new_index = graphs.new_full((total,), -1)
        new_index[graphs] = torch.arange(len(graphs), device=graphs.device)
        graph = new_index[self.graph]
        selected = (graph >= 0).nonzero()[:, 0]
        return NearPairs(*(x.index_select(0, selected) for x in self._replace(graph=graph)))


class _Terms(NamedTuple):
    """Nodes and pairs over which the encoding of a batch is summed."""

    nodes: GraphNodes | None
    """float64; None for schemes that do not compute nodes"""
    without_nodes: Tensor | None = None
    """(graphs,) bool, see `Open.without_nodes`"""
    near: NearPairs | None = None
    """pairs within the near field, and all pairs of the graphs in `without_nodes`"""
    on_mesh: Tensor | None = None
    """(graphs,) bool, see `Open.on_mesh`"""

    def node_counts(self) -> Tensor:
        """Counts the nodes of each graph up to the last one with a nonzero weight: (graphs,)."""
        assert self.nodes is not None
        number = torch.arange(1, self.nodes.xi.shape[1] + 1, device=self.nodes.xi.device)
        return torch.where(self.nodes.weights.detach() != 0, number, 0).amax(dim=1)

    def select(self, graphs: Tensor, total: int) -> "_Terms":
        """Selects graphs by index (n,) from `total` graphs; drops padding that only others need."""
        nodes = self.nodes
        if nodes is not None:
            most = max(1, int(self.node_counts()[graphs].max()))
            nodes = GraphNodes(nodes.xi[graphs, :most], nodes.weights[graphs, :most])
        return _Terms(
            nodes,
            None if self.without_nodes is None else self.without_nodes[graphs],
            None if self.near is None else self.near.select(graphs, total),
            None if self.on_mesh is None else self.on_mesh[graphs],
        )


def _all_pairs(geometry: Geometry, graphs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns all pairs of different atoms in the graphs of a mask: two index tensors (pairs,)."""
    sizes = geometry.ptr.diff()
    atoms = torch.arange(len(geometry.pos), device=sizes.device)[graphs[geometry.batch]]
    keys_of_atom = sizes[geometry.batch[atoms]]
    query = atoms.repeat_interleave(keys_of_atom)
    first_pair = (keys_of_atom.cumsum(0) - keys_of_atom).repeat_interleave(keys_of_atom)
    key_in_graph = torch.arange(len(query), device=sizes.device) - first_pair
    key = geometry.ptr[geometry.batch[query]] + key_in_graph
    different = query != key
    return query[different], key[different]


def in_pieces(
    function: Callable[..., _R], pairs: tuple[Tensor, ...], *arguments: object
) -> Iterator[_R]:
    """Yields function(piece, *arguments) for pieces of a long list of pairs, to save memory."""
    # Compiled code has one computation graph for all sizes.
    if torch.compiler.is_compiling() or len(pairs[0]) <= _MANY:
        yield function(pairs, *arguments)
        return
    for piece in zip(*(x.split(_PIECE) for x in pairs), strict=True):
        yield recomputed(function, type(pairs)(*piece), *arguments)


def sum_in_pieces(
    function: Callable[..., Tensor], pairs: tuple[Tensor, ...], *arguments: object
) -> Tensor:
    """Returns the sum of the results of `in_pieces`."""
    return reduce(torch.add, in_pieces(function, pairs, *arguments))


def _bound(distance: Tensor, least: float) -> float:
    """Returns the smallest multiple of `_STEP` that is at least `least` and any distance, in Å."""
    highest = max(least, float(distance.detach().max()) if len(distance) else 0.0)
    if highest > _FARTHEST:
        raise ValueError(
            f"atoms of a molecule are {highest:,.0f} Å apart; expected at most {_FARTHEST:,} Å; "
            "check units (Å), or pass its parts as separate structures"
        )
    return _STEP * math.ceil(highest / _STEP)
