"""The polynomial feature map against Bessel functions and softmax."""

import math

import pytest
import torch
from contract import EXACT
from scipy.special import gammaln, gegenbauer, iv
from torch.nn import functional as F

from molflt.attention import FEATURE_MAPS, Stack, convert_weights_
from molflt.attention.features.polynomial import harmonics

DIM, HEADS = 32, 2


def features(dim: int, heads: int = 1, **options):
    return FEATURE_MAPS["polynomial"](dim, heads, **options).double()


def directions(*shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def oracle(cosine: torch.Tensor, tau: float, dim: int, degree: int) -> torch.Tensor:
    """The harmonics of exp(tau cos) up to a degree, by Gegenbauer's polynomials of scipy."""
    nu = dim / 2 - 1
    scale = math.exp(gammaln(nu)) * (2 / tau) ** nu
    series = sum(
        (nu + n) * iv(nu + n, tau) * gegenbauer(n, nu)(cosine.numpy()) for n in range(degree + 1)
    )
    return torch.as_tensor(scale * series)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(("dim", "tau"), [(3, 0.3), (8, 1.0), (9, 1.9)])
def test_products_are_the_first_harmonics_of_exp(dim, tau, degree):
    torch.manual_seed(0)
    x, y = (tau**0.5 * directions(1, 1, 20, dim) for _ in "xy")
    phi = features(dim, degree=degree)
    products = phi(x).materialize() @ phi(y).materialize().mT
    expected = oracle(x @ y.mT / tau, tau, dim, degree)
    assert phi.width == math.comb(dim + degree, degree)
    # The common factor is known to 1e-4; the ratios are what attention depends on.
    torch.testing.assert_close(products, expected, rtol=1e-3, atol=0)
    rows = (each / each.sum(dim=-1, keepdim=True) for each in (products, expected))
    torch.testing.assert_close(*rows, **EXACT)


@pytest.mark.parametrize("dim", [1, 2, 8, 64])
def test_products_of_degree_2_are_positive(dim):
    torch.manual_seed(0)
    phi, norms = features(dim), torch.logspace(-2, 2, 40, dtype=torch.float64)[:, None]
    x = norms * directions(1, 1, 1, dim)
    for y in (-x, x, norms * directions(1, 1, 40, dim)):
        assert (phi(x).values @ phi(y).values.mT > 1e-3).all()


def test_degree_3_is_positive_up_to_the_temperature_that_is_named():
    for tau, positive in ((1.6, True), (4.0, False)):
        _, weights = harmonics(torch.tensor(tau).double(), 64, 3)
        least = sum(float(w) * (-tau) ** n for n, w in enumerate(weights))
        assert (least > 0) == positive
        assert all(w > 0 for w in weights)
    assert features(8).positive_kernel and not features(8, degree=3).positive_kernel


@pytest.mark.parametrize(("dim", "options"), [(6, {}), (4, {"degree": 3, "projection": "iid"})])
def test_a_sketch_is_unbiased(dim, options):
    torch.manual_seed(1)
    draws, whole = 3000, features(dim, **options | {"projection": None})
    x = directions(1, 1, 2, dim)
    sketch = features(dim, draws, num_features=whole.width - 1, **options)
    products = [
        phi(x.expand(1, heads, -1, -1)).materialize()[0].prod(dim=1).sum(dim=-1)
        for phi, heads in ((sketch, draws), (whole, 1))
    ]
    error = products[0].mean() - products[1]
    assert products[0].std() > 1e-3
    assert abs(error) < 4 * products[0].std() / math.sqrt(draws)


def stack(mixing: str, seed: int, **options) -> Stack:
    torch.manual_seed(seed)
    return Stack(DIM, HEADS, 2, ffn_dim=24, mixing=mixing, **options).double().eval()


@pytest.mark.parametrize(("options", "bound"), [({}, 0.005), ({"degree": 3}, 0.0008)])
def test_normalized_softmax_becomes_polynomial_without_training(options, bound):
    """Outputs and gradients of a whole stack, heads of width 16 and temperatures around 1."""
    trained = stack("softmax", 0, normalize_qk=True, learn_temperature=True)
    for block in trained.blocks:
        block.attention.scaling.log_temperature.data.uniform_(-0.3, 0.3)
    fast = stack("linear", 1, feature_map="polynomial", **options)
    assert convert_weights_(trained, fast) == []
    x = torch.randn(2, 60, DIM, dtype=torch.float64, requires_grad=True)
    outs = fast(x), trained(x)
    slopes = [torch.autograd.grad(out.square().sum().sin(), x)[0] for out in outs]
    for mine, exact in (outs, slopes):
        assert (mine - exact).norm() < bound * exact.norm()
