"""Nodes of periodic masks: the reciprocal lattice of each graph, one rule from crystal to molecule.

Poisson's summation formula, with positions in Å and frequencies in cycles/Å,

    sum_T f(z + T) = (1 / V) sum_G g(G) exp(2 pi i G . z),   T = n . cell, G = n . cell^-T,

turns a mask f that decays into that of a crystal: the spectrum g of FLT (arXiv:2302.01925, eq. 4),
sampled at the reciprocal lattice with the weights 1 / V. It does not matter which cell of a crystal
is given, nor in which of the cells an atom is, and, where the mask multiplies
(`MultiplicativePosition` without a background), nor how many cells make a supercell: V grows with
it. An additive mask is
exponentiated afterwards, and exp(a + b) is not the sum of two images: no such promise there.

Along directions that are not periodic the lattice is a virtual one. Its vectors are perpendicular
to the periodic ones and as long as the graph is wide plus the reach of the mask, so that no atom
is within reach of a copy: the trapezoid rule for the integral over frequencies, whose error is the
mask beyond its reach. A wire or a molecule that turns in its box changes the mask by no more than
that; crystals and slabs by nothing. No graph depends on the rest of its batch.
"""

import itertools
import math
from typing import Literal

import torch
from torch import Tensor

from molflt.attention.checks import one_of, positive
from molflt.attention.numerics import (
    at_least_float32,
    distances,
    fade,
    finite,
    gauss_rule,
    sinc,
    uncompiled,
)
from molflt.attention.spectra import Spectrum

_DEGENERATE = 1e-6  # volume of the periodic vectors relative to the product of their lengths
# Of a batch: beyond it a cell or its frequencies are taken for a mistake.
_MOST_CANDIDATES = 2**20
_SHARPNESS = 4.0  # 1/Å, of smooth extents
_MOST_REDUCTIONS = 64  # of a cell; two or three do, where numbers mean something


@uncompiled
def reciprocal_nodes(
    cell: Tensor,
    pbc: Tensor,
    max_frequency: float,
    extent: Tensor | None = None,
    reach: float = 20.0,
    taper: Literal["step", "positive"] = "step",
    merged: bool = True,
) -> tuple[Tensor, Tensor]:
    """Reciprocal lattice vectors below a frequency, and their weights, for each graph of a batch.

    There are about (2 pi / 3) k^3 V of them for k = max_frequency, or twice as many if not merged:
    for OC20's slabs in cells of 8 x 8 x 30 Å 60 at 0.25 cycles/Å, 110 at 0.3 and 500 at 0.5. The
    volume of a virtual box is that of extent plus reach: prefer `ShellNodes` where all graphs are
    molecules. Finding them takes far less than a hundredth of the time of an attention over them,
    so that nothing is kept between batches.

    Nodes enter and leave at k with the weight 0: the taper goes to 0 there with two derivatives, so
    that no rounding of |G|, by another cell or a rotation, can make a difference. What it does:

    - "step": 1 up to 0.8 k. A mask without higher frequencies stays what it is: a Gaussian of
      width w to 1e-6, 1e-7 and 1e-10 of its height for w k = 1, 1.1 and 1.3. A sharper one is
      smoothed and ripples below zero: by 6 percent of its height for w k = 0.2.
    - "positive": Wendland's (1 - x)^4 (1 + 4 x), x = |G| / k, whose transform is positive as well:
      a mask that is nowhere negative stays so, smoothed over about 0.6 / k.

    The number of nodes depends on the cells, so that this function is never compiled.

    Args:
        cell: (b, 3, 3) rows are lattice vectors, Å; rows that are not periodic are not read.
        pbc: (b, 3) bool, which of them are periodic.
        max_frequency: k, in cycles/Å.
        extent: (b, 3) widths of the graphs from `free_extent`, Å; needed unless all is periodic.
        reach: distance from which on the mask is negligible, Å. The error of the mask, as a share
            of its height, is 4e-4, 4e-7 and 3e-11 for Gaussians and a reach of 4, 5.5 and 7 widths,
            and about 3e-4 and 4e-5 for k reach = 6 and 9 if the taper cuts into the spectrum. It
            matters only where a direction is not periodic.
        taper: see above.
        merged: whether G and -G, which have the same columns if g(-G) is the complex conjugate of
            g(G), are one node of twice the weight. Otherwise both are there, for any g.

    Returns:
        Nodes (b, r, 3) in cycles/Å and weights (b, r) in 1/Å^3, as `SpectralPosition.factors`
        takes them, in the dtype of the cell (at least float32), differentiable in it and in the
        extent. G = 0 comes first; graphs with fewer nodes are filled up by zeros of weight 0.

    Raises:
        ValueError: if shapes, numbers or choices are wrong, lattice vectors along periodic axes are
            zero or linearly dependent, or there would be far too many nodes.
    """
    positive(max_frequency=max_frequency, reach=reach)
    one_of("taper", taper, _TAPERS)
    rows, periodic = _sorted_rows(cell, pbc)
    if extent is None:
        if not bool(pbc.all()):
            graph = int((~pbc.all(dim=1)).nonzero()[0])
            raise ValueError(
                f"extent must be given where an axis is not periodic; got None and pbc "
                f"{pbc[graph].tolist()} of graph {graph}; use free_extent(...)"
            )
        extent = torch.zeros_like(rows[..., 0])
    elif extent.shape != pbc.shape or not bool(((extent >= 0) & extent.isfinite()).all()):
        raise ValueError(
            f"extent must be non-negative and finite, of shape {tuple(pbc.shape)}; got shape "
            f"{tuple(extent.shape)}; use free_extent(...)"
        )
    side = torch.where(periodic, 1.0, extent.to(rows.dtype) + reach)
    lattice = rows * side[..., None]
    dual, volume = _dual(lattice)
    index, valid = _indices(lattice.detach(), dual.detach(), max_frequency)
    # Products and sums instead of a matrix product: the same bits whatever else is in the batch.
    nodes = (index.to(dual.dtype)[..., None] * dual[:, None]).sum(dim=2)
    weights = _TAPERS[taper](distances(nodes) / max_frequency) / volume[:, None]
    weights = torch.where(valid, weights, 0.0)
    if merged:
        return nodes, torch.cat((weights[:, :1], 2 * weights[:, 1:]), dim=1)
    return torch.cat((nodes, -nodes[:, 1:]), dim=1), torch.cat((weights, weights[:, 1:]), dim=1)


