"""Exact bias of 3D-Graphormer: a network applied to Gaussian functions of the distance."""

import math

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one, interval
from molflt.attention.encodings import Bias, Encoding
from molflt.attention.numerics import at_least_float32, distances
from molflt.attention.positions.base import Position, differences


class GaussianBias(Position):
    """f_h(z) = (W_2 gelu(W_1 psi(|z|)))_h, added to the logits of softmax attention.

    The psi_k are K Gaussians with learnable mu_k and sigma_k, psi_k(|z|) = exp(-(|z| - mu_k)^2 / (2
    sigma_k^2)) / (sqrt(2 pi) sigma_k) (3D-Graphormer, arXiv:2203.04810, section on 3D spatial
    encoding). The paper also scales and shifts distances depending on the pair of elements; this
    class does not receive elements. Memory is O(N^2 K) per graph.

    Args:
        num_gaussians: number of Gaussians K.
        dim: dimension l of positions.
        hidden_dim: width of the hidden layer; by default K, as in the paper's code.
        mean_range: interval from which initial mu_k are drawn uniformly, in units of length (Å).
        std_range: interval from which initial sigma_k are drawn uniformly, in the same units.
    """

    paper = "2203.04810"
    cost = "N² (K + d)"
    mixings = ("softmax",)
    decodes = False

    def __init__(
        self,
        heads: int,
        num_gaussians: int = 128,
        dim: int = 3,
        hidden_dim: int | None = None,
        mean_range: tuple[float, float] = (0.0, 3.0),
        std_range: tuple[float, float] = (0.1, 3.0),
    ) -> None:
        interval("mean_range", mean_range)
        interval("std_range", std_range, above=0)
        super().__init__()
        hidden_dim = num_gaussians if hidden_dim is None else hidden_dim
        at_least_one(heads=heads, num_gaussians=num_gaussians, dim=dim, hidden_dim=hidden_dim)
        self.heads, self.dim = heads, dim
        self.mean = nn.Parameter(torch.empty(num_gaussians).uniform_(*mean_range))
        self.log_std = nn.Parameter(torch.empty(num_gaussians).uniform_(*std_range).log())
        self.mlp = nn.Sequential(
            nn.Linear(num_gaussians, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, heads)
        )

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        return Bias(self.bias(differences(positions, key_positions)))

    def bias(self, delta: Tensor) -> Tensor:
        distance = distances(at_least_float32(delta))
        with torch.autocast(distance.device.type, enabled=False):
            log_std = at_least_float32(self.log_std)
            scaled = (distance[..., None] - self.mean) * (-log_std).exp()
            psi = (-0.5 * scaled.square() - log_std).exp() / math.sqrt(2 * math.pi)
        # The network runs in the precision of its weights, or of autocast.
        out: Tensor = self.mlp(psi.to(self.mean.dtype))
        return out.movedim(-1, 1)

    def radial_profile(self, distance: Tensor) -> Tensor:
        """Computes f at the given distances, in units of length, for plots: (n,) -> (heads, n)."""
        return self.bias(distance[None, :, None])[0]
