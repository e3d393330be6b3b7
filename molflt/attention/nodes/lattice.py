"""Lattices of structures: periodic vectors come from the cell, other vectors from a virtual box."""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.checks import graph_name
from molflt.attention.numerics import at_least_float32, counts_of, finite, opaque

_DEGENERATE = 1e-6  # volume of the periodic vectors relative to the product of their lengths
_SHARPNESS = 4.0  # 1/Å, sharpness of smooth extents
_MOST_REDUCTIONS = 64  # passes over a cell; two or three suffice for well-formed cells


class Lattice(NamedTuple):
    """Lattice of each graph, with virtual vectors along nonperiodic directions."""

    vectors: Tensor  # (b, 3, 3), as rows, in Å; periodic vectors first, from a reduced cell
    dual: Tensor  # (b, 3, 3), reciprocal vectors as rows, in cycles/Å; a_i . b_j = delta_ij
    volume: Tensor  # (b,), in Å^3

    @classmethod
    def of(cls, cell: Tensor, pbc: Tensor, extent: Tensor, reach: float = 20.0) -> "Lattice":
        """Builds lattices; see `reciprocal_nodes` for the arguments."""
        rows, periodic = _sorted_rows(cell, pbc)
        vectors = rows * torch.where(periodic, 1.0, extent.to(rows.dtype) + reach)[..., None]
        a, b, c = vectors.unbind(1)
        cross = torch.linalg.cross
        normals = torch.stack((cross(b, c), cross(c, a), cross(a, b)), dim=1)
        volume = (normals[:, 0] * a).sum(dim=-1)
        return cls(vectors, normals / volume[:, None, None], volume.abs())


def free_extent(
    positions: Tensor, graph: Tensor, cell: Tensor, pbc: Tensor, smooth: bool = False
) -> Tensor:
    """Returns the extents (b, 3) of graphs along their nonperiodic directions, in Å.

    The extent is 0 along periodic directions, which come first, and for graphs without atoms. It
    does not change if the graph is shifted or if an atom moves by a lattice vector.

    Args:
        positions: (n, 3), in Å.
        graph: (n,), index of the graph of each atom.
        cell, pbc: see `reciprocal_nodes`.
        smooth: replace the largest and smallest coordinates, whose slopes jump when a different
            atom becomes the outermost, with logarithms of mean exponentials, analytic and the same
            in supercells. At each end, they lie up to log(n) / 4 Å inside the outermost of n atoms.
    """
    rows, periodic = _sorted_rows(cell, pbc)
    along = (positions[:, None] * rows[graph].to(positions.dtype)).sum(dim=-1)  # [n, 3]
    count = counts_of(graph, rows.shape[0])[:, None]
    no_extent = periodic | (count == 0)
    if not smooth:
        span = _largest(along, graph, rows.shape[0]) + _largest(-along, graph, rows.shape[0])
        return torch.where(no_extent, 0.0, span)
    span = torch.zeros_like(no_extent, dtype=along.dtype)
    for sign in (1.0, -1.0):  # adds log(mean exp(sign * s x)) / s for the sharpness s
        scaled = sign * _SHARPNESS * along
        top = finite(_largest(scaled.detach(), graph, rows.shape[0]))
        terms = (scaled - top[graph]).exp()
        mean = torch.zeros_like(span).index_add(0, graph, terms) / count.clamp(min=1)
        span = span + (top + torch.where(no_extent, 1.0, mean).log()) / _SHARPNESS
    return torch.where(no_extent, 0.0, span.clamp(min=0.0))  # may be negative due to rounding


def _largest(x: Tensor, graph: Tensor, graphs: int) -> Tensor:
    """Returns maxima over the atoms of each graph, -inf for empty graphs: (n, 3) -> (graphs, 3)."""
    start = x.new_full((graphs, x.shape[1]), -math.inf)
    return start.scatter_reduce(0, graph[:, None].expand_as(x), x, "amax")


