"""What every spectrum offers, and the spectra of shift-invariant kernels, with draws from them.

f(z) = Re integral exp(2 pi i z . xi) g(xi) d xi, FLT (arXiv:2302.01925), eq. 4. Positions in the
unit of length of the caller (Å for atoms, 1 for tokens), frequencies xi in cycles per that unit.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from molflt.attention.radial import root


class Spectrum(nn.Module):
    """Base class of the families g(xi): one learnable function per head.

    A family overrides `spectrum` and `mask`, which must be a Fourier pair.

    Args:
        heads: number of heads; every head has its own mask.
        dim: dimension l of positions.
    """

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        at_least_one(heads=heads, dim=dim)
        self.heads = heads
        self.dim = dim

    def spectrum(self, xi: Tensor) -> Tensor:
        """Spectrum g, what a fast mask samples.

        Args:
            xi: frequencies (heads or 1, nodes, l), in cycles per unit of length.

        Returns:
            (heads, nodes), real where the mask is even and complex where it may be asymmetric; in
            units of the mask times length^l.
        """
        raise NotImplementedError(f"{type(self).__name__} must override spectrum(xi)")

    def mask(self, delta: Tensor) -> Tensor:
        """Exact mask f = Re integral exp(2 pi i z . xi) g(xi) d xi.

        Args:
            delta: differences z (batch, ..., l), in units of length.

        Returns:
            (batch, heads, ...), what is added to a logit: no unit.
        """
        raise NotImplementedError(f"{type(self).__name__} must override mask(delta)")


def at_least_one(**counts: int) -> None:
    """Raises ValueError for the first count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}")


def head_width(dim: int, heads: int) -> int:
    """Width d of queries and keys per head; raises ValueError unless heads divide the width."""
    if heads < 1 or dim % heads:
        raise ValueError(f"dim={dim} must be a multiple of heads={heads}; change one of them")
    return dim // heads


def one_of(option: str, choice: str, choices: Iterable[str]) -> None:
    """Raises ValueError for a choice that is not among those known."""
    known = tuple(choices)
    if choice not in known:
        raise ValueError(f"{option}={choice!r} is unknown; expected one of {', '.join(known)}")


def log_spaced(name: str, bounds: tuple[float, float], count: int) -> Tensor:
    """Logarithms (count,) of positive numbers, evenly spaced between those of the two bounds.

    Raises:
        ValueError: unless 0 < bounds[0] <= bounds[1].
    """
    low, high = bounds
    if not 0 < low <= high:
        raise ValueError(f"{name} must be two positive numbers, smallest first; got {bounds}")
    return torch.linspace(math.log(low), math.log(high), count)


class ShiftInvariantKernel(Spectrum):
    """f_h(z) = C_h K(z / length_h), whose spectrum is C_h times a probability density.

    By Bochner's theorem, g_h(xi) = C_h length_h^l p(length_h xi) with p the density of which K is
    the characteristic function, K(z) = E cos(2 pi z . u) for u ~ p. FLT (arXiv:2302.01925), eq. 7,
    with the factor 2 pi in the draws u instead of in the positions. Nodes drawn from p
    (`molflt.attention.nodes.KernelNodes`) then all have the importance ratio C_h.

    Beyond the paper, C_h may be negative: a mask adds to logits and need not be positive definite.

    Args:
        heads: number of heads.
        dim: dimension l of positions.
        length_range: smallest and largest initial length_h, in units of length, spaced evenly in
            the logarithm over the heads.
        amplitude: standard deviation of the initial C_h = f_h(0).
    """

    def __init__(
        self,
        heads: int,
        dim: int = 3,
        length_range: tuple[float, float] = (1.0, 5.0),
        amplitude: float = 0.1,
    ) -> None:
        super().__init__(heads, dim)
        self.log_length = nn.Parameter(log_spaced("length_range", length_range, heads))
        self.amplitude = nn.Parameter(amplitude * torch.randn(heads))

    def kernel(self, z: Tensor) -> Tensor:
        """K at unit length: differences (..., l) -> (...), with K(0) = 1."""
        raise NotImplementedError(f"{type(self).__name__} must override kernel(z)")

    def unit_log_density(self, u: Tensor) -> Tensor:
        """log p at unit length: frequencies (..., l) in cycles per length_h -> (...)."""
        raise NotImplementedError(f"{type(self).__name__} must override unit_log_density(u)")

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws u ~ p at unit length: (heads, nodes, l), float64 on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} must override draw(nodes, generator)")

    def log_density(self, xi: Tensor) -> Tensor:
        """log of length^l p(length xi): (heads or 1, nodes, l) -> (heads, nodes)."""
        length = self.log_length.exp()[:, None, None]
        return self.unit_log_density(length * xi) + self.dim * self.log_length[:, None]

    def spectrum(self, xi: Tensor) -> Tensor:
        """g(xi) per head, real: frequencies (heads or 1, nodes, l) -> (heads, nodes)."""
        return self.amplitude[:, None] * self.log_density(xi).exp()

    def mask(self, delta: Tensor) -> Tensor:
        """f(z) per head: differences (batch, ..., l) -> (batch, heads, ...)."""
        scaled = delta[..., None, :] / self.log_length.exp()[:, None]  # [b, ..., h, l]
        return (self.kernel(scaled) * self.amplitude).movedim(-1, 1)


