"""Pairs of atoms: neighbors within a cutoff, including periodic images, and their kernels."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molflt.atoms import FARTHEST, LOWEST, lattice_heights, reduced_cell
from molflt.attention.checks import graph_name
from molflt.attention.mixing.pairs import Pairs
from molflt.attention.numerics import distances, opaque, recomputed, uncompiled
from molflt.attention.positions.spectral import GraphNodes
from molflt.graph.geometry import Geometry
from molflt.memory import expect_memory

# vesin sorts atoms into cells. Beyond this number of cells, it scales all axes down and divides by
# 0 if less than one cell remains along an axis.
_MOST_CELLS = 1e5
_FEWEST_ALONG_AXIS = 4  # vesin rounds down once for each axis
_PAIR_BYTES = 240  # per pair, during the search for neighbors, measured
_PIECE = 2**16  # pairs computed at once; each pair needs hundreds of intermediate numbers
_MANY = 2**18  # for more pairs, intermediate numbers are recomputed in the backward pass
_STEP = 16.0  # Å; bounds of distances are multiples of this
_FARTHEST = 2_000  # Å; Gauss's rule then has about 4,000 points and takes seconds

_Array: TypeAlias = NDArray[np.float64]
_R = TypeVar("_R")


class Neighbors(NamedTuple):
    """Pairs (center, neighbor) closer than the cutoff; each periodic image is a separate pair."""

    center: Tensor
    """(pairs,) atom index"""
    neighbor: Tensor
    """(pairs,) atom index"""
    vector: Tensor
    """(pairs, 3) from center to neighbor, in Å; differentiable with respect to pos and cell"""
    distance: Tensor
    """(pairs,), in Å"""


def expect_lattice(geometry: Geometry) -> None:
    """Raises ValueError with a graph's index if its lattice planes are less than 0.5 Å apart."""
    boxes, periodic = _float64(geometry.cell), _numbers(geometry.pbc)
    _check_heights(lattice_heights(boxes, periodic), boxes, periodic)


def neighbor_list(geometry: Geometry, cutoff: float) -> Neighbors:
    """Finds all pairs within `cutoff`, in Å, using vesin with the reduced cell of each graph.

    Each pair appears in both directions. Raises MemoryError if the pairs do not fit into memory.
    """
    center, neighbor, vector, _ = shifted_pairs(geometry, cutoff)
    return Neighbors(center, neighbor, vector, distances(vector))


