"""Neighbors within a cutoff, periodic images included."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.numerics import uncompiled
from molflt.graph.geometry import Geometry


class Neighbors(NamedTuple):
    """Pairs (center, neighbor) closer than the cutoff; a periodic image counts as its own pair."""

    center: Tensor
    """(pairs,) atom index"""
    neighbor: Tensor
    """(pairs,) atom index"""
    vector: Tensor
    """(pairs, 3) from center to neighbor, Å; differentiable in pos and cell"""
    distance: Tensor
    """(pairs,) Å"""


@uncompiled
def neighbor_list(geometry: Geometry, cutoff: float) -> Neighbors:
    """All pairs within `cutoff`, graph by graph, through vesin.

    Args:
        geometry: the atoms.
        cutoff: radius, Å.

    Returns:
        Pairs of every graph with indices into the batch's atoms; every pair appears in both
        directions.
    """
    import numpy as np
    from vesin import NeighborList  # here, so that reading signatures loads no library of C

    pos, cell = geometry.pos, geometry.cell
    search = NeighborList(cutoff=cutoff, full_list=True)
    points = pos.detach().cpu().double().numpy()
    boxes = cell.detach().cpu().double().numpy()
    periodic = geometry.pbc.cpu().numpy()
    found = []
    for graph, (start, stop) in enumerate(pairwise(geometry.ptr.tolist())):
        i, j, shift = search.compute(
            points[start:stop], boxes[graph], periodic[graph], quantities="ijS"
        )
        ends = np.stack((i, j)).astype(np.int64) + start
        found.append((ends, shift, np.full(len(i), graph)))
    ends, shift, graph_index = (
        torch.from_numpy(np.concatenate(part, axis=axis)).to(pos.device)
        for part, axis in zip(zip(*found, strict=True), (1, 0, 0), strict=True)
    )
    center, neighbor = ends
    offset = torch.einsum("ps,psc->pc", shift.to(cell.dtype), cell[graph_index])
    vector = pos[neighbor] - pos[center] + offset
    return Neighbors(center, neighbor, vector, vector.norm(dim=-1))