class GaussianKernel(ShiftInvariantKernel):
    """K(z) = exp(-|z|^2 / 2); p is the normal density of standard deviation 1 / (2 pi)."""

    def kernel(self, z: Tensor) -> Tensor:
        """exp(-|z|^2 / 2): (..., l) -> (...)."""
        return (-0.5 * z.square().sum(dim=-1)).exp()

    def unit_log_density(self, u: Tensor) -> Tensor:
        """log of (2 pi)^(l/2) exp(-2 pi^2 |u|^2): (..., l) -> (...)."""
        constant = 0.5 * self.dim * math.log(2 * math.pi)
        return constant - 2 * math.pi**2 * u.square().sum(dim=-1)

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        """Normal draws (heads, nodes, l)."""
        return _normal((self.heads, nodes, self.dim), generator) / (2 * math.pi)


class LaplaceKernel(ShiftInvariantKernel):
    """K(z) = exp(-|z|_1); p is a product of Cauchy densities of scale 1 / (2 pi), one per axis.

    The tails of p fall as 1 / xi^2 per axis. That makes it a safe proposal for other spectra that
    fall at least as fast along every axis, such as `molflt.attention.local.SmoothLocal`.
    """

    def kernel(self, z: Tensor) -> Tensor:
        """exp(-|z|_1): (..., l) -> (...)."""
        return (-z.abs().sum(dim=-1)).exp()

    def unit_log_density(self, u: Tensor) -> Tensor:
        """log of prod_j 2 / (1 + (2 pi u_j)^2): (..., l) -> (...)."""
        return (math.log(2) - (2 * math.pi * u).square().log1p()).sum(dim=-1)

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        """Cauchy draws (heads, nodes, l), by inverting the distribution function."""
        size = (self.heads, nodes, self.dim)
        uniform = torch.rand(size, dtype=torch.float64, generator=generator)
        return (math.pi * (uniform - 0.5)).tan() / (2 * math.pi)


class MaternKernel(ShiftInvariantKernel):
    """Matérn kernel of smoothness nu: isotropic, between exp(-|z|) and the Gaussian.

    With s = sqrt(2 nu) |z|: exp(-s) for nu = 0.5, (1 + s) exp(-s) for 1.5 and
    (1 + s + s^2 / 3) exp(-s) for 2.5. 2 pi u follows the multivariate Student t distribution of
    2 nu degrees of freedom. Rasmussen and Williams, Gaussian Processes for Machine Learning (2006),
    eqs. 4.14 to 4.17.

    Args:
        heads, dim, length_range, amplitude: see `ShiftInvariantKernel`.
        nu: smoothness, 0.5, 1.5 or 2.5, for which the kernel has a closed form.
    """

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
            raise ValueError(f"nu must be 0.5, 1.5 or 2.5 (closed forms); got {nu}")
        self.nu = nu

    def kernel(self, z: Tensor) -> Tensor:
        """Closed form in the distance: (..., l) -> (...); its gradient at z = 0 is set to 0."""
        square = 2 * self.nu * z.square().sum(dim=-1)
        s = root(square)
        if self.nu == 0.5:
            return (-s).exp()
        if self.nu == 1.5:
            return (1 + s) * (-s).exp()
        return (1 + s + square / 3) * (-s).exp()

    def unit_log_density(self, u: Tensor) -> Tensor:
        """log of the Student t density of 2 pi u, times (2 pi)^l: (..., l) -> (...)."""
        half = 0.5 * self.dim
        constant = math.lgamma(self.nu + half) - math.lgamma(self.nu)
        constant += half * math.log(2 * math.pi / self.nu)
        square = (2 * math.pi * u).square().sum(dim=-1)
        return constant - (self.nu + half) * (square / (2 * self.nu)).log1p()

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        """Student t draws (heads, nodes, l): normal ones over the root of a chi-square."""
        degrees = round(2 * self.nu)
        normal = _normal((self.heads, nodes, self.dim), generator)
        chi_square = _normal((self.heads, nodes, degrees), generator).square().sum(-1, keepdim=True)
        return normal / (chi_square / degrees).sqrt() / (2 * math.pi)


def _normal(size: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Standard normal draws in float64, the same on every device for one generator."""
    return torch.randn(size, dtype=torch.float64, generator=generator)
