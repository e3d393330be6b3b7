"""Structured nodes: quadrature identities, error and rotation scatter of masks, refusals."""

import math

import pytest
import torch
from families import EXACT, make, randn, same_heads
from scipy.spatial.transform import Rotation

from molflt.attention.nodes import NODES
from molflt.attention.nodes.base import hermitian
from molflt.attention.nodes.random import GaussianNodes, OrthogonalNodes, SobolNodes
from molflt.attention.nodes.shells import _DEGREES, ShellNodes, _directions
from molflt.attention.nodes.suggest import suggest_nodes
from molflt.attention.positions.multiplicative import MultiplicativePosition
from molflt.attention.positions.spectral import GraphNodes, SpectralPosition
from molflt.attention.spectra.gaussian import GaussianBasis
from molflt.attention.spectra.shells import ShellWeights
from molflt.attention.spectra.shift_invariant import Gaussian

OWN_SIGMA = 1 / (2 * math.pi)  # of the density of a Gaussian mask of width 1


@pytest.fixture(autouse=True)
def float64():
    """Buffers in double precision, so that identities are exact."""
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


def rotation_scatter(spectrum, nodes, distances, rotations: int = 200) -> float:
    """Standard deviation of a sampled mask over random rotations, rms over distances and heads."""
    turns = torch.from_numpy(Rotation.random(rotations, rng=0).as_matrix())
    z = (distances[:, None, None] * turns[:, :, 0]).flatten(0, 1)
    values = sampled(spectrum, nodes, z).unflatten(-1, (len(distances), rotations))
    return values.std(dim=-1).square().mean().sqrt().item()


