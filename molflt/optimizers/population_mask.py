"""FLT's mask of the positions of a population's members, isotropic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from molflt.attention import Encoding
from molflt.attention.encodings import Bias, Factors
from molflt.attention.positions.base import differences
from molflt.attention.positions.spectral import GraphNodes, SpectralPosition
from molflt.attention.spectra import GaussianBasis

__all__ = ["PopulationMask"]


class PopulationMask(SpectralPosition):
    """FLT's mask of positions, sampled at nodes of each population.

    Nodes that are part of the weights would favor some directions of space. These are drawn for
    each population from isotropic densities, node s from that of Gaussian t = s mod T as it starts,
    N(0, 1 / (2 pi w_t)^2), with c_s = 1 / (r p(xi_s)) and p the mixture of these r densities: FLT,
    eq. 5.
    """

    def __init__(self, spectrum: GaussianBasis, num_nodes: int) -> None:
        super().__init__(spectrum, None)
        self.num_nodes = num_nodes
        log_width = spectrum.log_width.detach().double()
        self.register_buffer("log_sigma", -log_width - math.log(2 * math.pi))

    def width(self, head_dim: int) -> int:
        return head_dim + 2 * self.num_nodes

    def evaluate(self, mixing: str, positions: Tensor, waves: Tensor) -> Encoding:
        """Returns waves at positions (batch, members, d), in units of length."""
        if mixing == "softmax":
            return Bias(self.bias(differences(positions, positions)))
        return Factors(*self.factors(positions, positions, self.nodes_of(waves)))

    def nodes_of(self, waves: Tensor) -> GraphNodes:
        """Nodes (batch, r, d) and weights from normal numbers; node s is of Gaussian s mod T."""
        sigma = self.get_buffer("log_sigma").to(waves)
        each = torch.arange(len(sigma), device=waves.device)
        place = torch.arange(self.num_nodes, device=waves.device) % len(sigma)
        count = (place == each[:, None]).sum(dim=-1)  # 0 for some Gaussians if r is below T
        xi = waves * sigma[place].exp()[:, None]
        square, d = xi.square().sum(dim=-1, keepdim=True), waves.shape[-1]
        log_p = -0.5 * square * (-2 * sigma).exp() - d * (sigma + 0.5 * math.log(2 * math.pi))
        log_rp = (log_p + count.to(log_p).log()).logsumexp(dim=-1)
        # g has the unit of a volume and 1 / p its inverse: float64 until they are multiplied
        return GraphNodes(xi, (-log_rp).exp())