@uncompiled
def free_extent(
    positions: Tensor, graph: Tensor, cell: Tensor, pbc: Tensor, smooth: bool = False
) -> Tensor:
    """What each graph spans along the directions perpendicular to its periodic lattice vectors.

    Neither a translation nor a lattice shift of any atom changes it.

    Args:
        positions: (n, 3), Å.
        graph: (n,), of each atom.
        cell: (b, 3, 3), Å, as for `reciprocal_nodes`.
        pbc: (b, 3) bool.
        smooth: instead of the largest and the smallest coordinate, whose slopes jump where another
            atom comes to be outermost, the logarithms of mean exponentials: analytic, equal in
            supercells, and up to log(n) / 4 Å further in on each side.

    Returns:
        (b, 3) Å, 0 for the periodic directions, which come first, and for graphs without atoms.

    Raises:
        ValueError: as `reciprocal_nodes` for cell and pbc.
    """
    rows, periodic = _sorted_rows(cell, pbc)
    along = (positions[:, None] * rows[graph].to(positions.dtype)).sum(dim=-1)  # [n, 3]
    count = torch.bincount(graph, minlength=len(rows))[:, None]
    none = periodic | (count == 0)
    if not smooth:
        span = _largest(along, graph, len(rows)) + _largest(-along, graph, len(rows))
        return torch.where(none, 0.0, span)
    span = torch.zeros_like(none, dtype=along.dtype)
    for sign in (1.0, -1.0):
        scaled = sign * _SHARPNESS * along
        top = finite(_largest(scaled.detach(), graph, len(rows)))
        terms = (scaled - top[graph]).exp()
        mean = torch.zeros_like(span).index_add(0, graph, terms) / count.clamp(min=1)
        span = span + (top + torch.where(none, 1.0, mean).log()) / _SHARPNESS
    return torch.where(none, 0.0, span.clamp(min=0.0))  # below 0 by rounding alone


def _largest(x: Tensor, graph: Tensor, graphs: int) -> Tensor:
    """Over the atoms of each graph: (n, 3) -> (graphs, 3), -inf without atoms."""
    start = x.new_full((graphs, x.shape[1]), -math.inf)
    return start.scatter_reduce(0, graph[:, None].expand_as(x), x, "amax")