@pytest.mark.parametrize("degree", _DEGREES)
def test_directions_are_exact_for_even_polynomials(degree):
    """Mean of x^a y^b z^c over the sphere: (a-1)!! (b-1)!! (c-1)!! / (a+b+c+1)!!."""
    unit, weights = _directions(3, degree)
    assert (weights > 0).all() and abs(weights.sum() - 1) < 1e-12
    gram = unit @ unit.T
    assert gram.min() > -1 + 1e-9  # one of every two antipodes
    top = min(degree - 1, 40)

    def odd_factorial(n: int) -> float:
        return math.prod(range(n - 1, 0, -2))

    for a, b in ((0, 0), (2, 0), (2, 2), (4, 2), (top // 4 * 2, top // 6 * 2), (top, 0)):
        c = top - a - b
        if c < 0:
            continue
        got = (unit[:, 0] ** a * unit[:, 1] ** b * unit[:, 2] ** c) @ weights
        expected = math.prod(odd_factorial(n) for n in (a, b, c)) / odd_factorial(top + 2)
        assert abs(got - expected) < 1e-12, (a, b, c)


@pytest.mark.parametrize("degree", [1, 2, 5, 8, 20])
def test_circles_are_exact_up_to_their_degree(degree):
    unit, weights = _directions(2, degree)
    angle = torch.atan2(unit[:, 1], unit[:, 0])
    for even in range(2, degree + 1, 2):
        assert abs((even * angle).cos() @ weights) < 1e-12
        assert abs((even * angle).sin() @ weights) < 1e-12


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
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_few_shells_reach_what_thousands_of_random_nodes_do_not():
    """2R / s = 5: at most 150 nodes for 1e-3, where 4096 independent ones stay at 1e-2."""
    z = ball_pairs(600, 2.5)
    nodes, error = suggest_nodes(2.5, 1.0, 1e-3)
    kernel = unit_gaussian()
    assert nodes.num_nodes <= 150 and error <= 1e-3
    assert rms_error(kernel, nodes, z) < 1.1e-3
    heads = unit_gaussian(2)
    errors = {}
    for rule in (GaussianNodes, SobolNodes):
        drawn = rule(2, 4096, sigma=OWN_SIGMA)
        drawn.redraw_(torch.Generator().manual_seed(0))
        errors[rule] = rms_error(heads, drawn, z)
    assert 0.7e-2 < errors[GaussianNodes] < 1.5e-2
    assert 0.4e-3 < errors[SobolNodes] < 2e-3


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("ratio", "tol"), [(2, 1e-2), (5, 3e-2), (5, 1e-4), (10, 1e-2)])
def test_suggested_shells_err_as_they_say(ratio, tol, scale):
    """On other pairs than those that chose them, at any unit of length."""
    nodes, error = suggest_nodes(ratio * scale / 2, scale, tol)
    kernel = unit_gaussian()
    with torch.no_grad():
        kernel.log_length.fill_(math.log(scale))
    got = rms_error(kernel, nodes, ball_pairs(20_000, ratio * scale / 2, seed=5))
    assert error <= tol and got == pytest.approx(error, rel=0.1)


def test_suggested_shells_serve_all_widths_between_two():
    """Shells for the narrowest width alone lie too far apart for the wider ones."""
    alone, both = (suggest_nodes(2.5, 1.0, 1e-3, widest).nodes for widest in (None, 5.0))
    kernel, z = unit_gaussian(), ball_pairs(4000, 2.5)
    errors = {}
    for width in (1.0, 1.2, 1.5, 1.8, 2.5, 3.5, 5.0):
        with torch.no_grad():
            kernel.log_length.fill_(math.log(width))
        errors[width] = rms_error(kernel, alone, z), rms_error(kernel, both, z)
        assert errors[width][1] < 1.2e-3, errors
    assert errors[5.0][0] > 0.1


@pytest.mark.parametrize(
    ("rule", "low", "high"), [(OrthogonalNodes, -0.56, -0.44), (SobolNodes, -1.1, -0.75)]
)
def test_structured_draws_are_unbiased_and_converge(rule, low, high):
    """As 1 / sqrt(r) if orthogonal, faster if Sobol; the spectrum is not that of the density."""
    heads, errors = 1000, {}
    basis = same_heads(make("gaussian_basis", heads, num_gaussians=2, width_range=(1.0, 1.5)))
    z = randn(6, 3, seed=3)
    exact = basis.mask(z[None])[0].detach()
    for r in (16, 128):
        nodes = rule(heads, r, sigma=0.2)
        nodes.redraw_(torch.Generator().manual_seed(r))
        error = sampled(basis, nodes, z) - exact
        errors[r] = error.square().mean().sqrt().item()
        score = error.mean(0) / (error.std(0) / math.sqrt(heads))
        assert score.abs().max() < 4, score
    slope = math.log(errors[128] / errors[16]) / math.log(8)
    assert low < slope < high, errors


def test_rotations_move_the_mask_of_shells_least():
    """At as many nodes, 124, and at distances up to 4 widths."""
    distances = torch.linspace(0.5, 4.0, 8)
    shells = suggest_nodes(2.5, 1.0, 1e-3).nodes
    scatter = {"shells": rotation_scatter(unit_gaussian(), shells, distances)}
    for rule in ("gaussian", "orthogonal", "sobol"):
        nodes = NODES[rule](8, shells.num_nodes, sigma=OWN_SIGMA)
        nodes.redraw_(torch.Generator().manual_seed(0))
        scatter[rule] = rotation_scatter(unit_gaussian(8), nodes, distances)
    assert scatter["shells"] < 2e-3 and 0.02 < scatter["gaussian"] < 0.1
    assert 10 * scatter["shells"] < scatter["sobol"] < scatter["gaussian"]


def test_one_node_stands_for_both_antipodes_of_any_spectrum():
    """Asymmetric masks too; so for nodes per graph, which are half spaces."""
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


def test_shell_index_and_radius_describe_the_nodes():
    nodes = ShellNodes(5.0, 0.4, 4)
    norm = nodes.xi[0].norm(dim=-1)
    torch.testing.assert_close(nodes.shell_radius[nodes.shell], norm, **EXACT)
    torch.testing.assert_close(nodes.shell_radius, 0.1 * torch.arange(1, 5.0), **EXACT)
    assert nodes.xi.shape == (1, nodes.num_nodes, 3) and not list(nodes.parameters())
    degrees = [int(0.8 * 2 * math.pi * k * 5.0 + 3) for k in nodes.shell_radius.tolist()]
    expected = [len(_directions(3, degree).weights) for degree in degrees]
    assert nodes.shell.bincount().tolist() == expected


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
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), (z, weights.amplitude)),
        torch.autograd.grad(exact.square().sum(), (z, weights.amplitude)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_mask_of_weighted_shells_is_invariant_and_smooth_at_zero():
    shells = ShellNodes(4.0, 0.5, 5, normalized=True)
    weights = ShellWeights(3, shells.shell_radius, amplitude=1.0)
    turn = torch.from_numpy(Rotation.random(rng=0).as_matrix())
    z = torch.cat((torch.zeros(1, 3), randn(5, 3)))[None]
    torch.testing.assert_close(weights.mask(z @ turn.T), weights.mask(z), **EXACT)
    torch.testing.assert_close(weights.mask(z)[0, :, 0], weights.amplitude.sum(-1), **EXACT)
    z.requires_grad_()
    assert torch.autograd.gradcheck(weights.mask, (z,))
    gradient = torch.autograd.grad(weights.mask(z).sum(), z, create_graph=True)[0]
    assert gradient[0, 0].abs().max() == 0
    assert torch.autograd.grad(gradient.square().sum() + gradient.sum(), z)[0].isfinite().all()


def test_a_positional_kernel_by_shells():
    """Its factors are the exact kernel."""
    torch.manual_seed(0)
    rule = suggest_nodes(2.5, 1.0, 1e-3, widest=3.0).nodes
    position = MultiplicativePosition(GaussianBasis(2, 3, width_range=(1.0, 3.0)), rule)
    x = ball_pairs(9, 1.25)[None]
    left, right = position.factors(x, x)
    exact = position.kernel(x[:, :, None] - x[:, None])
    assert left.shape[-2:] == (9, 2 * rule.num_nodes + 1)
    torch.testing.assert_close(left @ right.mT, exact, rtol=0, atol=2e-3)


def test_shells_are_not_random():
    nodes = ShellNodes(5.0, 0.3)
    before = nodes.xi.clone()
    nodes.redraw_(torch.Generator().manual_seed(5))
    assert torch.equal(nodes()[0], before)


def weighted(**options) -> ShellNodes:
    return ShellNodes(5.0, 0.3, normalized=True, **options)


def weights(dim: int = 3) -> ShellWeights:
    return ShellWeights(2, weighted().shell_radius, dim)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ShellNodes(0.0, 0.3), "diameter must be positive and finite; got 0"),
        (lambda: ShellNodes(5.0, math.inf), "max_frequency must be positive and finite; got inf"),
        (lambda: ShellNodes(5.0, 0.3, degree_factor=-1), "degree_factor must be positive"),
        (lambda: ShellNodes(5.0, 0.3, 0), "num_shells must be at least 1; got 0"),
        (lambda: ShellNodes(5.0, 0.3, dim=4), "dim must be 1, 2 or 3; got 4; use 'sobol'"),
        (lambda: ShellNodes(5.0, 0.3, radial="simpson"), "radial must be .*; got 'simpson'"),
        (lambda: ShellNodes(5.0, 0.3, dim=2, radial="midpoint"), "radial must be 'gauss' in two"),
        (lambda: ShellNodes(5.0, 0.3, 3, degrees=[3, 5]), "degrees must be 3, one per shell"),
        (
            lambda: ShellNodes(100.0, 1.0),
            "degree must be at most 131 .*; got 133; reduce max_f",
        ),
        (lambda: ShellNodes(5.0, 0.3).log_density(randn(1, 1, 3)), "density"),
        (lambda: weights(dim=2), "dim 1 or 3; got 2"),
        (
            lambda: SpectralPosition(weights(), ShellNodes(5.0, 0.3)),
            "ShellWeights",
        ),
        (
            lambda: SpectralPosition(weights(), GaussianNodes(2)),
            "shells.*GaussianNodes",
        ),
        (
            lambda: SpectralPosition(weights(), weighted(num_shells=7)),
            "radii of ShellWeights must be those of the shells; got 3 other ones for 7",
        ),
        (
            lambda: SpectralPosition(GaussianBasis(2), weighted()),
            "normalized=True are for ShellWeights; got GaussianBasis",
        ),
        (lambda: SpectralPosition(GaussianBasis(2, dim=2), ShellNodes(5.0, 0.3)), "2 dimensions"),
        (lambda: suggest_nodes(0.0, 1.0), "radius must be positive"),
        (lambda: suggest_nodes(2.5, 1.0, widest=0.5), "widest must be at least width=1; got 0.5"),
        (lambda: suggest_nodes(2.5, 1.0, 1e-7), "tol must be at least 1e-6"),
        (lambda: suggest_nodes(10.0, 1.0, 3e-2), "tol must be at most half of .* 0.035"),
        (lambda: suggest_nodes(30.0, 1.0, 1e-3), "no shells reach tol=0.001 for .* = 60"),
    ],
)
def test_errors_say_what_is_wrong(build, words):
    with pytest.raises(ValueError, match=words) as error:
        build()
    assert "\n" not in str(error.value)
