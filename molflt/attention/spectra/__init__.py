"""Families of learnable spectra g(xi), the Fourier transforms of masks f(z)."""

from molflt.attention.spectra.base import Spectrum
from molflt.attention.spectra.gaussian import GaussianBasis, GaussianMixture
from molflt.attention.spectra.inverse_power import InversePower as InversePower
from molflt.attention.spectra.local import Local, SmoothLocal
from molflt.attention.spectra.shell_weights import ShellWeights
from molflt.attention.spectra.shift_invariant import Gaussian, Laplace, Matern
from molflt.attention.spectra.shift_invariant import ShiftInvariant as ShiftInvariant

SPECTRA: dict[str, type[Spectrum]] = {
    "gaussian_basis": GaussianBasis,
    "gaussian_mixture": GaussianMixture,
    "gaussian": Gaussian,
    "laplace": Laplace,
    "matern": Matern,
    "local": Local,
    "smooth_local": SmoothLocal,
    "shell_weights": ShellWeights,
}
