"""Transforms of PyG data: edges for message passing, including periodic cells."""

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from molflt.attention.checks import at_least_one, positive
from molflt.graph.geometry import Geometry
from molflt.graph.neighbors import shifted_pairs

_TIE = 1e-4  # Å; smaller differences in distance count as ties


class PBCRadiusGraph(BaseTransform):
    """Adds edges between all atoms within a radius, including across periodic boundaries.

    This transform is similar to `torch_geometric.transforms.RadiusGraph`, but supports periodic
    structures and does not need a compiled extension. Each periodic image within the radius is a
    separate edge. This includes images of the atom itself, but not the atom itself at distance 0.
    Edges point from the neighbor, `edge_index[0]`, to the atom, `edge_index[1]`; sorted by atom.

    It sets `edge_index` (2, edges); `edge_weight` (edges,), the distance in Å; `edge_vec` (edges,
    3), from atom to neighbor, in Å; and `edge_shift` (edges, 3) int64, the cell n of the neighbor:
    edge_vec = pos[edge_index[0]] + n @ cell - pos[edge_index[1]]. Distances and vectors are
    differentiable with respect to `pos` and `cell`. The `edge_attr` of earlier edges is removed.

    Args:
        r: radius, in Å.
        max_neighbors: largest number of edges per atom; keeps the nearest neighbors and all ties
            with the farthest of these, so edges may lack their reverse. None keeps all.
    """

    def __init__(self, r: float, max_neighbors: int | None = None) -> None:
        positive(r=r)
        if max_neighbors is not None:
            at_least_one(max_neighbors=max_neighbors)
        self.r = r
        self.max_neighbors = max_neighbors

    def forward(self, data: Data) -> Data:
        """Sets the edges of one structure or of a batch.

        Args:
            data: pos (atoms, 3), in Å; optional cell (graphs, 3, 3) or (3, 3), lattice vectors as
                rows, in Å; optional pbc (graphs, 3) or (3,) bool, by default all periodic if a cell
                is given; for a batch also `batch` (atoms,), ascending.
        """
        geometry = Geometry.of_data(data)
        target, source, vector, shift = shifted_pairs(geometry, self.r)
        distance = vector.norm(dim=-1)
        if self.max_neighbors is None:
            edges = torch.argsort(target, stable=True)
        else:
            edges = _nearest(target, distance.detach(), len(geometry.pos), self.max_neighbors)
        data.edge_index = torch.stack((source, target))[:, edges]
        data.edge_vec, data.edge_weight = vector[edges], distance[edges]
        data.edge_shift = shift[edges]
        if "edge_attr" in data:
            del data.edge_attr
        return data

    def __repr__(self) -> str:
        most = "" if self.max_neighbors is None else f", max_neighbors={self.max_neighbors}"
        return f"{type(self).__name__}(r={self.r}{most})"


def _nearest(target: Tensor, distance: Tensor, atoms: int, most: int) -> Tensor:
    """Returns indices of the `most` nearest edges of each atom and of edges as long as the last."""
    order = torch.argsort(distance, stable=True)
    order = order[torch.argsort(target[order], stable=True)]  # by atom, then by distance
    target, distance = target[order], distance[order]
    count = torch.bincount(target, minlength=atoms)
    first = count.cumsum(0) - count
    last = first + count.clamp(max=most) - 1
    return order[distance <= distance[last[target]] + _TIE]
