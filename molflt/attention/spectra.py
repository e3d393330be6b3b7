"""Families of learnable spectra g(xi) and the masks f(z) whose Fourier transform they are.

f(z) = integral exp(2 pi i z . xi) g(xi) d xi, FLT (arXiv:2302.01925), eq. 4. Positions in the unit
of length of the caller (Å for atoms), frequencies xi in cycles per that unit.
"""

import math

import torch
from torch import Tensor, nn


class GaussianBasis(nn.Module):
    """Sum of Gaussians of learnable widths, with learnable amplitudes per head.

    f_h(z) = sum_t a_ht exp(-|z|^2 / 2 sigma_t^2)
    g_h(xi) = sum_t a_ht (2 pi sigma_t^2)^(l/2) exp(-2 pi^2 sigma_t^2 |xi|^2)

    This is FLT's basis for molecules (arXiv:2302.01925, OC20 experiment) with the weights
    w_t = a_t (2 pi sigma_t^2)^(l/2): the amplitude a_t is what the mask adds to a logit at zero
    distance, so amplitudes of all widths share one scale.

    Args:
        heads: number of heads; every head has its own mask.
        num_gaussians: number of Gaussians T.
        dim: dimension l of positions.
        width_range: smallest and largest initial width sigma_t, spaced evenly in the logarithm.
        amplitude: standard deviation of the initial amplitudes a_ht.
    """

    def __init__(
        self,
        heads: int,
        num_gaussians: int = 32,
        dim: int = 3,
        width_range: tuple[float, float] = (0.7, 5.0),
        amplitude: float = 0.1,
    ) -> None:
        super().__init__()
        if num_gaussians < 1:
            raise ValueError(f"num_gaussians must be at least 1; got {num_gaussians}")
        self.dim = dim
        low, high = (math.log(width) for width in width_range)
        self.log_width = nn.Parameter(torch.linspace(low, high, num_gaussians))
        self.amplitude = nn.Parameter(amplitude * torch.randn(heads, num_gaussians))

    def spectrum(self, xi: Tensor) -> Tensor:
        """g(xi) per head: frequencies (heads or 1, nodes, l) -> (heads, nodes)."""
        variance = (2 * self.log_width).exp()  # [t]
        volume = (2 * math.pi * variance) ** (self.dim / 2)
        square = xi.square().sum(dim=-1, keepdim=True)  # [h or 1, s, 1]
        gaussians = (-2 * math.pi**2 * variance * square).exp() * volume  # [h or 1, s, t]
        gaussians = gaussians.expand(len(self.amplitude), -1, -1)
        return torch.einsum("hst,ht->hs", gaussians, self.amplitude)

    def mask(self, delta: Tensor) -> Tensor:
        """f(z) per head: differences (batch, ..., l) -> (batch, heads, ...)."""
        square = delta.square().sum(dim=-1, keepdim=True)
        gaussians = (-0.5 * square * (-2 * self.log_width).exp()).exp()  # [b, ..., t]
        return (gaussians @ self.amplitude.T).movedim(-1, 1)