def tapered_mask(
    spectrum: Spectrum, distance: Tensor, max_frequency: float, taper: str, farthest: float
) -> Tensor:
    """What `reciprocal_nodes` make of one image of a mask: its transform with the tapered spectrum.

    f(r) = int_0^k 4 pi xi^2 taper(xi / k) g(xi) sinc(2 xi r) d xi, by Gauss's rule.

    Args:
        spectrum: in three dimensions, a function of |xi| alone.
        distance: (n,), Å.
        max_frequency: k, in cycles/Å.
        taper: key of `TAPERS`.
        farthest: bound of the distances, Å.

    Returns:
        (heads, n).
    """
    count = 16 + math.ceil(8 * max_frequency * farthest)
    rule = torch.tensor(gauss_rule(count), dtype=torch.float64, device=distance.device)
    x, steps = rule
    radius = max_frequency * x
    measure = steps * (2 * math.pi * max_frequency) * radius**2
    measure = (measure * _TAPERS[taper](x)).to(distance.dtype)
    radius = radius.to(distance.dtype)
    xi = torch.zeros(1, count, 3, dtype=distance.dtype, device=distance.device)
    xi[..., 0] = radius
    waves = sinc(2 * distance[:, None] * radius)  # [n, k]
    return (spectrum.spectrum(xi) * measure).to(distance.dtype) @ waves.mT


