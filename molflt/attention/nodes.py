"""Nodes xi_s and weights c_s at which a spectrum is sampled: integral g ~= sum_s c_s g(xi_s)."""

import math

import torch
from torch import Tensor, nn


class GaussianNodes(nn.Module):
    """Monte Carlo nodes xi = sigma eps, eps ~ N(0, I) fixed, sigma learnable per head.

    Importance sampling with p = N(0, sigma^2 I): c_s = 1 / (r p(xi_s)), which makes the mask
    estimate unbiased for every sigma. FLT (arXiv:2302.01925), eq. 5 and OC20 experiment.

    Args:
        heads: number of heads; every head has its own draw and its own sigma.
        num_nodes: number of nodes r.
        dim: dimension l of positions.
        sigma: initial standard deviation, in cycles per unit of length.
    """

    eps: Tensor

    def __init__(self, heads: int, num_nodes: int = 16, dim: int = 3, sigma: float = 0.15) -> None:
        super().__init__()
        if num_nodes < 1:
            raise ValueError(f"num_nodes must be at least 1; got {num_nodes}")
        self.num_nodes = num_nodes
        self.dim = dim
        self.log_sigma = nn.Parameter(torch.full((heads,), math.log(sigma)))
        self.register_buffer("eps", torch.empty(heads, num_nodes, dim))
        self.redraw_()

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new eps in place; give a generator seeded alike on every rank."""
        draw = torch.randn(self.eps.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            self.eps.copy_(draw)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns nodes (heads, r, l) in cycles per unit of length and weights (heads, r)."""
        sigma = self.log_sigma.exp()[:, None]  # [h, 1]
        nodes = sigma[..., None] * self.eps
        # log p(xi) = -|eps|^2 / 2 - l log(sigma) - l log(2 pi) / 2
        log_inverse_density = self.eps.square().sum(dim=-1) / 2 + self.dim * (
            sigma.log() + 0.5 * math.log(2 * math.pi)
        )
        return nodes, log_inverse_density.exp() / self.num_nodes
