"""Relative positional encodings f(r_i - r_j): an exact face for oracles, a factorized one for O(N).

A position module offers
  `bias(delta)`: exact f per head, for softmax attention, and
  `factors(query_positions, key_positions)`: N1, N2 with N1_i . N2_j ~= f(r_i - r_j).
"""

import math

import torch
from torch import Tensor, nn

from molflt.attention.mixing import at_least_float32
from molflt.attention.nodes import GaussianNodes
from molflt.attention.spectra import GaussianBasis


class SpectralPosition(nn.Module):
    """FLT: the mask is learned through its Fourier transform g, sampled at r nodes.

    f(r_i - r_j) ~= sum_s c_s g(xi_s) cos(2 pi xi_s . (r_i - r_j)) = N1_i . N2_j, with 2r columns.
    FLT (arXiv:2302.01925), eqs. 4-5; for real g, which is an even mask.

    The factors depend on the origin although their product does not: centre the positions of each
    graph before calling `factors`, both for the precision of the phases and because feature maps
    see the factors one by one.

    Args:
        spectrum: family of g, with `spectrum(xi)` and `mask(delta)`.
        nodes: where g is sampled; called without arguments, returns nodes and weights.
    """

    def __init__(self, spectrum: GaussianBasis, nodes: GaussianNodes) -> None:
        super().__init__()
        self.spectrum = spectrum
        self.nodes = nodes

    # Below this the two sides are no longer balanced, so that the gradient stays finite (and,
    # unlike that of two square roots, does not vanish) where the spectrum crosses zero.
    floor = 1e-4

    @property
    def width(self) -> int:
        """Number of columns that the factors append to queries and keys, 2r."""
        return 2 * self.nodes.num_nodes

    def bias(self, delta: Tensor) -> Tensor:
        """Exact mask: differences (batch, queries, keys, l) -> (batch, heads, queries, keys)."""
        with torch.autocast(delta.device.type, enabled=False):
            return self.spectrum.mask(at_least_float32(delta))

    def factors(self, query_positions: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Fourier factors of the mask.

        Args:
            query_positions: (batch, queries, l), centred per graph.
            key_positions: (batch, keys, l), from the same centre.

        Returns:
            N1 (batch, heads, queries, 2r) and N2 (batch, heads, keys, 2r).
        """
        with torch.autocast(query_positions.device.type, enabled=False):
            nodes, weights = self.nodes()
            product = weights * self.spectrum.spectrum(nodes)  # [h, s]
            # a b = product whatever a is; a = sqrt|product| minimizes the norms of both sides.
            left = (product.abs() + self.floor).sqrt()
            right = product / left
            waves = _waves(query_positions, nodes)
            same = key_positions is query_positions  # no images: the usual case, computed once
            key_waves = waves if same else _waves(key_positions, nodes)
            return (
                waves * left.repeat(1, 2)[:, None],
                key_waves * right.repeat(1, 2)[:, None],
            )

    def radial_profile(self, distances: Tensor) -> Tensor:
        """Exact mask along a line: distances (n,) -> (heads, n), for plots."""
        delta = torch.zeros(1, len(distances), self.spectrum.dim).to(distances)
        delta[0, :, 0] = distances
        return self.bias(delta)[0]

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new nodes in place; give a generator seeded alike on every rank."""
        self.nodes.redraw_(generator)


def _waves(positions: Tensor, nodes: Tensor) -> Tensor:
    """[cos, sin](2 pi xi_s . r_i): (batch, n, l), (heads, r, l) -> (batch, heads, n, 2r)."""
    positions = at_least_float32(positions)
    phase = 2 * math.pi * torch.einsum("bnl,hsl->bhns", positions, nodes.to(positions.dtype))
    return torch.cat((phase.cos(), phase.sin()), dim=-1)


POSITIONS: dict[str, type[SpectralPosition]] = {"spectral": SpectralPosition}
