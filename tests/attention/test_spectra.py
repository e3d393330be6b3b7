"""Spectra and inverse powers: Fourier pairs by quadrature, gradients, precision."""

from __future__ import annotations

import math

import contract
import numpy as np
import pytest
import torch
from families import EXACT, VARIANTS, make, randn
from scipy.interpolate import BSpline
from scipy.special import gammainc
from torch import Tensor

from molflt.attention.spectra import InversePower
from molflt.attention.spectra.inverse_power import POWERS
from molflt.attention.spectra.local import Local


def grid(points: Tensor, weights: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Tensor product of a one-dimensional rule: points (n, l) and weights (n,)."""
    mesh = torch.meshgrid(*[points] * dim, indexing="ij")
    product = torch.meshgrid(*[weights] * dim, indexing="ij")
    return torch.stack(mesh, -1).reshape(-1, dim), torch.stack(product).prod(0).reshape(-1)


def panels(ends: list[float], order: int = 24) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre rule on every interval between two of the sorted ends."""
    x, w = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(order))
    edges = torch.tensor(ends, dtype=torch.float64)[:, None]
    low, high = edges[:-1], edges[1:]
    half = (high - low) / 2
    return ((low + high) / 2 + half * x).reshape(-1), (half * w).reshape(-1)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(
    "variant", ["gaussian_basis", "gaussian", "gaussian_mixture", "gaussian_mixture, asymmetric"]
)
def test_mask_of_gaussians_is_the_integral_of_the_spectrum(variant, dim):
    """Trapezoidal sum over all frequencies: exact to rounding for sums of Gaussians."""
    ranges = {"length_range": (0.9, 1.3)} if variant == "gaussian" else {"width_range": (0.9, 1.3)}
    family = make(variant, dim=dim, **ranges)
    axis = torch.arange(-2.0, 2.0, 0.08, dtype=torch.float64)
    xi, weights = grid(axis, torch.full_like(axis, 0.08), dim)
    z = 0.8 * randn(5, dim)
    g = family.spectrum(xi[None])
    waves = torch.exp(2j * math.pi * (xi @ z.T))
    integral = ((weights * g).to(waves.dtype) @ waves).real
    mask = family.mask(z[None])[0]
    assert (integral - mask).abs().max() < 1e-10
    odd = (family.mask(-z[None])[0] - mask).abs().max()
    assert (odd > 1e-3) if "asymmetric" in variant else (odd == 0), "which masks are even"


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "variant", ["laplace", *(name for name in VARIANTS if "local" in name)], ids=str
)
def test_spectrum_of_box_like_masks_is_the_integral_of_the_mask(variant, dim):
    """The other direction, as these spectra decay slowly: quadrature between the kinks of f."""
    if variant == "laplace":
        family = make(variant, dim=dim, length_range=(0.5, 0.8))
        ends = [0.0, 0.3, 1.0, 2.0, 4.0, 8.0, 14.0, 24.0]
    else:
        family = make(variant, dim=dim, radius_range=(0.6, 1.5))
        order = family.order
        radii = family.log_radius[0, :, 0].exp().tolist()
        ends = sorted({r * k for r in radii for k in range(order % 2, order + 1, 2)} | {0.0})
    half, half_weights = panels(ends)
    points, weights = torch.cat((-half, half)), torch.cat((half_weights, half_weights))
    z, weights = grid(points, weights, dim)
    xi = torch.cat((torch.zeros(1, dim, dtype=torch.float64), 0.4 * randn(6, dim, seed=2)))
    transform = (family.mask(z[None])[0] * weights) @ (2 * math.pi * z @ xi.T).cos()
    torch.testing.assert_close(family.spectrum(xi[None]), transform, rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", range(2, 9))
def test_smooth_local_is_scipys_spline(order):
    family = make("smooth_local", heads=1, dim=1, order=order, num_boxes=1, radius_range=(0.7, 0.7))
    z = torch.linspace(-7, 7, 401, dtype=torch.float64)
    radius = family.log_radius.exp().item()
    knots = [radius * (2 * k - order) for k in range(order + 1)]
    spline = BSpline.basis_element(knots, extrapolate=False)
    expected = torch.nan_to_num(torch.from_numpy(spline(z.numpy()) / spline(0.0)))
    mask = family.mask(z[None, :, None])[0, 0]
    torch.testing.assert_close(mask, family.amplitude.item() * expected, rtol=0, atol=1e-13)
    single = family.float().mask(z.float()[None, :, None])[0, 0]
    torch.testing.assert_close(single.double(), mask, rtol=0, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [1, 3])
def test_amplitude_is_the_mask_at_zero_distance(variant, dim):
    family = make(variant, dim=dim)
    mask = family.mask(torch.zeros(1, 1, dim, dtype=torch.float64))[0, :, 0]
    total = family.amplitude if family.amplitude.ndim == 1 else family.amplitude.sum(dim=-1)
    power = dim if "product" in variant else 1
    torch.testing.assert_close(mask, total**power, **EXACT)


# Gradients, precision, compilation


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients(variant):
    """Against finite differences, and finite at z = 0 and xi = 0."""
    family = make(variant, num_boxes=2) if "local" in variant else make(variant)
    xi = (0.3 * randn(2, 3, 3)).requires_grad_()
    z = (1.3 * randn(1, 2, 2, 3, seed=1)).requires_grad_()

    def check(which, x):
        def function(x, *_):  # gradcheck moves the parameters in place
            out = getattr(family, which)(x)
            return torch.view_as_real(out) if out.is_complex() else out

        assert torch.autograd.gradcheck(function, (x, *family.parameters()))

    check("spectrum", xi if family.radii is None else xi.detach())
    if not isinstance(family, Local):  # a step is not differentiable with respect to its position
        check("mask", z)
    for which, shape in (("spectrum", (1, 4, 3)), ("mask", (1, 4, 4, 3))):
        zero = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        inputs = [zero, *family.parameters()]
        out = getattr(family, which)(zero)
        out = torch.view_as_real(out) if out.is_complex() else out
        for grad in torch.autograd.grad(out.sum(), inputs, allow_unused=True):
            assert grad is None or torch.isfinite(grad).all()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "shell_weights"])
