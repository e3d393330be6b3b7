"""The spectral mask: exact transform pair, unbiased estimate, 1/sqrt(r), invariances."""

import math

import contract
import pytest
import torch
from scipy.integrate import quad

from molflt.attention import GaussianBasis, GaussianNodes, SpectralPosition


def make_position(heads: int, nodes: int, seed: int = 0) -> SpectralPosition:
    torch.manual_seed(seed)
    position = SpectralPosition(
        GaussianBasis(heads, 4, width_range=(1.0, 3.0), amplitude=0.5), GaussianNodes(heads, nodes)
    )
    return position.double()


def estimate(position: SpectralPosition, r: torch.Tensor) -> torch.Tensor:
    left, right = position.factors(r[None], r[None])
    return (left @ right.transpose(-1, -2))[0]


def test_spectrum_is_the_fourier_transform_of_the_mask():
    """Independent: the radial transform by scipy's adaptive quadrature, g = 4 pi int f sinc r^2."""
    basis = GaussianBasis(2, 3).double()
    for k in (0.02, 0.1, 0.3):
        xi = torch.tensor([[[k, 0.0, 0.0]]], dtype=torch.float64)
        for head in range(2):

            def integrand(r, head=head, k=k):
                f = basis.mask(torch.tensor([[[r, 0.0, 0.0]]], dtype=torch.float64))[0, head, 0]
                return f.item() * math.sin(2 * math.pi * k * r) * 2 * r / k

            expected, _ = quad(integrand, 0, 40, limit=200)
            assert abs(basis.spectrum(xi)[head, 0].item() - expected) < 1e-6 * max(1, abs(expected))


def test_mask_estimate_is_unbiased_for_every_sigma():
    """Heads with the same spectrum are independent draws: their mean converges to the mask."""
    draws = 4000
    for sigma in (0.12, 0.2):
        position = make_position(draws, 16)
        with torch.no_grad():
            position.spectrum.amplitude.copy_(position.spectrum.amplitude[:1].expand(draws, -1))
            position.nodes.log_sigma.fill_(math.log(sigma))
        r = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        estimates = estimate(position, 2 * r)
        exact = position.bias(2 * (r[:, None] - r)[None])[0]
        z = (estimates.mean(0) - exact[0]) / (estimates.std(0) / math.sqrt(draws))
        assert z.abs().max() < 4.5, z


def test_error_falls_as_one_over_sqrt_r():
    r = 2 * torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    errors = {}
    for nodes in (16, 256):
        position = make_position(800, nodes)
        with torch.no_grad():
            position.spectrum.amplitude.copy_(position.spectrum.amplitude[:1].expand(800, -1))
        exact = position.bias((r[:, None] - r)[None])[0]
        errors[nodes] = (estimate(position, r) - exact).square().mean().sqrt().item()
    slope = math.log(errors[256] / errors[16]) / math.log(16)
    assert abs(slope + 0.5) < 0.08, errors


def test_product_of_factors_depends_on_differences_only():
    position = make_position(3, 16)
    r = 3 * torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shift = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(
        estimate(position, r + shift), estimate(position, r), **contract.EXACT
    )
    assert torch.allclose(estimate(position, r), estimate(position, r).transpose(-1, -2))


def test_exact_mask_is_rotation_invariant():
    from scipy.spatial.transform import Rotation

    position = make_position(3, 16)
    r = torch.randn(9, 3, dtype=torch.float64)
    turn = torch.from_numpy(Rotation.random(rng=0).as_matrix())
    delta = (r[:, None] - r)[None]
    torch.testing.assert_close(
        position.bias(delta @ turn.T), position.bias(delta), **contract.EXACT
    )


def test_zero_spectrum_has_a_gradient():
    """A product of two square roots would have none, and the mask could never start to learn."""
    position = make_position(2, 8)
    with torch.no_grad():
        position.spectrum.amplitude.zero_()
    r = torch.randn(5, 3, dtype=torch.float64)
    assert estimate(position, r).abs().max() == 0
    (estimate(position, r) * torch.randn(2, 5, 5, dtype=torch.float64)).sum().backward()
    grad = position.spectrum.amplitude.grad
    assert torch.isfinite(grad).all() and grad.abs().max() > 0


def test_gradients_of_the_factors():
    position = make_position(2, 3)
    r = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: position.factors(x, x), (r,))
    parameters = tuple(position.parameters())
    out = estimate(position, r[0])
    for grad in torch.autograd.grad(out.square().sum(), parameters):
        assert torch.isfinite(grad).all() and grad.abs().max() > 0


@pytest.mark.parametrize("build", [lambda: GaussianBasis(2, 0), lambda: GaussianNodes(2, 0)])
def test_no_nodes_or_gaussians_is_an_error(build):
    with pytest.raises(ValueError, match="at least 1; got 0"):
        build()
