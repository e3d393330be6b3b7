"""Small families of spectra for the tests of spectra and nodes."""

import inspect

import torch
from torch import Tensor

from molflt.attention import SPECTRA, Spectrum

RADII = [0.1, 0.25, 0.4]  # of shells, in cycles per unit of length
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64 rounding only
VARIANTS = {
    **{name: {} for name in SPECTRA},
    "gaussian_mixture, asymmetric": {"asymmetric": True},
    "matern, nu=0.5": {"nu": 0.5},
    "matern, nu=2.5": {"nu": 2.5},
    "local, per axis": {"per_axis": True},
    "local, product": {"combine": "product"},
    "smooth_local, order 2": {"order": 2},
    "smooth_local, order 5, product": {"order": 5, "combine": "product", "per_axis": True},
}


def make(variant: str, heads: int = 2, dim: int = 3, seed: int = 0, **options) -> Spectrum:
    """Returns a float64 family with amplitudes of order one."""
    torch.manual_seed(seed)
    family = SPECTRA[variant.split(",")[0]]
    small = {"amplitude": 0.5, "num_boxes": 3, "num_gaussians": 3, "radii": torch.tensor(RADII)}
    known = {key: small[key] for key in small if key in inspect.signature(family).parameters}
    return family(heads, dim=dim, **{**known, **VARIANTS.get(variant, {}), **options}).double()


def randn(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, dtype=torch.float64, generator=generator)