def test_frequencies_have_second_derivatives_at_the_origin(variant):
    """Training on stress needs them: every reciprocal lattice has the node 0."""
    spectrum, xi = make(variant), randn(1, 4, 3)
    xi[:, 0] = 0.0
    xi[:, 1, 0] = 0.0

    def by_strain(strain):
        return spectrum.spectrum(xi @ (torch.eye(3) - strain)).abs().square().sum()

    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(by_strain, (strain,))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_single_precision_and_compile(variant):
    family = make(variant, heads=3)
    xi, z = 0.3 * randn(1, 5, 3), 1.3 * randn(2, 4, 6, 3)
    g, f = family.spectrum(xi), family.mask(z)
    assert g.shape == (3, 5) and f.shape == (2, 3, 4, 6)
    torch.testing.assert_close(family.spectrum(xi.expand(3, -1, -1)), g, **EXACT)
    torch._dynamo.reset()
    for function, x, expected in ((family.spectrum, xi, g), (family.mask, z, f)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, **EXACT)
    family.float()
    torch.testing.assert_close(family.spectrum(xi.float()).to(g.dtype), g, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(family.mask(z.float()).double(), f, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("power", POWERS)
def test_smooth_part_is_an_incomplete_gamma_function(power):
    law = InversePower(power, 0.7)
    square = torch.logspace(-4, 3, 300, dtype=torch.float64, requires_grad=True)
    found, r = law.smooth(square), square.detach().numpy() ** 0.5
    expected = gammainc(power / 2, 0.49 * r**2) / r**power
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12)
    at_zero = law.smooth(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(at_zero, torch.full_like(at_zero, law.at_zero()))
    # branches that `where` discards must not affect the gradient
    (slope,) = torch.autograd.grad(found.sum(), square)
    rest = law.smooth(square.detach() + 1e-7) - law.smooth(square.detach() - 1e-7)
    torch.testing.assert_close(slope, rest / 2e-7, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("power", POWERS)
def test_spectrum_is_its_transform(power):
    contract.check_fourier_pair(InversePower(power, 0.7))


@pytest.mark.parametrize("power", [4, 6])
def test_spectrum_at_zero_is_the_integral(power):
    """Beyond 100, 1 / r^p is integrated in closed form, which needs p > 3."""
    law, end = InversePower(power, 0.7), 100.0
    x, step = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(600))
    r = end * (x + 1) / 2
    tail = 4 * np.pi * end ** (3 - power) / (power - 3)
    integral = float((4 * np.pi * r**2 * law.smooth(r**2) * step).sum() * end / 2 + tail)
    at_zero = float(law.spectrum(torch.zeros(1, 1, 3, dtype=torch.float64)))
    assert integral == pytest.approx(at_zero, rel=1e-10)
