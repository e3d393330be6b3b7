"""Small families of spectra, and estimates of their masks, for the tests of spectra and nodes."""

import inspect
import math

import torch
from torch import Tensor

from molflt.attention.nodes.base import Nodes
from molflt.attention.spectra import SPECTRA
from molflt.attention.spectra.base import Spectrum

RADII = [0.1, 0.25, 0.4]  # of shells, in cycles per unit of length
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64, algebra alone
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
    """A float64 family with amplitudes of order one."""
    torch.manual_seed(seed)
    family = SPECTRA[variant.split(",")[0]]
    small = {"amplitude": 0.5, "num_boxes": 3, "num_gaussians": 3, "radii": torch.tensor(RADII)}
    known = {key: small[key] for key in small if key in inspect.signature(family).parameters}
    return family(heads, dim=dim, **{**known, **VARIANTS.get(variant, {}), **options}).double()


def randn(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, dtype=torch.float64, generator=generator)


def estimates(spectrum: Spectrum, nodes: Nodes, z: Tensor) -> Tensor:
    """sum_s c_s Re[g(xi_s) exp(2 pi i xi_s . z)]: differences (n, l) -> (heads, n)."""
    xi, weights = nodes()
    phase = 2 * math.pi * torch.einsum("nl,hsl->hns", z, xi)
    product = weights * spectrum.spectrum(xi)
    if not product.is_complex():
        product = torch.complex(product, torch.zeros_like(product))
    waves = torch.complex(phase.cos(), phase.sin())
    return torch.einsum("hs,hns->hn", product, waves).real.detach()


def same_heads(spectrum: Spectrum) -> Spectrum:
    """Copies the first head to all, so that heads are independent draws for one mask."""
    with torch.no_grad():
        for parameter in spectrum.parameters():
            if len(parameter) == spectrum.heads:
                parameter.copy_(parameter[:1].clone().expand_as(parameter))
    return spectrum
