"""Nodes of periodic masks on the reciprocal lattice of each crystal, slab or molecule.

Poisson's summation formula, with positions in Å and frequencies in cycles/Å,

    sum_T f(z + T) = (1 / V) sum_G g(G) exp(2 pi i G . z),   T = n . cell, G = n . cell^-T,

turns a decaying mask f into the mask of a crystal. The result does not depend on the choice of the
cell or on the periodic image of an atom. Along directions that are not periodic, the lattice is
virtual: its vectors are perpendicular to the periodic vectors. Their length is the width of the
graph plus the reach of the mask. The error is the part of the mask beyond its reach.
"""

import math
import operator
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.checks import graph_name
from molflt.attention.nodes.lattice import Lattice
from molflt.attention.numerics import counts_of, distances, fade, gauss_rule, opaque, sinc
from molflt.attention.spectra import Spectrum

# Largest number of candidates for nodes in a batch; more suggest a wrong cell or frequency.
_MOST_CANDIDATES = 2**20

# Factors of g as functions of x = |G| / max_frequency in [0, 1]; see `reciprocal_nodes`.
_TAPERS: dict[str, Callable[[Tensor], Tensor]] = {
    "step": lambda x: fade((x - 0.8) / 0.2),
    "positive": lambda x: (1 - x).clamp(min=0.0) ** 4 * (1 + 4 * x),
}


def reciprocal_nodes(
    cell: Tensor,
    pbc: Tensor,
    max_frequency: float,
    extent: Tensor,
    reach: float = 20.0,
    taper: Literal["step", "positive"] = "step",
) -> tuple[Tensor, Tensor]:
    """Returns each graph's reciprocal lattice vectors below a frequency, and their weights.

    Nodes (b, r, 3) in cycles/Å and weights (b, r) in 1/Å^3 have the dtype of the cell (at least
    float32) and are differentiable with respect to the cell. G = 0 comes first; graphs with fewer
    nodes are padded with zeros of weight 0. G and -G form one node with twice the weight; see
    `hermitian`. There are about (2 pi / 3) k^3 V nodes for k = max_frequency.

    At frequency k, where nodes appear and disappear when the cell changes, the taper and its first
    two derivatives are 0. The choices are:

    - "step": 1 up to 0.8 k. It does not change a mask without higher frequencies: a Gaussian of
      width w is reproduced to within 1e-6, 1e-7 and 1e-10 of its height for w k = 1, 1.1 and 1.3. A
      sharper mask is smoothed and oscillates below zero, by 6 percent of its height for w k = 0.2.
    - "positive": Wendland's function (1 - x)^4 (1 + 4 x) of x = |G| / k, whose Fourier transform is
      also positive. A non-negative mask stays non-negative and is smoothed over about 0.7 / k.

    Args:
        cell: (b, 3, 3), lattice vectors as rows, in Å; rows of nonperiodic axes are ignored.
        pbc: (b, 3) bool, True for periodic lattice vectors.
        max_frequency: k, in cycles/Å.
        extent: (b, 3), widths of the graphs in Å, from `free_extent`; 0 along periodic axes.
        reach: distance in Å beyond which the mask is negligible, for nonperiodic axes. For
            Gaussians and a reach of 4, 5.5 and 7 widths, the error relative to the height of the
            mask is 4e-4, 4e-7 and 3e-11. If the taper truncates the spectrum, the error is about
            3e-4 and 4e-5 for k times reach = 6 and 9.
        taper: "step" or "positive"; see above.
    """
    vectors, dual, volume = Lattice.of(cell, pbc, extent, reach)
    index, valid = _indices(vectors.detach(), dual.detach(), max_frequency)
    # Unlike matrix products, these sums are bitwise independent of other graphs in the batch.
    nodes = (index.to(dual.dtype)[..., None] * dual[:, None]).sum(dim=2)
    weights = _TAPERS[taper](distances(nodes) / max_frequency) / volume[:, None]
    weights = torch.where(valid, weights, 0.0)
    is_origin = torch.arange(nodes.shape[1], device=nodes.device) == 0
    return nodes, weights * torch.where(is_origin, 1, 2)


