import itertools
import math

import numpy as np
import pytest
import torch
from families import EXACT, VARIANTS, make, randn
from scipy.interpolate import BSpline
from scipy.special import gammainc
from torch import Tensor
from torch.distributions import Normal

from molflt.attention import FEATURE_MAPS, NODES, PROJECTIONS, SPECTRA, TOKEN_MIXERS, make_position
from molflt.attention.checks import accepted
from molflt.attention.decoder import Decoder
from molflt.attention.nodes.base import hermitian
from molflt.attention.positions import SpectralPosition
from molflt.attention.spectra import Gaussian, InversePower, ShiftInvariant
from molflt.attention.spectra.inverse_power import POWERS

KERNELS = [v for v in VARIANTS if issubclass(SPECTRA[v.split(",")[0]], ShiftInvariant)]


# Only functions of the distance in three dimensions, to save time.
PAIRS = [(v, d) for v in VARIANTS for d in (1, 3 if SPECTRA[v.split(",")[0]].isotropic else 2)]


def normal_points(count: int, dim: int, seed: int = 0) -> Tensor:
    """Returns scrambled Sobol points of the standard normal distribution, (count, dim)."""
    points = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    return torch.special.ndtri(points.draw(count, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))


def points(count: int, dim: int) -> Tensor:
    """Returns the origin and random points, (count, dim)."""
    drawn = randn(count, dim, seed=2)
    drawn[0] = 0.0
    return drawn


