"""Spectra of shift-invariant kernels; each is an amplitude times a density to sample from."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from molflt.attention.numerics import rand64, randn64, root
from molflt.attention.spectra.base import Spectrum, _log_spaced


class ShiftInvariant(Spectrum):
    """Shift-invariant kernel as the mask: f_h(z) = C_h K(z / length_h).

    By Bochner's theorem, g_h(xi) = C_h length_h^l p(length_h xi), where K is the characteristic
    function of the density p: K(z) = E cos(2 pi z . u) for u ~ p. This is FLT (arXiv:2302.01925v1),
    eq. 7, with the factor 2 pi in the samples u instead of the positions. All nodes drawn from p
    (`DensityNodes`) have the importance ratio C_h. Unlike in the paper, C_h may be negative,
    because a mask is added to logits and need not be positive definite.

    Args:
        dim: dimension l of positions.
        length_range: smallest and largest initial length_h, in units of length; the lengths of the
            heads are evenly spaced on a logarithmic scale.
        amplitude: standard deviation of the initial C_h = f_h(0).
    """

    paper: ClassVar[str] = "2302.01925v1, eq. 7"
    nodes: ClassVar[str] = "density"

    def __init__(
        self,
        heads: int,
        dim: int = 3,
        length_range: tuple[float, float] = (1.0, 5.0),
        amplitude: float = 0.1,
    ) -> None:
        super().__init__(heads, dim)
        self.log_length = nn.Parameter(_log_spaced("length_range", length_range, heads))
        self.amplitude = nn.Parameter(amplitude * torch.randn(heads))

    def profile(self, z: Tensor) -> Tensor:
        """Returns K, with K(0) = 1, at differences in units of length_h: (..., l) -> (...)."""
        raise NotImplementedError(f"{type(self).__name__} must override profile(z)")

    def unit_log_density(self, u: Tensor) -> Tensor:
        """Returns log p at the given frequencies, in cycles per length_h: (..., l) -> (...)."""
        raise NotImplementedError(f"{type(self).__name__} must override unit_log_density(u)")

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws independent u ~ p: a float64 tensor (heads, nodes, l) on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} must override draw(nodes, generator)")

    def log_density(self, xi: Tensor) -> Tensor:
        """Returns log(length^l p(length xi)): (heads or 1, nodes, l) -> (heads, nodes)."""
        length = self.log_length.exp()[:, None, None]
        return self.unit_log_density(length * xi) + self.dim * self.log_length[:, None]

    def spectrum(self, xi: Tensor) -> Tensor:
        return self.amplitude[:, None] * self.log_density(xi).exp()

    def mask(self, delta: Tensor) -> Tensor:
        scaled = delta[..., None, :] / self.log_length.exp()[:, None]  # [b, ..., h, l]
        return (self.profile(scaled) * self.amplitude).movedim(-1, 1)


class Gaussian(ShiftInvariant):
    """K(z) = exp(-|z|^2 / 2); p is the normal density with standard deviation 1 / (2 pi)."""

    isotropic: ClassVar[bool] = True

    def profile(self, z: Tensor) -> Tensor:
        return (-0.5 * z.square().sum(dim=-1)).exp()

    def unit_log_density(self, u: Tensor) -> Tensor:
        constant = 0.5 * self.dim * math.log(2 * math.pi)
        return constant - 2 * math.pi**2 * u.square().sum(dim=-1)

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        return randn64(self.heads, nodes, self.dim, generator=generator) / (2 * math.pi)


class Laplace(ShiftInvariant):
    """K(z) = exp(-|z|_1); p is a product of Cauchy densities with scale 1 / (2 pi)."""

    def profile(self, z: Tensor) -> Tensor:
        return (-z.abs().sum(dim=-1)).exp()

    def unit_log_density(self, u: Tensor) -> Tensor:
        return (math.log(2) - (2 * math.pi * u).square().log1p()).sum(dim=-1)

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        uniform = rand64(self.heads, nodes, self.dim, generator=generator)
        return (math.pi * (uniform - 0.5)).tan() / (2 * math.pi)


class Matern(ShiftInvariant):
    """Matérn kernel of smoothness nu, an isotropic kernel between exp(-|z|) and the Gaussian.

    With s = sqrt(2 nu) |z|, K(z) is exp(-s) for nu = 0.5, (1 + s) exp(-s) for 1.5 and (1 + s + s^2
    / 3) exp(-s) for 2.5. The variable 2 pi u follows a multivariate Student t distribution with 2
    nu degrees of freedom. Source: Rasmussen and Williams, Gaussian Processes for Machine Learning
    (2006), eqs. 4.14 to 4.17. See `ShiftInvariant` for the other arguments.
    """

    isotropic: ClassVar[bool] = True

    def __init__(
        self,
        heads: int,
        dim: int = 3,
        length_range: tuple[float, float] = (1.0, 5.0),
        amplitude: float = 0.1,
        nu: float = 1.5,
    ) -> None:
        super().__init__(heads, dim, length_range, amplitude)
        if nu not in (0.5, 1.5, 2.5):
            raise ValueError(f"nu must be 0.5, 1.5 or 2.5, which have closed forms; got {nu}")
        self.nu = nu

    def profile(self, z: Tensor) -> Tensor:
        square = 2 * self.nu * z.square().sum(dim=-1)
        s = root(square)
        if self.nu == 0.5:
            return (-s).exp()
        if self.nu == 1.5:
            return (1 + s) * (-s).exp()
        return (1 + s + square / 3) * (-s).exp()

    def unit_log_density(self, u: Tensor) -> Tensor:
        half = 0.5 * self.dim
        constant = math.lgamma(self.nu + half) - math.lgamma(self.nu)
        constant += half * math.log(2 * math.pi / self.nu)
        square = (2 * math.pi * u).square().sum(dim=-1)
        return constant - (self.nu + half) * (square / (2 * self.nu)).log1p()

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        degrees = round(2 * self.nu)
        normal = randn64(self.heads, nodes, self.dim, generator=generator)
        others = randn64(self.heads, nodes, degrees, generator=generator)
        chi_square = others.square().sum(dim=-1, keepdim=True)
        return normal / (chi_square / degrees).sqrt() / (2 * math.pi)