def _sorted_rows(cell: Tensor, pbc: Tensor) -> tuple[Tensor, Tensor]:
    """Returns periodic lattice vectors, then unit normals (b, 3, 3), and a mask of the vectors."""
    # Gauss reduction, because cross products of skewed cells lose digits
    cell = at_least_float32(cell).masked_fill(~pbc[..., None], 0.0)
    combination, dependent = _gauss_reduction(cell.detach().double())
    # Elementwise products and sums leave a reduced cell bitwise unchanged.
    cell = (combination.to(cell.dtype)[..., None] * cell[:, None]).sum(dim=2)
    cell = cell.masked_fill(dependent[..., None], 0.0)
    order = (~pbc).to(torch.uint8).argsort(dim=1, stable=True)
    cell = cell.gather(1, order[..., None].expand(-1, -1, 3))
    periodic = pbc.gather(1, order)
    from_cell = periodic[..., None]
    first = torch.where(from_cell[:, 0], cell[:, 0], cell.new_tensor([1.0, 0.0, 0.0]))
    # The first normal is perpendicular to the Cartesian axis along which `first` is smallest. The
    # bias `tie` prefers x to y and y to z if rounding would decide.
    size = first.detach().abs()
    tie = size.amax(dim=1, keepdim=True) * size.new_tensor([0.0, 1e-3, 2e-3])
    axis = F.one_hot((size + tie).argmin(dim=1), 3).to(first.dtype)
    normal = F.normalize(torch.linalg.cross(first, axis), dim=-1)
    second = torch.where(from_cell[:, 1], cell[:, 1], normal)
    normal = F.normalize(torch.linalg.cross(first, second), dim=-1)
    third = torch.where(from_cell[:, 2], cell[:, 2], normal)
    rows = torch.stack((first, second, third), dim=1)
    if not torch.compiler.is_compiling():
        _check_rows(rows.detach(), periodic)
    return rows, periodic


@opaque(lambda cell: (torch.empty_like(cell), cell.new_empty(cell.shape[:2], dtype=torch.bool)))
def _gauss_reduction(cell: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the combinations (b, 3, 3) of rows that are short, and a mask (b, 3) of zeros."""
    combination = torch.eye(3, dtype=torch.float64, device=cell.device)
    combination = combination.repeat(len(cell), 1, 1)
    short = cell.clone()
    for _ in range(_MOST_REDUCTIONS):
        shortened = False
        for i, j in itertools.permutations(range(3), 2):
            ratio = (short[:, i] * short[:, j]).sum(dim=-1) / short[:, j].square().sum(dim=-1)
            # Rounding 1/2 would not shorten the vector. NaN, from zero vectors, fails.
            times = torch.where(ratio.abs() > 0.501, ratio.round(), 0.0)[:, None]
            if bool((times != 0).any()):
                shortened = True
                for x in (short, combination):
                    x[:, i] -= times * x[:, j]
        if not shortened:
            break
    # Linearly dependent vectors are reduced to zero up to rounding errors.
    longest = cell.norm(dim=-1).amax(dim=1, keepdim=True)
    return combination, short.norm(dim=-1) < _DEGENERATE * longest


def _check_rows(rows: Tensor, periodic: Tensor) -> None:
    """Raises ValueError if rows from `_sorted_rows` are not finite and linearly independent."""
    first, second, third = F.normalize(rows.double(), dim=-1).unbind(1)
    volume = (torch.linalg.cross(first, second) * third).sum(dim=-1).abs()
    bad = ~(volume > _DEGENERATE)  # NaN is also bad
    if bool(bad.any()):
        graph = int(bad.nonzero()[0])
        raise ValueError(
            f"lattice vectors along periodic axes must be finite and linearly independent; got "
            f"{rows[graph][periodic[graph]].tolist()} of {graph_name(graph, len(rows))}; set pbc "
            "to False elsewhere"
        )
