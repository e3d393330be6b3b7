"""Nodes: distributions, importance ratios and errors of sampled masks."""

import copy
import math

import pytest
import torch
from families import EXACT, estimates, make, randn, same_heads

from molflt.attention.nodes import NODES
from molflt.attention.nodes.random import DensityNodes, GaussianNodes
from molflt.attention.spectra.base import Spectrum
from molflt.attention.spectra.shift_invariant import Laplace, Matern


@pytest.mark.parametrize("variant", ["gaussian", "laplace", "matern", "matern, nu=0.5"])
def test_nodes_of_a_kernel_have_one_importance_ratio(variant):
    """c_s g(xi_s) = C / r at every node and length; only C has a gradient."""
    kernel = make(variant, heads=4)
    nodes = DensityNodes(kernel, 50).double()
    xi, weights = nodes()
    product = weights * kernel.spectrum(xi)
    expected = (kernel.amplitude / 50)[:, None].expand_as(product)
    torch.testing.assert_close(product, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close((-nodes.log_density(xi)).exp() / 50, weights, rtol=1e-9, atol=0)
    grad_length, grad_c = torch.autograd.grad(
        product.sum(), [kernel.log_length, kernel.amplitude], retain_graph=True
    )
    assert grad_length.abs().max() < 1e-10
    torch.testing.assert_close(grad_c, torch.ones(4).double(), **EXACT)
    grad = torch.autograd.grad(xi.square().log().sum(), kernel.log_length)[0]
    torch.testing.assert_close(grad, torch.full((4,), -2.0 * 50 * 3).double(), **EXACT)


@pytest.mark.parametrize("variant", ["gaussian", "laplace", "matern", "matern, nu=0.5"])
def test_kernel_nodes_have_the_variance_of_theory(variant):
    """Zero bias, and C^2 [(1 + K(2 z)) / 2 - K(z)^2] / r exactly, for every kernel and length."""
    heads, r = 3000, 16
    kernel = same_heads(make(variant, heads=heads))
    nodes = DensityNodes(kernel, r).double()
    nodes.redraw_(torch.Generator().manual_seed(0))
    z = 0.7 * randn(6, 3, seed=3)
    with torch.no_grad():
        exact, twice = kernel.mask(z[None])[0, 0], kernel.mask(2 * z[None])[0, 0]
    c = kernel.amplitude[0].item()
    variance = (0.5 * c * (c + twice) - exact.square()) / r
    errors = estimates(kernel, nodes, z) - exact
    assert (errors.mean(0) / (variance / heads).sqrt()).abs().max() < 4
    assert (errors.var(0) / variance - 1).abs().max() < 0.12


PAIRS = {
    "gaussian_basis": lambda s, r: GaussianNodes(s.heads, r, s.dim, sigma=0.25),
    "gaussian_mixture": lambda s, r: GaussianNodes(s.heads, r, s.dim, 0.35, "learned"),
    "gaussian_mixture, asymmetric": lambda s, r: GaussianNodes(
        s.heads, r, s.dim, 0.35, learn_sigma=False
    ),
    "smooth_local": lambda s, r: cauchy(s, r),
    "smooth_local, order 2": lambda s, r: cauchy(s, r),
    "smooth_local, order 5, product": lambda s, r: cauchy(s, r),
    "matern": lambda s, r: DensityNodes(s, r),
}


def cauchy(spectrum: Spectrum, r: int) -> DensityNodes:
    """Heavy-tailed nodes, for spectra that fall as a power."""
    proposal = Laplace(spectrum.heads, spectrum.dim, length_range=(0.7, 0.7))
    return DensityNodes(proposal, r, shared=False)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("variant", PAIRS)
def test_estimates_are_unbiased_and_their_error_falls_as_one_over_sqrt_r(variant, dim):
    heads, errors = 1200, {}
    prefix = {"matern": "length", "smooth_local": "radius"}.get(variant.split(",")[0], "width")
    family = make(variant, heads=heads, dim=dim, **{f"{prefix}_range": (0.9, 2.0)})
    family = same_heads(family)
    z = 1.2 * randn(6, dim, seed=3)
    exact = family.mask(z[None])[0, 0].detach()
    for r in (16, 256):
        nodes = PAIRS[variant](family, r).double()
        if isinstance(nodes, GaussianNodes) and nodes.mean is not None:
            with torch.no_grad():
                nodes.mean.fill_(0.05)
        nodes.redraw_(torch.Generator().manual_seed(r))
        error = estimates(family, nodes, z) - exact
        errors[r] = error.square().mean().sqrt().item()
        score = error.mean(0) / (error.std(0) / math.sqrt(heads))
        assert score.abs().max() < 4.5, score
    slope = math.log(errors[256] / errors[16]) / math.log(16)
    assert abs(slope + 0.5) < 0.06, errors


def test_fixed_sigma_is_a_buffer():
    fixed, learned = GaussianNodes(2, 4, sigma=1.0, learn_sigma=False), GaussianNodes(2, 4)
    assert not list(fixed.parameters()) and fixed.state_dict().keys() == learned.state_dict().keys()
    torch.testing.assert_close(fixed()[0], fixed.eps)


def test_a_shared_kernel_is_saved_once_and_survives_a_copy():
    module = torch.nn.Module()
    module.spectrum = make("matern")
    module.nodes = DensityNodes(module.spectrum, 5)
    assert sorted(module.state_dict()) == [
        "nodes.unit",
        "spectrum.amplitude",
        "spectrum.log_length",
    ]
    twin = copy.deepcopy(module)
    assert twin.nodes.density is twin.spectrum is not module.spectrum
    own = DensityNodes(make("laplace"), 5, shared=False)
    assert [name for name, p in own.named_parameters() if p.requires_grad] == [
        "proposal.log_length"
    ]


@pytest.mark.parametrize("rule", [rule for rule in NODES if rule != "shells"])
def test_redraw_follows_the_generator_and_compiles(rule):
    kernel = Matern(2)
    nodes = DensityNodes(kernel, 8) if rule == "density" else NODES[rule](2, 8)
    first = nodes()[0].clone()
    nodes.redraw_(torch.Generator().manual_seed(5))
    second = nodes()[0].clone()
    nodes.redraw_(torch.Generator().manual_seed(5))
    assert torch.equal(nodes()[0], second) and not torch.equal(first, second)
    assert nodes.num_nodes == 8 and nodes.dim == 3
    torch._dynamo.reset()
    compiled = torch.compile(lambda: nodes(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), nodes())
