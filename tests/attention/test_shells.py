"""Shell nodes: quadrature identities and errors of masks."""

import math

import pytest
import torch
from families import EXACT, make, randn

from molflt.attention.nodes.base import hermitian
from molflt.attention.nodes.random import GaussianNodes
from molflt.attention.nodes.shells import _DEGREES, ShellNodes, _directions
from molflt.attention.nodes.suggest import suggest_nodes
from molflt.attention.positions.spectral import GraphNodes, SpectralPosition
from molflt.attention.spectra.shell_weights import ShellWeights
from molflt.attention.spectra.shift_invariant import Gaussian


@pytest.fixture(autouse=True)
def float64():
    """Makes buffers double precision, for exact identities."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def unit_gaussian(heads: int = 1, dim: int = 3) -> Gaussian:
    """exp(-|z|^2 / 2) in every head."""
    kernel = Gaussian(heads, dim, length_range=(1.0, 1.0))
    with torch.no_grad():
        kernel.amplitude.fill_(1.0)
    return kernel


@torch.no_grad()
def sampled(spectrum, nodes, z):
    """The mask by the factors of attention: differences (n, l) -> (heads, n)."""
    left, right = SpectralPosition(spectrum, nodes).factors(z[None], torch.zeros_like(z[None, :1]))
    return (left @ right.mT)[0, :, :, 0]


def ball_pairs(count: int, radius: float, seed: int = 0):
    """Differences of points uniform in a ball, (count, 3)."""
    points = randn(2 * count, 3, seed=seed)
    draw = torch.rand(2 * count, 1, generator=torch.Generator().manual_seed(seed))
    points = radius * draw ** (1 / 3) * points / points.norm(dim=-1, keepdim=True)
    return points[:count] - points[count:]


def rms_error(spectrum, nodes, z) -> float:
    error = sampled(spectrum, nodes, z) - spectrum.mask(z[None])[0]
    return error.square().mean().sqrt().item()


@pytest.mark.parametrize("degree", _DEGREES)
def test_directions_are_exact_for_even_polynomials(degree):
    """One of every two antipodes; the mean of z^n over the sphere is 1 / (n + 1)."""
    unit, weights = _directions(3, degree)
    assert (weights > 0).all() and (unit @ unit.T).min() > -1 + 1e-9
    for power in (0, 2, degree - 1):
        mean = (unit ** (power)).T @ weights
        torch.testing.assert_close(mean, torch.full((3,), 1 / (power + 1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dim", "radial"),
    [(2, "gauss")] + [(dim, rule) for dim in (1, 3) for rule in ("trapezoid", "midpoint", "gauss")],
)
def test_shells_are_the_mask_and_its_gradients(dim, radial):
    """To 1e-10: the closed form of the mask is the independent reference."""
    basis = make("gaussian_basis", dim=dim, num_gaussians=2, width_range=(1.0, 1.5))
    count = 40 if radial == "gauss" else 24
    nodes = ShellNodes(3.0, 1.4, count, dim, radial, degrees=[53] * count)
    z = ball_pairs(12, 1.5, seed=1)[:, :dim].contiguous().requires_grad_()
    position = SpectralPosition(basis, nodes)
    left, right = position.factors(z[None], torch.zeros_like(z[None, :1]))
    got, exact = (left @ right.mT)[0, :, :, 0], basis.mask(z[None])[0]
    torch.testing.assert_close(got, exact, **EXACT)
    parameters = (z, *basis.parameters())
    gradients = [torch.autograd.grad(f.square().sum(), parameters) for f in (got, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("ratio", "tol"), [(2, 1e-2), (5, 3e-2), (5, 1e-4), (10, 1e-2)])
def test_suggested_shells_have_the_stated_error(ratio, tol, scale):
    """On other pairs than those that chose them, at any unit of length."""
    nodes, error = suggest_nodes(ratio * scale / 2, scale, tol)
    kernel = unit_gaussian()
    with torch.no_grad():
        kernel.log_length.fill_(math.log(scale))
    got = rms_error(kernel, nodes, ball_pairs(20_000, ratio * scale / 2, seed=5))
    assert error <= tol and got == pytest.approx(error, rel=0.1)


def test_suggested_shells_serve_all_widths_between_two():
    """Shells chosen for the narrowest width only are too far apart for wider ones."""
    alone, both = (suggest_nodes(2.5, 1.0, 1e-3, widest).nodes for widest in (None, 5.0))
    kernel, z = unit_gaussian(), ball_pairs(4000, 2.5)
    errors = {}
    for width in (1.0, 1.2, 1.5, 1.8, 2.5, 3.5, 5.0):
        with torch.no_grad():
            kernel.log_length.fill_(math.log(width))
        errors[width] = rms_error(kernel, alone, z), rms_error(kernel, both, z)
        assert errors[width][1] < 1.2e-3, errors
    assert errors[5.0][0] > 0.1


def test_one_node_replaces_two_antipodes_for_any_spectrum():
    """Also for asymmetric masks, and for nodes per graph, which are half spaces."""
    mixture = make("gaussian_mixture, asymmetric", width_range=(1.0, 1.2), mean_scale=0.5)
    nodes = ShellNodes(3.0, 1.6, 26, degrees=[53] * 26)
    z = ball_pairs(12, 1.5, seed=1)
    exact = mixture.mask(z[None])[0]
    assert (exact - mixture.mask(-z[None])[0]).abs().max() > 0.1
    torch.testing.assert_close(sampled(mixture, nodes, z), exact, rtol=1e-8, atol=1e-8)
    xi, weights = nodes()
    naive = weights * mixture.spectrum(xi)
    assert (naive - weights * hermitian(mixture, xi)).abs().max() > 1e-3
    position = SpectralPosition(mixture, GaussianNodes(2, 1))
    left, right = position.factors(
        z[None], torch.zeros_like(z[None, :1]), nodes=GraphNodes(xi, weights)
    )
    torch.testing.assert_close((left @ right.mT)[0, :, :, 0], exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dim", [1, 3])
def test_weighted_shells_sampled_at_their_nodes_are_the_exact_mask(dim):
    """Up to the accuracy of the directions, with gradients."""
    torch.manual_seed(0)
    shells = ShellNodes(4.0, 0.5, 5, dim, degrees=[41] * 5, normalized=True)
    weights = ShellWeights(2, shells.shell_radius, dim, amplitude=1.0)
    torch.testing.assert_close(
        torch.zeros(5).index_add(0, shells.shell, shells.weights[0]), torch.ones(5), **EXACT
    )
    z = ball_pairs(12, 2.0)[:, :dim].contiguous().requires_grad_()
    exact = weights.mask(z[None])[0]
    left, right = SpectralPosition(weights, shells).factors(z[None], torch.zeros(1, 1, dim))
    got = (left @ right.mT)[0, :, :, 0]
    torch.testing.assert_close(got, exact, **EXACT)
    leaves = z, weights.amplitude
    slopes = [torch.autograd.grad(mask.square().sum(), leaves) for mask in (got, exact)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


def test_mask_of_weighted_shells_is_smooth_at_zero():
    shells = ShellNodes(4.0, 0.5, 5, normalized=True)
    weights = ShellWeights(3, shells.shell_radius, amplitude=1.0)
    z = torch.cat((torch.zeros(1, 3), randn(5, 3)))[None].requires_grad_()
    torch.testing.assert_close(weights.mask(z)[0, :, 0], weights.amplitude.sum(-1), **EXACT)
    gradient = torch.autograd.grad(weights.mask(z).sum(), z, create_graph=True)[0]
    assert gradient[0, 0].abs().max() == 0
    assert torch.autograd.grad(gradient.square().sum() + gradient.sum(), z)[0].isfinite().all()