def tapered_mask(
    spectrum: Spectrum, distance: Tensor, max_frequency: float, taper: str, farthest: float
) -> Tensor:
    """Computes the mask that `reciprocal_nodes` samples: distances (n,) -> (heads, n).

    The mask is the Fourier transform of the tapered g. For an isotropic spectrum in three
    dimensions, it is f(r) = int_0^k 4 pi xi^2 taper(xi / k) g(xi) sinc(2 xi r) d xi, computed by
    Gauss quadrature. Distances are in Å and at most `farthest`.
    """
    # `index` gives a fixed number even if a compiler treats module attributes as variables.
    count = operator.index(16 + math.ceil(8 * max_frequency * farthest))
    x, step = torch.tensor(gauss_rule(count), dtype=torch.float64, device=distance.device)
    radius = max_frequency * x
    measure = step * (4 * math.pi * max_frequency) * radius**2
    measure = (measure * _TAPERS[taper](x)).to(distance.dtype)
    radius = radius.to(distance.dtype)
    xi = F.pad(radius[None, :, None], (0, 2))
    with torch.autocast(distance.device.type, enabled=False):
        waves = sinc(2 * distance[:, None] * radius)  # [n, k]
        return (spectrum.spectrum(xi) * measure).to(distance.dtype) @ waves.mT


def _half_space_indices(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Returns graphs (t,) and triples (t, 3) with |n_i| <= bound_i, 0 first, one of n and -n."""
    sides = 2 * bounds + 1  # [b, 3]
    # In row-major order, n and -n are equally far from 0, which is in the middle of the box. Each
    # graph has the triples from the middle, number `half`, to the end.
    half = sides.prod(dim=1) // 2
    graph = torch.arange(len(bounds), device=bounds.device).repeat_interleave(half + 1)
    begin = (half + 1).cumsum(0) - (half + 1)  # of each graph in the result
    number = torch.arange(len(graph), device=bounds.device) - (begin - half)[graph]
    _, second_side, third_side = sides[graph].unbind(dim=1)
    row, third = number // third_side, number % third_side
    index = torch.stack((row // second_side, row % second_side, third), dim=1)
    return graph, index - bounds[graph]


def _unknown_indices(vectors: Tensor, dual: Tensor, max_frequency: float) -> tuple[Tensor, Tensor]:
    """Returns tensors with the shapes of the results of `_indices`, for the compiler."""
    width = torch.library.get_ctx().new_dynamic_size(min=2)
    index = vectors.new_empty(vectors.shape[0], width, 3, dtype=torch.long)
    return index, index.new_empty(vectors.shape[0], width, dtype=torch.bool)


@opaque(_unknown_indices)
@torch.no_grad()
def _indices(vectors: Tensor, dual: Tensor, max_frequency: float) -> tuple[Tensor, Tensor]:
    """Returns triples n (b, r, 3) with |n . dual| < max_frequency, and a mask (b, r) of these."""
    vectors, dual = vectors.double(), dual.double()
    bounds = (max_frequency * vectors.norm(dim=-1)).floor()  # n_i = G . a_i
    candidates = (2 * bounds + 1).prod(dim=1) / 2
    if not float(candidates.sum()) <= _MOST_CANDIDATES:  # or NaN
        largest = int(candidates.argmax())
        raise ValueError(
            f"too many reciprocal lattice vectors below {max_frequency} cycles/Å; got sides "
            f"{vectors[largest].norm(dim=-1).tolist()} Å of {graph_name(largest, len(vectors))}; "
            "reduce max_frequency, set pbc to False along axes with vacuum, or train a potential "
            "with far_field=False"
        )
    graph, index = _half_space_indices(bounds.long())
    square = (index[..., None] * dual[graph]).sum(dim=1).square().sum(dim=-1)
    below = square < max_frequency**2
    graph, index = graph[below], index[below]
    counts = counts_of(graph, len(vectors))
    width = max([2, *counts.tolist()])  # Inductor's products expect more than 1
    column = torch.arange(len(graph), device=graph.device) - (counts.cumsum(0) - counts)[graph]
    padded = index.new_zeros(len(vectors), width, 3)
    padded[graph, column] = index
    return padded, torch.arange(width, device=graph.device) < counts[:, None]
