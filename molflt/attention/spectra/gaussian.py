"""Sums of Gaussians, centered at zero distance or modulated by waves."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one
from molflt.attention.checks import positive as expect_positive
from molflt.attention.numerics import at_least_float32
from molflt.attention.spectra.base import Spectrum, _log_spaced


class GaussianBasis(Spectrum):
    """Sum of Gaussians with learnable widths, and learnable amplitudes for each head.

    f_h(z) = sum_t a_ht exp(-|z|^2 / 2 sigma_t^2)
    g_h(xi) = sum_t a_ht (2 pi sigma_t^2)^(l/2) exp(-2 pi^2 sigma_t^2 |xi|^2)

    This is FLT's basis for molecules (arXiv:2302.01925, section 5.3) with the weights w_t = a_t
    (2 pi sigma_t^2)^(l/2). Initial amplitudes do not depend on the width.

    Args:
        num_gaussians: number of Gaussians T.
        dim: dimension l of positions.
        width_range: smallest and largest initial width sigma_t; the widths are evenly spaced on a
            logarithmic scale.
        amplitude: standard deviation of the initial a_ht, or their typical value if `positive`.
        positive: learn the logarithms of a_ht. The mask is then positive everywhere; it can serve
            as a multiplicative kernel (`MultiplicativePosition`) or be summed over images.
    """

    paper: ClassVar[str] = "2302.01925, sec. 5.3"
    isotropic: ClassVar[bool] = True

    def __init__(
        self,
        heads: int,
        num_gaussians: int = 32,
        dim: int = 3,
        width_range: tuple[float, float] = (0.7, 5.0),
        amplitude: float = 0.1,
        positive: bool = False,
    ) -> None:
        super().__init__(heads, dim)
        at_least_one(num_gaussians=num_gaussians)
        self.log_width = nn.Parameter(_log_spaced("width_range", width_range, num_gaussians))
        random = torch.randn(heads, num_gaussians)
        self.positive = positive
        if positive:
            expect_positive(amplitude=amplitude)
            self.log_amplitude = nn.Parameter(math.log(amplitude) + 0.1 * random)
        else:
            self.amplitude = nn.Parameter(amplitude * random)

    def spectrum(self, xi: Tensor) -> Tensor:
        variance = (2 * self.log_width).exp()  # [t]
        volume = (2 * math.pi * variance) ** (self.dim / 2)
        square = xi.square().sum(dim=-1, keepdim=True)  # [h or 1, s, 1]
        gaussians = (-2 * math.pi**2 * variance * square).exp() * volume  # [h or 1, s, t]
        gaussians = gaussians.expand(self.heads, -1, -1)
        return torch.einsum("hst,ht->hs", gaussians, self._amplitudes().to(gaussians))

    def mask(self, delta: Tensor) -> Tensor:
        square = delta.square().sum(dim=-1, keepdim=True)
        gaussians = (-0.5 * square * (-2 * self.log_width).exp()).exp()  # [b, ..., t]
        return (gaussians @ self._amplitudes().T.to(gaussians)).movedim(-1, 1)

    def _amplitudes(self) -> Tensor:
        return self.log_amplitude.exp() if self.positive else self.amplitude


class GaussianMixture(Spectrum):
    """Sum of Gaussians in frequency space, each with a mean, a width and a weight per head.

    g(xi) = sum_t w_t exp(-|xi - mu_t|^2 / 2 sigma_t^2)
    f(z) = sum_t exp(-2 pi^2 sigma_t^2 |z|^2) [a_t cos(2 pi mu_t . z) - b_t sin(2 pi mu_t . z)]
    w_t = (a_t + i b_t) (2 pi sigma_t^2)^(-l/2)

    In FLT (arXiv:2302.01925v1, eq. 6), each head has T (2 + l) parameters, and b_t = 0. This g is
    real but not even. Its mask is even: waves of frequency mu_t in Gaussian envelopes of width 1 /
    (2 pi sigma_t). With `asymmetric`, an extension of the paper, the mask also has an odd part.

    Args:
        num_gaussians: number of Gaussians T; 25 in the paper's image experiments.
        dim: dimension l of positions.
        width_range: smallest and largest initial width of an envelope, 1 / (2 pi sigma_t), in units
            of length; the widths are evenly spaced on a logarithmic scale.
        mean_scale: standard deviation of the initial mu_t in units of sigma_t. At 0, the gradient
            of the odd part vanishes.
        amplitude: standard deviation of the initial a_t (and b_t).
        asymmetric: learn b_t; w_t is then complex.
    """

    paper: ClassVar[str] = "2302.01925v1, eq. 6"

    odd_amplitude: nn.Parameter | None

    def __init__(
        self,
        heads: int,
        num_gaussians: int = 25,
        dim: int = 3,
        width_range: tuple[float, float] = (0.7, 5.0),
        mean_scale: float = 1.0,
        amplitude: float = 0.1,
        asymmetric: bool = False,
    ) -> None:
        super().__init__(heads, dim)
        at_least_one(num_gaussians=num_gaussians)
        log_sigma = -_log_spaced("width_range", width_range, num_gaussians) - math.log(2 * math.pi)
        log_sigma = log_sigma.repeat(heads, 1)
        mean = mean_scale * log_sigma.exp()[..., None] * torch.randn(heads, num_gaussians, dim)
        self.log_sigma = nn.Parameter(log_sigma)
        self.mean = nn.Parameter(mean)
        self.amplitude = nn.Parameter(amplitude * torch.randn(heads, num_gaussians))
        odd = nn.Parameter(amplitude * torch.randn(heads, num_gaussians)) if asymmetric else None
        self.register_parameter("odd_amplitude", odd)

    def spectrum(self, xi: Tensor) -> Tensor:
        difference = xi[:, :, None] - self.mean[:, None]  # [h, s, t, l]
        variance = (2 * self.log_sigma).exp()  # [h, t]
        exponent = -0.5 * difference.square().sum(dim=-1) / variance[:, None]
        gaussians = exponent.exp() * (2 * math.pi * variance[:, None]) ** (-0.5 * self.dim)
        even = torch.einsum("hst,ht->hs", gaussians, self.amplitude.to(gaussians))
        if self.odd_amplitude is None:
            return even
        odd = torch.einsum("hst,ht->hs", gaussians, self.odd_amplitude.to(gaussians))
        return torch.complex(at_least_float32(even), at_least_float32(odd))

    def mask(self, delta: Tensor) -> Tensor:
        square = delta.square().sum(dim=-1)[..., None, None]  # [b, ..., 1, 1]
        envelope = (-2 * math.pi**2 * square * (2 * self.log_sigma).exp()).exp()  # [b, ..., h, t]
        phase = 2 * math.pi * (delta[..., None, None, :] * self.mean).sum(dim=-1)
        waves = self.amplitude * phase.cos()
        if self.odd_amplitude is not None:
            waves = waves - self.odd_amplitude * phase.sin()
        return (envelope * waves).sum(dim=-1).movedim(-1, 1)