def frequency_rule(dim: int, radii: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns frequencies (n, l) and weights (n,) to integrate functions that decay by 5 cycles.

    The frequencies are Sobol points of a mixture of Gaussians of 8 widths. With `radii`, they lie
    on shells, and the integral is the sum over shells of the means over directions.
    """
    if radii is not None:
        unit = torch.nn.functional.normalize(normal_points(2**11, dim), dim=-1)
        return (radii[:, None, None] * unit).flatten(0, 1), torch.full((len(radii) << 11,), 2**-11)
    scales = 0.02 * 2.0 ** torch.arange(8, dtype=torch.float64)
    xi = torch.cat([scale * normal_points(2**12, dim, i) for i, scale in enumerate(scales)])
    density = Normal(0.0, scales[:, None, None]).log_prob(xi).sum(dim=-1).exp().mean(dim=0)
    return xi, 1 / (density * len(xi))


@pytest.mark.parametrize(("variant", "dim"), PAIRS)
@torch.no_grad()
def test_mask_and_spectrum_are_a_fourier_pair(variant, dim):
    """The integral of f psi equals that of g psi^ for Gaussians psi at several centers.

    Relative to the largest value of the mask, the errors of the quasi-Monte Carlo integrals are
    1e-4 in one dimension, 5e-3 for boxes in two dimensions, and 2e-3 in all other cases.
    """
    spectrum, normal = make(variant, dim=dim), normal_points(2**14, dim, seed=9)
    xi, weights = frequency_rule(dim, spectrum.radius.double() if spectrum.on_shells else None)
    g = hermitian(spectrum, xi[None])
    for width in (0.4, 1.5):
        envelope = weights * (-2 * (math.pi * width * xi.norm(dim=-1)) ** 2).exp()
        for centre in points(3, dim):
            f = spectrum.mask((centre + width * normal)[None])[0]
            wave = torch.polar(torch.ones(len(xi)).double(), 2 * math.pi * xi @ centre)
            found, expected = (g * wave).real @ envelope, f.mean(dim=-1)
            error = ((found - expected).abs() / f.abs().amax(dim=-1)).max()
            assert error < (3e-4 if dim == 1 else 1e-2)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("variant", KERNELS)
@torch.no_grad()
def test_draws_follow_the_density(variant, dim):
    """The mean of a Gaussian wave over draws equals its integral with the density."""
    kernel, count = make(variant, dim=dim), 20_000
    draws = kernel.draw(count, torch.Generator().manual_seed(0))
    assert draws.shape == (kernel.heads, count, dim) and draws.dtype == torch.float64
    u, weights = frequency_rule(dim)
    density = weights * kernel.unit_log_density(u).exp()
    for width, centre in itertools.product((0.1, 0.4, 1.5), points(4, dim)):
        seen, expected = (
            (-2 * (math.pi * width * x.norm(dim=-1)) ** 2).exp() * (2 * math.pi * x @ centre).cos()
            for x in (draws, u)
        )
        error = seen.mean(-1) - density @ expected
        assert (error.abs() / (seen.std(-1) / math.sqrt(count))).max() < 5


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("name", NODES)
@torch.no_grad()
def test_nodes_give_the_mask(name, dim):
    """Random nodes are unbiased and have weights 1 / (r p)."""
    rule, more = NODES[name], {"diameter": 8.0, "max_frequency": 0.9} if name == "shells" else {}
    heads, count = (800, 8) if rule.random else (2, None)
    spectrum = Gaussian(heads, dim, length_range=(1.0, 1.0)).double()
    torch.nn.init.ones_(spectrum.amplitude)
    sizes = accepted(rule, heads=heads, dim=dim, density=spectrum, num_nodes=count)
    nodes = rule(**sizes, **more).double()
    nodes.redraw_(torch.Generator().manual_seed(0))
    z = points(7, dim)
    left, right = SpectralPosition(spectrum, nodes).factors(z[None], 0 * z[None, :1])
    error = (left @ right.mT)[0, :, :, 0] - spectrum.mask(z[None])[0]
    if not rule.random:
        assert error.abs().max() < 2e-3
        return
    xi, weights = nodes()
    if name == "density":
        log_density = spectrum.log_density(xi)
    else:
        sigma = nodes.log_sigma.exp()[:, None, None]
        log_density = Normal(0.0, sigma).log_prob(xi).sum(dim=-1)
    expected = (-log_density).exp() / nodes.num_nodes
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=0)
    score = error.mean(0).abs() / (error.std(0) / math.sqrt(heads) + 1e-12)
    assert score.max() < 4.5, "biased"


REDRAWN = {
    **{f"map {name}": lambda make=make: make(8, 2) for name, make in FEATURE_MAPS.items()},
    **{f"rows {name}": lambda make=make: make(2, 20, 7) for name, make in PROJECTIONS.items()},
    **{
        f"nodes {name}": lambda rule=rule: rule(
            **accepted(rule, heads=2, density=Gaussian(2), num_nodes=8)
        )
        for name, rule in NODES.items()
        if rule.random
    },
    "mask": lambda: make_position("spectral", 2, 8),
    "low rank": lambda: make_position("low_rank", 2, 8, max_tokens=9, rank=3),
    "sines": lambda: make_position("sine_spe", 2, 8),
    "convolutions": lambda: make_position("conv_spe", 2, 8, max_tokens=9),
    "mixer": lambda: TOKEN_MIXERS["random"](8, 6),
    "decoder": lambda: Decoder(8, 2, 1),
}


@pytest.mark.parametrize("name", REDRAWN)
def test_redraw_follows_its_generator(name):
    module = REDRAWN[name]()
    buffers = {key for key, _ in module.named_buffers() if key in module.state_dict()}

    def drawn(seed: int) -> dict[str, Tensor]:
        torch.rand(7)
        module.redraw_(torch.Generator().manual_seed(seed))
        return {key: value.clone() for key, value in module.state_dict().items()}

    first, other, again = drawn(5), drawn(6), drawn(5)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert {key for key in first if not torch.equal(first[key], other[key])} == buffers


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_have_finite_gradients_at_the_origin(variant):
    family, zero = make(variant), torch.zeros(1, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    inputs = [zero, *family.parameters()]
    for grad in torch.autograd.grad(family.mask(zero).sum(), inputs, allow_unused=True):
        assert grad is None or torch.isfinite(grad).all()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "shell_weights"])
def test_frequencies_have_second_derivatives_at_the_origin(variant):
    """Training on stress needs these derivatives: every reciprocal lattice has the node 0."""
    spectrum, xi = make(variant), randn(1, 4, 3)
    xi[:, 0] = 0.0
    xi[:, 1, 0] = 0.0

    def by_strain(strain):
        return spectrum.spectrum(xi @ (torch.eye(3) - strain)).abs().square().sum()

    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(by_strain, (strain,))


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