def shifted_pairs(geometry: Geometry, cutoff: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the first three fields of `neighbor_list`, and the neighbors' cells (pairs, 3)."""
    pos, cell = geometry.pos, geometry.cell
    (center, neighbor), shift, graph = _neighbors(pos, cell, geometry.pbc, geometry.ptr, cutoff)
    with torch.autocast(cell.device.type, enabled=False):  # not in half precision
        offset = torch.einsum("ps,psc->pc", shift.to(cell.dtype), cell[graph])
    return center, neighbor, pos[neighbor] - pos[center] + offset, shift


def _unknown_pairs(
    pos: Tensor, cell: Tensor, pbc: Tensor, ptr: Tensor, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    pairs = torch.library.get_ctx().new_dynamic_size()
    return ptr.new_empty(2, pairs), ptr.new_empty(pairs, 3), ptr.new_empty(pairs)


@opaque(_unknown_pairs)
def _neighbors(
    pos: Tensor, cell: Tensor, pbc: Tensor, ptr: Tensor, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns atom indices (2, pairs), cell offsets (pairs, 3) and graph indices (pairs,)."""
    from vesin import NeighborList  # imported here because reading signatures must not load it

    points, boxes = _float64(pos), _float64(cell)
    periodic, starts = _numbers(pbc), _numbers(ptr)
    if not len(boxes):
        return ptr.new_empty(2, 0), ptr.new_empty(0, 3), ptr.new_empty(0)
    if not ((np.abs(points) <= FARTHEST).all() and np.isfinite(boxes[periodic]).all()):  # or NaN
        raise ValueError(
            f"pos must be finite and within {FARTHEST:g} Å, and cell finite along periodic axes; "
            "remove atoms that are far away, or move the structure"
        )
    reduced, steps = reduced_cell(boxes, periodic)
    closed = [
        _closed(points[start:stop], reduced[graph], periodic[graph], cutoff)
        for graph, (start, stop) in enumerate(pairwise(starts.tolist()))
    ]
    closed_boxes = np.stack([box for _, box in closed])
    _check_shapes(closed_boxes, boxes, periodic, cutoff)
    volumes = np.abs(np.linalg.det(closed_boxes))
    sizes = np.diff(starts)
    expected = sizes**2 * 4 / 3 * math.pi * cutoff**3 / volumes
    _expect_pairs(expected.tolist(), sizes, cutoff)
    search = NeighborList(cutoff=cutoff, full_list=True)
    pairs, shifts, counts = [], [], []
    for graph, (points_in_box, box) in enumerate(closed):
        i, j, shift = search.compute(points_in_box, box, True, quantities="ijS")
        pairs.append(np.stack((i, j)).astype(np.int64) + starts[graph])
        shifts.append((shift @ steps[graph]).astype(np.int64))
        counts.append(len(i))
        _expect_pairs(counts, sizes, cutoff)
    graphs = np.arange(len(closed)).repeat(counts)
    arrays = np.concatenate(pairs, axis=1), np.concatenate(shifts), graphs
    center_and_neighbor, offsets, graph_index = (torch.from_numpy(x).to(pos.device) for x in arrays)
    return center_and_neighbor, offsets, graph_index


@uncompiled
def nearest_images(geometry: Geometry, query: Tensor, key: Tensor) -> Tensor:
    """Returns vectors (pairs, 3), in Å, from atoms `query` to the nearest images of atoms `key`.

    Rounds fractional coordinates in a reduced cell. Differentiable in positions and cells.
    """
    vector = geometry.pos[key] - geometry.pos[query]
    periodic = _numbers(geometry.pbc)
    if not periodic.any():
        return vector
    reduced, steps = reduced_cell(_float64(geometry.cell), periodic)
    graph = _numbers(geometry.batch[query])
    fractional = np.einsum("pc,pcs->ps", _numbers(vector), np.linalg.pinv(reduced)[graph])
    shift = torch.from_numpy(np.einsum("ps,psr->pr", fractional.round(), steps[graph])).to(vector)
    return vector - torch.einsum("ps,psc->pc", shift, geometry.cell[geometry.batch[query]])


@uncompiled
def images_are_far(geometry: Geometry, distance: float) -> Tensor:
    """Returns a mask (graphs,), True if lattice planes are more than `distance` Å apart."""
    heights = lattice_heights(_float64(geometry.cell), _numbers(geometry.pbc))
    return torch.from_numpy((heights > distance).all(axis=1)).to(geometry.pbc.device)


def _numbers(x: Tensor) -> NDArray[Any]:
    """Returns the values of a tensor as an array, even inside `torch.func.grad`."""
    with torch._C._DisableFuncTorch():
        unwrapped = torch.func.debug_unwrap(x)
        if unwrapped.shape != x.shape:
            raise ValueError(
                "near_field cannot be mapped by torch.func.vmap; got a batch of "
                f"{unwrapped.shape[0]}; put the structures into one batch instead"
            )
        return unwrapped.detach().cpu().numpy()


def _float64(x: Tensor) -> _Array:
    return _numbers(x).astype(np.float64)


def _closed(
    points: _Array, box: _Array, periodic: NDArray[np.bool_], cutoff: float
) -> tuple[_Array, _Array]:
    """Returns positions, and a box that is periodic along all axes; neighbors stay the same."""
    # vesin crashes if atoms are 10^5 cutoffs apart, and takes up to 0.1 s for cells without atoms.
    # Gaps along open axes are therefore reduced to two cutoffs.
    if periodic.all():
        return points, box
    normals = np.linalg.qr(box[periodic].T, mode="complete")[0].T[periodic.sum() :]
    heights = points @ normals.T
    order = heights.argsort(axis=0)
    gaps = np.diff(np.take_along_axis(heights, order, axis=0), axis=0)
    reduced_gaps = np.minimum(gaps, 2 * cutoff)
    excess = np.zeros_like(heights)
    np.put_along_axis(excess, order[1:], (gaps - reduced_gaps).cumsum(axis=0), axis=0)
    closed = box.copy()
    closed[~periodic] = normals * (reduced_gaps.sum(axis=0) + 2 * cutoff)[:, None]
    return points - excess @ normals, closed


def _check_shapes(
    closed: _Array, boxes: _Array, periodic: NDArray[np.bool_], cutoff: float
) -> None:
    """Raises ValueError for `closed` boxes (graphs, 3, 3) that exhaust memory or crash vesin."""
    heights = lattice_heights(closed, np.ones_like(periodic))
    _check_heights(heights, boxes, periodic)
    cells = np.maximum(heights // cutoff, 1)
    total = cells.prod(axis=1)
    fewest = cells.min(axis=1) * np.cbrt(_MOST_CELLS / total)
    thin = (total > _MOST_CELLS) & (fewest < _FEWEST_ALONG_AXIS)
    if thin.any():
        graph = int(thin.argmax())
        raise ValueError(
            f"{graph_name(graph, len(thin))} spans {heights[graph].max():.3g} Å along one "
            f"direction, too many cutoffs of {cutoff:g} Å; check units (Å)"
        )


def _check_heights(heights: _Array, boxes: _Array, periodic: NDArray[np.bool_]) -> None:
    """Raises ValueError if a distance `heights` (graphs, 3) along a periodic axis is too small."""
    too_low = ((heights < LOWEST) & periodic).any(axis=1)
    if too_low.any():
        graph = int(too_low.argmax())
        raise ValueError(
            f"{graph_name(graph, len(boxes))}: lattice planes must be at least {LOWEST} Å apart; "
            f"got {heights[graph][periodic[graph]].min():.2g} Å in the reduced form of cell "
            f"{boxes[graph].tolist()}; set pbc to False along axes without a lattice vector"
        )


def _expect_pairs(pairs: Sequence[float], atoms: NDArray[np.int64], cutoff: float) -> None:
    """Raises MemoryError if the numbers of pairs of each graph do not fit into memory."""
    largest = int(np.argmax(pairs))
    expect_memory(
        _PAIR_BYTES * sum(pairs),
        f"{pairs[largest]:.2g} or more neighbors within {cutoff:g} Å of the {atoms[largest]:,} "
        f"atoms of {graph_name(largest, len(pairs))}, plus those of any other graphs,",
        "use a smaller cutoff or fewer structures at once, or remove duplicate atoms",
    )


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
