"""Nodes and the spectral position: importance ratios and factors."""

import copy

import pytest
import torch
from families import EXACT, make

from molflt.attention.nodes.random import DensityNodes, GaussianNodes
from molflt.attention.positions import SpectralPosition
from molflt.attention.spectra.gaussian import GaussianBasis


@pytest.mark.parametrize("learn_sigma", [False, True])
def test_weights_of_nodes_around_a_mean(learn_sigma):
    nodes = GaussianNodes(2, 8, sigma=0.4, mean="learned", learn_sigma=learn_sigma).double()
    torch.nn.init.constant_(nodes.mean, 0.3)
    xi, weights = nodes()
    torch.testing.assert_close((-nodes.log_density(xi)).exp() / 8, weights, rtol=1e-9, atol=0)
    torch.testing.assert_close(xi, 0.3 + 0.4 * nodes.eps, rtol=0, atol=1e-6)


def test_a_shared_kernel_is_saved_once_and_survives_a_copy():
    module = torch.nn.Module()
    module.spectrum = make("matern")
    module.nodes = DensityNodes(module.spectrum, 5)
    assert {*module.state_dict()} == {"nodes.unit", "spectrum.amplitude", "spectrum.log_length"}
    twin = copy.deepcopy(module)
    assert twin.nodes.density is twin.spectrum is not module.spectrum
    own = DensityNodes(make("laplace"), 5, shared=False)
    learned = [name for name, p in own.named_parameters() if p.requires_grad]
    assert learned == ["proposal.log_length"]


def random_position(heads: int, nodes: int, seed: int = 0) -> SpectralPosition:
    torch.manual_seed(seed)
    position = SpectralPosition(
        GaussianBasis(heads, 4, width_range=(1.0, 3.0), amplitude=0.5), GaussianNodes(heads, nodes)
    )
    return position.double()


def estimate(position: SpectralPosition, r: torch.Tensor) -> torch.Tensor:
    left, right = position.factors(r[None], r[None])
    return (left @ right.transpose(-1, -2))[0]


def test_zero_spectrum_has_a_gradient():
    """A product of two square roots would have none, and the mask could never start to learn."""
    position = random_position(2, 8)
    with torch.no_grad():
        position.spectrum.amplitude.zero_()
    r = torch.randn(5, 3, dtype=torch.float64)
    assert estimate(position, r).abs().max() == 0
    (estimate(position, r) * torch.randn(2, 5, 5, dtype=torch.float64)).sum().backward()
    grad = position.spectrum.amplitude.grad
    assert torch.isfinite(grad).all() and grad.abs().max() > 0


def test_both_factors_have_one_size():
    """That of the square root of the coefficients."""
    position = random_position(2, 3)
    r = torch.zeros(1, 1, 3, dtype=torch.float64)
    left, right = (factor[0, :, 0, :3] for factor in position.factors(r, r))
    coefficients = position.nodes.sample(position.spectrum)[1]
    torch.testing.assert_close(left, (coefficients.abs() + position.floor).sqrt(), **EXACT)
    torch.testing.assert_close(left * right, coefficients, **EXACT)
