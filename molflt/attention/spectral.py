"""FLT's relative positional encoding: a mask learned through its Fourier transform."""

import math
from typing import Any, Self

import torch
from torch import Tensor

from molflt.attention.encoding import Encoding, Position, differences
from molflt.attention.kernels import ShiftInvariantKernel
from molflt.attention.mixing import at_least_float32
from molflt.attention.nodes import GaussianNodes, KernelNodes, Nodes
from molflt.attention.spectra import SPECTRA, Spectrum

GraphNodes = tuple[Tensor, Tensor]  # nodes (batch, r, l) and weights (batch, r) of each graph


class SpectralPosition(Position):
    """FLT: the mask is learned through its Fourier transform g, sampled at r nodes.

    f(r_i - r_j) ~= sum_s c_s Re[g(xi_s) exp(2 pi i xi_s . (r_i - r_j))] = N1_i . N2_j, with 2r
    columns. FLT (arXiv:2302.01925), eqs. 4-5. Real g give even masks, complex g asymmetric ones.

    The factors depend on the origin although their product does not: centre the positions of each
    graph before calling `factors`, both for the precision of the phases and because feature maps
    see the factors one by one. (Causal models count from their first token instead: a centre would
    tell earlier tokens how many come later.)

    Args:
        spectrum: family of g, with `spectrum(xi)` and `mask(delta)`.
        nodes: where g is sampled; called without arguments, returns nodes and weights.
    """

    # Below this the two sides are no longer balanced, so that the gradient stays finite (and,
    # unlike that of two square roots, does not vanish) where the spectrum crosses zero.
    floor = 1e-4

    def __init__(self, spectrum: Spectrum, nodes: Nodes) -> None:
        super().__init__()
        if spectrum.dim != nodes.dim:
            raise ValueError(
                f"the spectrum has {spectrum.dim} dimensions and its nodes have {nodes.dim}; give "
                "both the dimension of the positions"
            )
        self.spectrum = spectrum
        self.nodes = nodes
        self.dim = spectrum.dim

    @classmethod
    def build(
        cls,
        heads: int,
        dim: int = 3,
        spectrum: str = "gaussian_basis",
        num_nodes: int = 16,
        **options: Any,
    ) -> Self:
        """From the names of its parts, as in a configuration.

        Args:
            heads: number of heads.
            dim: dimension l of positions.
            spectrum: key of `SPECTRA`. Kernels draw nodes from their own spectral density, the
                others from a normal distribution.
            num_nodes: nodes r.
            options: further arguments of the spectrum, and those of the nodes with the prefix
                `node_`.
        """
        if spectrum not in SPECTRA:
            raise ValueError(
                f"spectrum={spectrum!r} is unknown; expected one of {', '.join(SPECTRA)}"
            )
        for_nodes: dict[str, Any] = {
            key[5:]: options.pop(key) for key in list(options) if key.startswith("node_")
        }
        family = SPECTRA[spectrum](heads, dim=dim, **options)
        if isinstance(family, ShiftInvariantKernel):
            return cls(family, KernelNodes(family, num_nodes, **for_nodes))
        return cls(family, GaussianNodes(heads, num_nodes, dim, **for_nodes))

    def width(self, head_dim: int) -> int:
        """d + 2r: the factors append 2r columns to queries and keys."""
        return head_dim + 2 * self.nodes.num_nodes

    def forward(self, mixing: str, query_positions: Tensor, key_positions: Tensor) -> Encoding:
        """The exact mask for softmax, else its factors."""
        if mixing == "softmax":
            return Encoding(bias=self.bias(differences(query_positions, key_positions)))
        return Encoding(factors=self.factors(query_positions, key_positions))

    def bias(self, delta: Tensor) -> Tensor:
        """Exact mask: differences (batch, queries, keys, l) -> (batch, heads, queries, keys)."""
        with torch.autocast(delta.device.type, enabled=False):
            return self.spectrum.mask(at_least_float32(delta))

    def factors(
        self, query_positions: Tensor, key_positions: Tensor, nodes: GraphNodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Fourier factors of the mask.

        Args:
            query_positions: (batch, queries, l), centred per graph.
            key_positions: (batch, keys, l), from the same centre.
            nodes: nodes (batch, r, l) and weights (batch, r) of each graph, such as those of its
                reciprocal lattice, instead of the module's own.

        Returns:
            N1 (batch, heads, queries, 2r) and N2 (batch, heads, keys, 2r).
        """
        with torch.autocast(query_positions.device.type, enabled=False):
            xi, product = self._sampled(nodes)
            # a b = product whatever a is; a = sqrt|product| minimizes the norms of both sides.
            left = (product.abs() + self.floor).sqrt()[..., None, :]
            right = product[..., None, :] / left
            cos, sin = _waves(query_positions, xi)
            same = key_positions is query_positions  # no images: the usual case, computed once
            key_cos, key_sin = (cos, sin) if same else _waves(key_positions, xi)
            if right.is_complex():
                # Re[(a + ib) exp(i(x - y))], the phase of a + ib put on the key's side
                a, b = right.real, right.imag
                key_cos, key_sin = a * key_cos + b * key_sin, a * key_sin - b * key_cos
            else:
                key_cos, key_sin = right * key_cos, right * key_sin
            return (
                torch.cat((left * cos, left * sin), dim=-1),
                torch.cat((key_cos, key_sin), dim=-1),
            )

    def _sampled(self, nodes: GraphNodes | None) -> tuple[Tensor, Tensor]:
        """xi (heads or 1, r, l) or (batch, 1, r, l), and c_s g(xi_s), (heads, r) or (b, h, r)."""
        if nodes is None:
            xi, weights = self.nodes()
            return xi, weights * self.spectrum.spectrum(xi)
        xi, weights = nodes
        graphs, r, _ = xi.shape
        g = self.spectrum.spectrum(xi.reshape(1, graphs * r, -1))  # [h, b r]
        return xi[:, None], weights[:, None] * g.unflatten(-1, (graphs, r)).transpose(0, 1)

    def radial_profile(self, distances: Tensor) -> Tensor:
        """Exact mask along a line: distances (n,) -> (heads, n), for plots."""
        delta = torch.zeros(1, len(distances), self.spectrum.dim).to(distances)
        delta[0, :, 0] = distances
        return self.bias(delta)[0]

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new nodes in place; give a generator seeded alike on every rank."""
        self.nodes.redraw_(generator)


def _waves(positions: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi xi_s . r_i.

    Args:
        positions: (batch, n, l).
        nodes: (heads or 1, r, l), or one set for each graph, (batch, 1, r, l).

    Returns:
        (batch, heads or 1, n, r) each.
    """
    positions = at_least_float32(positions)[:, None]
    phase = 2 * math.pi * positions @ nodes.to(positions.dtype).transpose(-1, -2)
    return phase.cos(), phase.sin()