def _half_space_indices(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """All triples with |n_i| <= bound_i of each graph, but only one of n and -n.

    Args:
        bounds: (b, 3) int64, at least 0.

    Returns:
        Graph of each triple, (t,), and the triples, (t, 3) int64, those of one graph behind those
        of another and (0, 0, 0) first.
    """
    sides = 2 * bounds + 1
    # Counted through, n and -n are equally far from the middle, which is 0: the half behind it.
    half = sides.prod(dim=1) // 2
    graph = torch.arange(len(bounds), device=bounds.device).repeat_interleave(half + 1)
    begin = (half + 1).cumsum(0) - (half + 1)
    number = torch.arange(len(graph), device=bounds.device) - (begin - half)[graph]
    sides = sides[graph]
    third = number % sides[:, 2]
    number = number // sides[:, 2]
    index = torch.stack((number // sides[:, 1], number % sides[:, 1], third), dim=1)
    return graph, index - bounds[graph]


@torch.no_grad()
def _indices(lattice: Tensor, dual: Tensor, max_frequency: float) -> tuple[Tensor, Tensor]:
    """Triples n (b, r, 3) with |n . dual| < max_frequency, padded with 0, and which are valid."""
    lattice, dual = lattice.double(), dual.double()
    bounds = (max_frequency * lattice.norm(dim=-1)).floor()  # n_i = G . a_i
    candidates = (2 * bounds + 1).prod(dim=1) / 2
    if float(candidates.sum()) > _MOST_CANDIDATES:
        most = int(candidates.argmax())
        raise ValueError(
            f"too many reciprocal lattice vectors below {max_frequency} cycles/Å; expected at most "
            f"{_MOST_CANDIDATES} candidates; got {float(candidates.sum()):.3g}, most of graph "
            f"{most} with sides {lattice[most].norm(dim=-1).tolist()} Å; reduce max_frequency"
        )
    graph, index = _half_space_indices(bounds.long())
    square = (index[..., None] * dual[graph]).sum(dim=1).square().sum(dim=-1)
    kept = square < max_frequency**2
    graph, index = graph[kept], index[kept]
    counts = torch.bincount(graph, minlength=len(lattice))
    width = int(counts.max()) if len(counts) else 0
    column = torch.arange(len(graph), device=graph.device) - (counts.cumsum(0) - counts)[graph]
    padded = index.new_zeros(len(lattice), width, 3)
    padded[graph, column] = index
    return padded, torch.arange(width, device=graph.device) < counts[:, None]


def _sorted_rows(cell: Tensor, pbc: Tensor) -> tuple[Tensor, Tensor]:
    """The periodic lattice vectors, then unit vectors perpendicular to them and to each other.

    Returns:
        (b, 3, 3), and which rows are periodic, (b, 3).
    """
    if cell.ndim != 3 or cell.shape[1:] != (3, 3) or not cell.is_floating_point():
        raise ValueError(
            f"cell must be (graphs, 3, 3), floating point; got shape {tuple(cell.shape)}, "
            f"{cell.dtype}"
        )
    if pbc.shape != cell.shape[:2] or pbc.dtype != torch.bool:
        raise ValueError(
            f"pbc must be bool of shape {tuple(cell.shape[:2])}; got shape {tuple(pbc.shape)}, "
            f"{pbc.dtype}"
        )
    cell = _reduced(at_least_float32(cell), pbc)
    order = (~pbc).to(torch.uint8).argsort(dim=1, stable=True)
    given = cell.gather(1, order[..., None].expand(-1, -1, 3))
    periodic = pbc.gather(1, order)
    own = periodic[..., None]
    first = torch.where(own[:, 0], given[:, 0], given.new_tensor([1.0, 0.0, 0.0]))
    size = first.detach().abs()
    tie = size.amax(dim=1, keepdim=True) * size.new_tensor([0.0, 1e-3, 2e-3])
    axis = torch.nn.functional.one_hot((size + tie).argmin(dim=1), 3).to(first.dtype)
    second = torch.where(own[:, 1], given[:, 1], _unit_normal(first, axis))
    third = torch.where(own[:, 2], given[:, 2], _unit_normal(first, second))
    rows = torch.stack((first, second, third), dim=1)
    _check_rows(rows.detach(), periodic)
    return rows, periodic


def _reduced(cell: Tensor, pbc: Tensor) -> Tensor:
    """Short vectors of the same lattice, 0 where nothing is periodic: (b, 3, 3).

    As in Gauss's reduction multiples of one vector are taken from another until none gets shorter.
    In a skewed cell the reciprocal vectors are small differences of large products, and random
    features of frequencies magnify what that costs.
    """
    rows = cell.masked_fill(~pbc[..., None], 0.0)
    combination = torch.eye(3, dtype=torch.float64, device=cell.device).repeat(len(cell), 1, 1)
    short = rows.detach().double().clone()  # what follows must not reach `rows`
    for _ in range(_MOST_REDUCTIONS):
        moved = False
        for i, j in itertools.permutations(range(3), 2):
            product = (short[:, i] * short[:, j]).sum(dim=-1) / short[:, j].square().sum(dim=-1)
            # Half a vector more or less is as long: leave it. NaN of no vector is left, too.
            times = torch.where(product.abs() > 0.501, product.round(), 0.0)[:, None]
            if bool((times != 0).any()):
                moved = True
                for x in (short, combination):
                    x[:, i] -= times * x[:, j]
        if not moved:
            break
    # Products and sums: a cell that is short as it is keeps its bits.
    found = (combination.to(rows.dtype)[..., None] * rows[:, None]).sum(dim=2)
    # Of vectors that depend on each other only rounding is left.
    longest = rows.detach().norm(dim=-1).amax(dim=1, keepdim=True)
    return found.masked_fill((short.norm(dim=-1) < _DEGENERATE * longest)[..., None], 0.0)


def _check_rows(rows: Tensor, periodic: Tensor) -> None:
    """Raises ValueError for the first graph whose periodic vectors do not span a lattice."""
    rows = rows.double()
    first, second, third = (rows / rows.norm(dim=-1, keepdim=True)).unbind(1)
    volume = (torch.linalg.cross(first, second) * third).sum(dim=-1).abs()
    bad = ~(volume > _DEGENERATE)  # NaN is bad, too
    if bool(bad.any()):
        graph = int(bad.nonzero()[0])
        raise ValueError(
            f"lattice vectors along periodic axes must be finite and linearly independent; got "
            f"{rows[graph][periodic[graph]].tolist()} of graph {graph}; set pbc to False along "
            "axes without a lattice vector"
        )


def _unit_normal(a: Tensor, b: Tensor) -> Tensor:
    normal = torch.linalg.cross(a, b)
    return normal / normal.norm(dim=-1, keepdim=True)


def _dual(lattice: Tensor) -> tuple[Tensor, Tensor]:
    """Reciprocal vectors (b, 3, 3) in rows, a_i . b_j = 1 if i = j else 0, and volumes (b,)."""
    a, b, c = lattice.unbind(1)
    normals = torch.stack(
        (torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)), dim=1
    )
    volume = (normals[:, 0] * a).sum(dim=-1)
    return normals / volume[:, None, None], volume.abs()


def _step(x: Tensor) -> Tensor:
    return fade((x - 0.8) / 0.2)


def _wendland(x: Tensor) -> Tensor:
    return (1 - x).clamp(min=0.0) ** 4 * (1 + 4 * x)


_TAPERS = {"step": _step, "positive": _wendland}
