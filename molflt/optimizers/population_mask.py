"""Isotropic FLT mask of the positions of a population's members."""

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
    """FLT mask of positions, sampled at separate nodes for each population.

    Nodes that are part of the weights would favor some directions of space. Nodes are therefore
    drawn for each population from isotropic densities. Node s is drawn from the initial density of
    Gaussian t = s mod T, N(0, 1 / (2 pi w_t)^2). Its weight is c_s = 1 / (r p(xi_s)), where p is
    the mixture of these r densities (FLT, eq. 5).
    """

    def __init__(self, spectrum: GaussianBasis, num_nodes: int) -> None:
        super().__init__(spectrum, None)
        self.num_nodes = num_nodes
        log_width = spectrum.log_width.detach().double()
        self.register_buffer("log_sigma", -log_width - math.log(2 * math.pi))

    def width(self, head_dim: int) -> int:
        return head_dim + 2 * self.num_nodes

    def evaluate(self, mixing: str, positions: Tensor, waves: Tensor) -> Encoding:
        """Returns the encoding of positions (batch, members, d), in units of length."""
        if mixing == "softmax":
            return Bias(self.bias(differences(positions, positions)))
        return Factors(*self.factors(positions, positions, self.nodes_of(waves)))

    def nodes_of(self, waves: Tensor) -> GraphNodes:
        """Returns nodes (batch, r, d) and their weights; node s belongs to Gaussian s mod T.

        Args:
            waves: normal numbers, (batch, r, d).
        """
        sigma = self.get_buffer("log_sigma").to(waves)
        each = torch.arange(len(sigma), device=waves.device)
        place = torch.arange(self.num_nodes, device=waves.device) % len(sigma)
        count = (place == each[:, None]).sum(dim=-1)  # 0 for some Gaussians if r is below T
        xi = waves * sigma[place].exp()[:, None]
        square, d = xi.square().sum(dim=-1, keepdim=True), waves.shape[-1]
        log_p = -0.5 * square * (-2 * sigma).exp() - d * (sigma + 0.5 * math.log(2 * math.pi))
        log_rp = (log_p + count.to(log_p).log()).logsumexp(dim=-1)
        # g is a volume and 1 / p an inverse volume: float64 is kept until they are multiplied
        return GraphNodes(xi, (-log_rp).exp())
