"""Sums over a reciprocal lattice, computed on a mesh at constant cost per token.

The kernel of a crystal, (1 / V) sum_G g(G) exp(2 pi i G . (r_i - r_j)), needs as many waves per
token as there are nodes G, whose number grows with the cell. Instead, B-splines spread tokens over
the points of a mesh, which is convolved with the kernel, and the same splines interpolate the
result at the tokens, as in smooth particle mesh Ewald sums (Essmann et al., J. Chem. Phys. 103,
8577 (1995)). Only low frequencies are needed; products with three small matrices of waves replace
fast Fourier transforms. Unlike with `reciprocal_nodes`, shifting all tokens, choosing a different
cell, or using a supercell changes the result by up to the interpolation error.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.nodes.lattice import Lattice
from molflt.attention.nodes.reciprocal import _TAPERS
from molflt.attention.numerics import distances, sinc

OVERSAMPLING = {4: 1.25, 5: 1.25, 6: 2.0, 8: 2.0}
"""Number of mesh points per half of the shortest wavelength, for each spline order.

For these orders, relative errors of kernelized attention with the positive taper are at most 3e-3,
6e-4, 6e-6 and 2e-7. Errors of gradients with respect to positions are up to ten times as large."""

# Largest number of mesh points of a graph; 10^6 atoms need a fifth of this number, and 14 GB with 8
# features. A larger number suggests a mistake in the cell or in the frequencies.
_MOST_POINTS = 2**24


class Mesh(NamedTuple):
    """Mesh of one graph and its reciprocal vectors."""

    sides: tuple[int, ...]  # points along each lattice vector
    # Fourier transforms along each axis as real matrices, (2a, n1), (2b, 2 n2) and (2c, 2 n3), for
    # n_i points and a, b, c frequencies; the factors 2 are real and imaginary parts. The first axis
    # has no negative frequencies, because the values on the mesh are real.
    transforms: tuple[Tensor, ...]
    inside: Tensor  # (a, b, c) bool, True for triples m below the end of the spectrum
    xi: Tensor  # (r, 3), frequencies of these triples, in cycles/Å
    # (r,), in 1/Å^3: taper / V, divided by the transforms of the splines; m and -m are combined
    weights: Tensor

    @property
    def points(self) -> int:
        return math.prod(self.sides)

    @classmethod
    def of(cls, lattice: Lattice, graph: int, max_frequency: float, order: int) -> "Mesh":
        """Builds the mesh of one graph for frequencies below `max_frequency` (cycles/Å)."""
        dual, volume = lattice.dual[graph], lattice.volume[graph]
        length = lattice.vectors[graph].detach().double().norm(dim=-1)
        bounds = [int(n) for n in (max_frequency * length).floor()]  # largest |m| of each axis
        fine = (2 * OVERSAMPLING[order] * max_frequency * length).ceil().int().tolist()
        # At least the points of one spline, and the points that distinguish all frequencies.
        sides = [max(order, 2 * m + 1, n) for m, n in zip(bounds, fine, strict=True)]
        if math.prod(sides) > _MOST_POINTS:
            raise ValueError(
                f"too many mesh points, {math.prod(sides):,}, for a cell with sides of "
                f"{length.tolist()} Å; reduce max_frequency={max_frequency}"
            )
        lows = 0, -bounds[1], -bounds[2]
        ranges = [
            torch.arange(low, bound + 1, device=dual.device)
            for low, bound in zip(lows, bounds, strict=True)
        ]
        triple = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1)  # [a, b, c, 3]
        # Not a matrix product, for the reason given in `reciprocal_nodes`.
        xi = (triple.to(dual.dtype)[..., None] * dual).sum(dim=-2)
        x = distances(xi) / max_frequency
        inside = x.detach() < 1
        side = torch.tensor(sides, device=dual.device)
        of_splines = sinc(triple.to(dual.dtype) / side).prod(dim=-1) ** (2 * order)
        multiplicity = torch.where(triple[..., 0] > 0, 2.0, 1.0)
        weights = multiplicity * _TAPERS["positive"](x) / of_splines / volume
        first, second, third = (
            _fourier_matrix(m, n).to(dual) for m, n in zip(ranges, sides, strict=True)
        )
        first = first[:, : sides[0]]  # the values on the mesh do not have an imaginary part
        return cls(tuple(sides), (first, second, third), inside, xi[inside], weights[inside])

    def stencil(self, fractional: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """Returns the indices and weights of the p^3 mesh points around each token.

        Both are (tokens, p^3) for splines of order p. The weights of a token sum to 1. `fractional`
        contains the fractional coordinates of the tokens, (tokens, 3).
        """
        near = torch.arange(order, device=fractional.device)
        index, weight = torch.zeros_like(near[:1])[None], torch.ones_like(fractional[:, :1])
        for axis, side in enumerate(self.sides):
            place = side * fractional[:, axis]
            base = place.detach().floor()
            along = (base.long()[:, None] + near) % side
            index = (index[:, :, None] * side + along[:, None]).flatten(1)
            weight = (weight[:, :, None] * splines(place - base, order)[:, None]).flatten(1)
        return index, weight

    def convolve(self, grid: Tensor, coefficients: Tensor) -> Tensor:
        """Convolves values on the mesh, (points, channels), with the kernel.

        `coefficients` (r,) are g(xi) times `weights`.
        """
        first, second, third = (matrix.to(grid.dtype) for matrix in self.transforms)
        (n1, n2, n3), (a, b, c) = self.sides, self.inside.shape
        # Each product leaves the axes in the order that the next product needs; the factor 2 of an
        # axis contains the real and the imaginary part.
        x = first @ grid.view(n1, -1)  # [2a, n2 n3 channels]
        y = second @ x.view(a, 2 * n2, -1)  # [a, 2b, n3 channels]
        z = third @ y.view(a * b, 2 * n3, -1)  # [a b, 2c, channels]
        box = coefficients.new_zeros(a, b, c).masked_scatter(self.inside, coefficients)
        z = z.view(a * b, c, 2, -1) * box.to(grid.dtype).view(a * b, c, 1, 1)
        y = third.mT @ z.flatten(1, 2)
        x = second.mT @ y.view(a, 2 * b, -1)
        return (first.mT @ x.view(2 * a, -1)).view(self.points, -1)


def splines(t: Tensor, order: int) -> Tensor:
    """Returns the cardinal B-splines M_p(t + p - 1), ..., M_p(t): (...) -> (..., p).

    They are positive and sum to 1. t is the distance of a token from the last mesh point at or
    before it, in units of the mesh spacing.
    """
    # Recursion from Essmann et al., eq. 4.1: M_n(u) from M_(n-1)(u) and M_(n-1)(u - 1).
    w = [1 - t, t]
    for n in range(3, order + 1):
        inner = [(t + n - 1 - k) * w[k - 1] + (k + 1 - t) * w[k] for k in range(1, n - 1)]
        w = [x / (n - 1) for x in ((1 - t) * w[0], *inner, t * w[-1])]
    return torch.stack(w, dim=-1)


def _fourier_matrix(m: Tensor, side: int) -> Tensor:
    """Returns exp(-2 pi i m n / side) as a real float64 matrix (2 len(m), 2 side).

    Rows are (m, part) and columns are (part, n), where the parts are real and imaginary.
    """
    n = torch.arange(side, device=m.device)
    phase = 2 * math.pi / side * ((m[:, None] * n) % side).double()
    cos, sin = phase.cos(), phase.sin()
    real, imaginary = torch.cat((cos, sin), dim=1), torch.cat((-sin, cos), dim=1)
    return torch.stack((real, imaginary), dim=1).flatten(0, 1)
