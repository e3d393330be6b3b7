"""Smooth parts of inverse powers of the distance and their spectra, as in Ewald sums."""

import math

import torch
from torch import Tensor

from molflt.attention.checks import one_of
from molflt.attention.numerics import distances
from molflt.attention.spectra.base import Spectrum

POWERS = (1, 2, 4, 6)
_SERIES = 18  # number of terms; for x < 1, the next term is below 1e-17


class InversePower(Spectrum):
    """Smooth far part f of 1 / r^p, with a spectrum g that falls off like a Gaussian.

    With x = (a r)^2 and the incomplete gamma functions of p/2,

        f(r) = gamma(p/2, x) / (Gamma(p/2) r^p),   1 / r^p = f + Gamma(p/2, x) / (Gamma(p/2) r^p),

    where the last term is negligible beyond a few multiples of the length 1 / a (Ewald, Ann. Phys.
    369, 253, 1921; Nijboer and De Wette, Physica 23, 309, 1957). All heads share the spectrum.

    Args:
        power: p, one of 1, 2, 4, 6, which have closed forms.
        sharpness: a, in 1 / length.
    """

    isotropic = True

    def __init__(self, power: int, sharpness: float) -> None:
        super().__init__(heads=1, dim=3)
        one_of("power", power, POWERS)
        self.power = power
        self.sharpness = sharpness

    def spectrum(self, xi: Tensor) -> Tensor:
        """Returns g in units of length^(3 - p): (1, nodes, 3) -> (1, nodes).

        For p < 3, g diverges at 0, and its finite part is returned there, as if a uniform
        background made the mean of 1 / r^p vanish.
        """
        s = math.pi / self.sharpness * distances(xi)  # k / 2a for the wave number k = 2 pi |xi|
        zero = s == 0
        divisor = torch.where(zero, 1.0, s)
        gaussian = (-(s**2)).exp()
        tail = math.sqrt(math.pi) * s * torch.special.erfc(s)
        if self.power == 1:
            g, at_zero = gaussian / divisor**2, -1.0
        elif self.power == 2:
            g, at_zero = math.sqrt(math.pi) * torch.special.erfc(s) / divisor, -2.0
        elif self.power == 4:
            g, at_zero = 2 * (gaussian - tail), 2.0
        else:
            g, at_zero = (gaussian * (1 - 2 * s**2) + 2 * s**2 * tail) / 3, 1 / 3
        factor = math.pi if self.power == 1 else math.pi**1.5
        return factor * self.sharpness ** (self.power - 3) * torch.where(zero, at_zero, g)

    def smooth(self, square: Tensor) -> Tensor:
        """Computes f, in units of length^-p, from squared distances of any shape; analytic at 0."""
        x, half = self.sharpness**2 * square, self.power / 2
        low = x < 1
        # Each form receives a harmless number where the other one is used.
        small, large = torch.where(low, x, 0.5), torch.where(low, 1.0, x)
        series = torch.zeros_like(x)
        # Horner's scheme for gamma(p/2, x) / x^(p/2) = sum_n (-x)^n / (n! (p/2 + n))
        for n in reversed(range(_SERIES)):
            series = series * -small + 1 / (math.factorial(n) * (half + n))
        closed = large**-half * (1 - self._upper_gamma(large))
        return self.sharpness**self.power * torch.where(low, series / math.gamma(half), closed)

    def at_zero(self) -> float:
        """Returns f(0), the self-interaction of a charge, in units of length^-p."""
        return self.sharpness**self.power / math.gamma(self.power / 2 + 1)

    def _upper_gamma(self, x: Tensor) -> Tensor:
        """Returns Gamma(p/2, x) / Gamma(p/2), which falls from 1 to 0."""
        if self.power == 1:
            return torch.special.erfc(x.sqrt())
        terms = {2: torch.ones_like(x), 4: 1 + x, 6: 1 + x + x**2 / 2}
        return (-x).exp() * terms[self.power]
