import numpy as np
import pytest
import torch
from families import EXACT, make, randn
from torch import Tensor

from molflt.attention import Spectrum, suggest_nodes
from molflt.attention.nodes import GaussianNodes, ShellNodes
from molflt.attention.nodes.base import hermitian
from molflt.attention.nodes.lattice import free_extent
from molflt.attention.nodes.reciprocal import reciprocal_nodes
from molflt.attention.positions.spectral import FrequencyProjection, GraphNodes, SpectralPosition
from molflt.attention.spectra import Gaussian, GaussianBasis, ShellWeights

pytestmark = pytest.mark.usefixtures("float64")


def gaussian(width: float) -> Gaussian:
    """Returns the kernel exp(-|z|^2 / (2 width^2))."""
    kernel = Gaussian(1, length_range=(width, width))
    torch.nn.init.ones_(kernel.amplitude)
    return kernel


def sampled(spectrum, nodes, z, of_graph: GraphNodes | None = None):
    """Returns the mask computed from factors: differences (n, l) -> (heads, n)."""
    position = SpectralPosition(spectrum, nodes)
    left, right = position.factors(z[None], torch.zeros_like(z[None, :1]), of_graph)
    return (left @ right.mT)[0, :, :, 0]


def ball_pairs(count: int, radius: float, seed: int = 0):
    """Returns differences of uniform points in a ball, (count, 3)."""
    points = randn(2 * count, 3, seed=seed)
    draw = torch.rand(2 * count, 1, generator=torch.Generator().manual_seed(seed))
    points = radius * draw ** (1 / 3) * points / points.norm(dim=-1, keepdim=True)
    return points[:count] - points[count:]


@torch.no_grad()
def rms_error(spectrum, nodes, z) -> float:
    error = sampled(spectrum, nodes, z) - spectrum.mask(z[None])[0]
    return error.square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("dim", "radial"),
    [(2, "gauss")] + [(dim, rule) for dim in (1, 3) for rule in ("trapezoid", "midpoint", "gauss")],
)
def test_shells_are_the_mask_and_its_gradients(dim, radial):
    basis = make("gaussian_basis", dim=dim, num_gaussians=2, width_range=(1.0, 1.5))
    count = 40 if radial == "gauss" else 24
    nodes = ShellNodes(3.0, 1.4, count, dim, radial, degrees=[53] * count)
    z = ball_pairs(12, 1.5, seed=1)[:, :dim].contiguous().requires_grad_()
    got, exact = sampled(basis, nodes, z), basis.mask(z[None])[0]
    torch.testing.assert_close(got, exact, **EXACT)
    parameters = (z, *basis.parameters())
    gradients = [torch.autograd.grad(f.square().sum(), parameters) for f in (got, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("ratio", "tol", "scale"), [(2, 1e-4, 3.0), (5, 3e-2, 1.0), (10, 3e-2, 3.0)]
)
def test_suggested_shells_have_the_stated_error(ratio, tol, scale):
    """The error is measured on pairs that the search does not use, in any unit of length."""
    with torch.device("meta"):  # the search does not use the default device
        nodes, error, options = suggest_nodes(ratio * scale / 2, scale, tol)
    assert nodes.xi.is_meta
    nodes = SpectralPosition.build(2, **options).nodes
    got = rms_error(gaussian(scale), nodes, ball_pairs(20_000, ratio * scale / 2, seed=5))
    assert error <= tol and got == pytest.approx(error, rel=0.1)


def test_suggested_shells_serve_all_widths_between_two():
    """Shells chosen only for the narrowest width are too far apart for larger widths."""
    alone, both = (suggest_nodes(2.0, 1.0, 3e-3, widest).nodes for widest in (None, 5.0))
    z = ball_pairs(4000, 2.0)
    for width in (1.0, 1.2, 1.5, 1.8, 2.5, 3.5, 5.0):
        assert rms_error(gaussian(width), both, z) < 3.6e-3, width
    assert rms_error(gaussian(5.0), alone, z) > 0.1


def test_one_node_replaces_two_antipodes_for_any_spectrum():
    """Includes asymmetric masks, and nodes of each graph, which fill a half space."""
    mixture = make("gaussian_mixture, asymmetric", width_range=(1.0, 1.2), mean_scale=0.5)
    nodes = ShellNodes(3.0, 1.6, 26, degrees=[53] * 26)
    z = ball_pairs(12, 1.5, seed=1)
    exact = mixture.mask(z[None])[0]
    assert (exact - mixture.mask(-z[None])[0]).abs().max() > 0.1
    torch.testing.assert_close(sampled(mixture, nodes, z), exact, rtol=1e-8, atol=1e-8)
    xi, weights = nodes()
    naive = weights * mixture.spectrum(xi)
    assert (naive - weights * hermitian(mixture, xi)).abs().max() > 1e-3
    found = sampled(mixture, GaussianNodes(2, 1), z, GraphNodes(xi, weights))
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dim", [1, 3])
def test_weighted_shells_sampled_at_their_nodes_are_the_exact_mask(dim):
    shells = ShellNodes(4.0, 0.5, 5, dim, degrees=[41] * 5, normalized=True)
    weights = ShellWeights(2, shells.shell_radius, dim, amplitude=1.0)
    torch.testing.assert_close(
        torch.zeros(5).index_add(0, shells.shell, shells.weights[0]), torch.ones(5), **EXACT
    )
    z = ball_pairs(12, 2.0)[:, :dim].contiguous().requires_grad_()
    exact = weights.mask(z[None])[0]
    got = sampled(weights, shells, z)
    torch.testing.assert_close(got, exact, **EXACT)
    leaves = z, weights.amplitude
    slopes = [torch.autograd.grad(mask.square().sum(), leaves) for mask in (got, exact)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


def random_position(heads: int, nodes: int, seed: int = 0) -> SpectralPosition:
    torch.manual_seed(seed)
    position = SpectralPosition(
        GaussianBasis(heads, 4, width_range=(1.0, 3.0), amplitude=0.5), GaussianNodes(heads, nodes)
    )
    return position.double()


def test_zero_spectrum_has_a_gradient():
    """Two square roots as factors would have no gradient, and the mask could not learn."""
    position = random_position(2, 8)
    with torch.no_grad():
        position.spectrum.amplitude.zero_()
    z = torch.randn(5, 3)
    mask = sampled(position.spectrum, position.nodes, z)
    assert mask.abs().max() == 0
    (mask * torch.randn(2, 5)).sum().backward()
    grad = position.spectrum.amplitude.grad
    assert torch.isfinite(grad).all() and grad.abs().max() > 0


def test_both_factors_have_the_same_magnitude():
    position = random_position(2, 3)
    r = torch.zeros(1, 1, 3, dtype=torch.float64)
    left, right = (factor[0, :, 0, :3] for factor in position.factors(r, r))
    coefficients = position.nodes.sample(position.spectrum)[1]
    torch.testing.assert_close(left, (coefficients.abs() + position.floor).sqrt(), **EXACT)
    torch.testing.assert_close(left * right, coefficients, **EXACT)


CELL = torch.tensor([[7.0, 0.0, 0.0], [2.5, 6.0, 0.0], [-1.5, 2.0, 8.0]], dtype=torch.float64)
PBC = {"crystal": [1, 1, 1], "slab": [1, 1, 0], "wire": [1, 0, 0], "molecule": [0, 0, 0]}
ANY_AXIS = {**PBC, "slab along b and c": [0, 1, 1], "slab along a and c": [1, 0, 1]}


def gaussians(*widths: float, heads: int = 2) -> GaussianBasis:
    torch.manual_seed(0)
    basis = GaussianBasis(heads, len(widths), amplitude=0.5, positive=True).double()
    basis.log_width.data = torch.tensor(widths).double().log()
    return basis


def periodic(kind: str) -> Tensor:
    return torch.tensor([ANY_AXIS[kind]]).bool()


def atoms(count: int = 6, seed: int = 0) -> Tensor:
    return 3 + randn(1, count, 3, seed=seed).clamp(-1.5, 1.5) * 2


def nodes_of(positions, cell, pbc, max_frequency, **options):
    graph = torch.arange(len(positions)).repeat_interleave(positions.shape[1])
    extent = free_extent(positions.flatten(0, 1), graph, cell, pbc)
    return reciprocal_nodes(cell, pbc, max_frequency, extent, **options)


def product(spectrum, positions, nodes) -> Tensor:
    """Returns U_i . V_j, (b, heads, n, n)."""
    left, right = SpectralPosition(spectrum, None).factors(positions, positions, nodes)
    return left @ right.mT


def mask(spectrum: Spectrum, positions, cell, pbc, max_frequency=0.6, **options) -> Tensor:
    return product(spectrum, positions, nodes_of(positions, cell, pbc, max_frequency, **options))


def image_sum(spectrum: Spectrum, positions: Tensor, cell: Tensor, pbc: Tensor) -> Tensor:
    """Returns sum_T f(r_i - r_j + T) over 13 images on both sides along every periodic axis."""
    steps = [torch.arange(-13.0, 14.0) if p else torch.zeros(1) for p in pbc[0].tolist()]
    images = torch.cartesian_prod(*steps).double() @ torch.where(pbc[0, :, None], cell[0], 0.0)
    delta = positions[:, :, None] - positions[:, None]
    return spectrum.mask(delta[..., None, :] + images).sum(dim=-1)


@pytest.mark.parametrize("kind", ANY_AXIS)
def test_equals_the_sum_over_images(kind):
    """The measured error is 1.5e-9 for frequencies below 1.2 / width and a reach of 7 widths."""
    spectrum, x = gaussians(2.0, 2.3), atoms()
    fast = mask(spectrum, x, CELL[None], periodic(kind), 0.6, reach=16.1)
    exact = image_sum(spectrum, x, CELL[None], periodic(kind))
    assert (fast - exact).abs().max() < 1e-8


def test_a_small_cell_has_two_nodes_for_compilers():
    cell, pbc = torch.eye(3)[None], torch.ones(1, 3).bool()
    nodes, weights = reciprocal_nodes(cell, pbc, 0.25, torch.zeros(1, 3))
    assert weights.tolist() == [[1, 0]] and not nodes.any()


@pytest.mark.parametrize("max_frequency", [0.25, 0.5])
def test_nodes_are_all_vectors_of_half_the_ball(max_frequency):
    cell = torch.tensor([[[8.0, 0.0, 0.0], [1.5, 8.0, 0.0], [0.0, 0.0, 29.9]]]).double()
    nodes, _ = reciprocal_nodes(cell, torch.ones(1, 3).bool(), max_frequency, torch.zeros(1, 3))
    box = np.indices((41, 41, 41)).reshape(3, -1).T - 20
    ball = np.linalg.norm(box @ np.linalg.inv(cell[0].numpy()).T, axis=1) < max_frequency
    assert 2 * nodes.shape[1] - 1 == ball.sum()
    assert nodes[0, 0].abs().max() == 0 and nodes.norm(dim=-1).max() < max_frequency
    integers = nodes @ cell.mT
    torch.testing.assert_close(integers, integers.round(), **EXACT)


@pytest.mark.parametrize("taper", ["step", "positive"])
def test_nodes_enter_with_weight_zero(taper):
    """Rounding at a threshold that equals lengths of lattice vectors has no effect."""
    spectrum, x = gaussians(0.7), atoms()
    cube = 6 * torch.eye(3).double()[None]
    inside, outside = (
        nodes_of(x, cube, periodic("crystal"), k, taper=taper) for k in (0.5 - 5e-7, 0.5 + 5e-7)
    )
    assert outside[0].shape[1] - inside[0].shape[1] == 15  # (3, 0, 0), (2, 2, 1)
    difference = (product(spectrum, x, inside) - product(spectrum, x, outside)).abs().max()
    assert 0 < difference < 1e-5


def test_positive_taper_keeps_positive():
    """For a kernel far below the resolution, the step ripples to -6 % of its height."""
    spectrum, cell = gaussians(0.7), 40 * torch.eye(3).double()[None]
    line = torch.zeros(1, 100, 3).double()
    line[0, :, 0] = torch.linspace(0, 20, 100)
    step, positive = (
        product(
            spectrum,
            line,
            reciprocal_nodes(cell, periodic("crystal"), 0.3, torch.zeros(1, 3), taper=taper),
        )[0, 0]
        for taper in ("step", "positive")
    )
    assert step[0].min() < -0.05 * step[0, 0]
    assert 0 < positive[0].min() < 1e-4 * positive[0, 0]  # 6e-4 if the taper has a kink


def test_rows_of_frequencies_are_independent_normal_variables():
    """The origin has one variable, because its sin is 0; other nodes have two variables."""
    xi = torch.tensor([[[0.0, 0, 0], [0.1, 0, 0], [0.05, 0.2, -0.1]]])
    rows = FrequencyProjection(1, 40_000).rows(xi)[0, 0]
    expected = torch.tensor([1.0, 1, 1, 0, 1, 1]).diag()
    assert (rows @ rows.T / rows.shape[1] - expected).abs().max() < 0.03  # 4 standard errors
