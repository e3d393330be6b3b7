"""Feature maps against theory and against other people's code."""

import math

import pytest
import torch
from torch.nn import functional as F

from molflt.attention import FEATURE_MAPS, Attention
from molflt.attention.features.base import Operand
from molflt.attention.features.maps import _PositiveFeatures

UNBIASED = ("positive", "trigonometric", "favor2020")  # for exp(x . y)


def test_positive_features_equal_performer_pytorch():
    performer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    d, m = 8, 20
    phi = _PositiveFeatures(d, 1, m).double()
    x = torch.randn(2, 1, 11, d, dtype=torch.float64)
    rows = phi.projection.matrix()[0]
    theirs = performer.softmax_kernel(x, projection_matrix=rows, is_query=True, eps=0.0)
    scaled = x * d**-0.25
    # They subtract the query's largest w.x; put it back to compare the features themselves.
    largest = (scaled @ rows.T).amax(dim=-1, keepdim=True)
    ours = phi(scaled).materialize()
    torch.testing.assert_close(ours, theirs * largest.exp(), rtol=1e-12, atol=0)


ELEMENTWISE = {
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "gelu": F.gelu,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "exp": torch.exp,
    "elu": lambda x: F.elu(x) + 1,
    "cosformer": F.relu,
    "learnable_exp": torch.exp,
    "learnable_relu": F.relu,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_maps_of_single_projections(name):
    torch.manual_seed(0)
    phi = FEATURE_MAPS[name](8, 2).double()
    x = torch.randn(3, 2, 11, 8, dtype=torch.float64)
    rows = getattr(phi, "weight", None) if phi.projection is None else phi.projection.matrix()
    eps = 1e-3 if name in ("relu", "squared_relu", "sigmoid", "abs", "learnable_relu") else 0.0
    expected = ELEMENTWISE[name](x if rows is None else x @ rows.mT) + eps
    torch.testing.assert_close(phi(x).materialize(), expected, rtol=1e-12, atol=1e-14)


def test_favor2020_is_the_formula_of_the_paper():
    """Eqs. 5-12 with the unscaled query: D_Q = exp(|q|^2 / 2 sqrt(d)), sqrt(2/M) cos(w q' + b)."""
    torch.manual_seed(0)
    d, m = 8, 20
    phi = FEATURE_MAPS["favor2020"](d, 1, m).double()
    q = torch.randn(1, 1, 5, d, dtype=torch.float64)
    rows, phase = phi.projection.matrix()[0], phi.phase[0]
    expected = torch.exp(q.square().sum(-1, keepdim=True) / (2 * math.sqrt(d)))
    expected = expected * math.sqrt(2 / m) * torch.cos(q / d**0.25 @ rows.T + phase)
    torch.testing.assert_close(phi(q * d**-0.25).materialize(), expected, rtol=1e-12, atol=1e-14)


def kernel_estimates(name: str, m: int, draws: int, x, y, projection="orthogonal") -> torch.Tensor:
    """Estimates of the kernel at x, y: one per draw."""
    phi = FEATURE_MAPS[name](len(x), draws, m, projection).double()
    phi.redraw_(torch.Generator().manual_seed(0))
    features = phi(torch.stack((x, y)).expand(1, draws, 2, -1)).materialize()
    return (features[0, :, 0] * features[0, :, 1]).sum(dim=-1)


@pytest.mark.parametrize("m", [5, 16, 24])  # below, at and above one orthogonal block of 16
@pytest.mark.parametrize("name", UNBIASED)
def test_features_of_the_softmax_kernel_are_unbiased(name, m):
    torch.manual_seed(1)
    x, y = (0.4 * torch.randn(16, dtype=torch.float64) for _ in "xy")
    draws = 3000
    estimates = kernel_estimates(name, m, draws, x, y)
    error = estimates.mean() - (x @ y).exp()
    assert abs(error) < 4 * estimates.std() / math.sqrt(draws)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        # Gaussian of width 1 on unit vectors
        ("rfa_gaussian", lambda cosine: torch.exp(cosine - 1)),
        # arc-cosine kernel of order 1 (Cho and Saul 2009, eq. 6), half of it for E relu relu
        (
            "rfa_arccos",
            lambda c: ((1 - c**2).sqrt() + (math.pi - c.arccos()) * c) / (2 * math.pi),
        ),
    ],
)
def test_rfa_features_estimate_their_kernels(name, kernel):
    torch.manual_seed(1)
    x, y = (torch.randn(8, dtype=torch.float64) for _ in "xy")
    estimates = kernel_estimates(name, 16, 4000, x, y)
    expected = kernel(F.cosine_similarity(x, y, dim=0))
    assert abs(estimates.mean() - expected) < 4 * estimates.std() / math.sqrt(4000)


@pytest.mark.parametrize("projection", [None, "iid", "hadamard", "givens", "sphere", "sobol"])
def test_kernelized_attention_converges_to_softmax(projection):
    """Close to the origin; further out random features fail: `make bench NAME=features`."""
    errors = {}
    for m in (16, 4096):
        torch.manual_seed(0)
        exact = Attention(32, 2, mixing="softmax").double()
        fast = Attention(32, 2, num_features=m, projection=projection).double()
        fast.load_state_dict(exact.state_dict(), strict=False)
        x = torch.randn(1, 40, 32, dtype=torch.float64)
        uniform = exact.to_out(exact.to_value(x).mean(1, keepdim=True))
        errors[m] = (fast(x) - exact(x)).norm() / (exact(x) - uniform).norm()
    assert errors[4096] < 0.4 and errors[4096] < errors[16] / 4, errors


def test_features_are_taken_in_single_precision():
    phi, x = FEATURE_MAPS["positive"](8, 2), torch.randn(1, 2, 5, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Operand(phi, x).features().log_scale
    assert torch.equal(found, phi(x.float()).log_scale)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_declared_signs_and_widths_hold(name):
    torch.manual_seed(0)
    phi = FEATURE_MAPS[name](8, 2)
    features = phi(torch.randn(3, 2, 50, 8)).materialize()
    assert features.shape[-1] == phi.width
    assert bool((features < 0).any()) == phi.signed
    products = features[0] @ features[1].mT
    assert bool((products >= 0).all()) == phi.positive_kernel
    assert torch.isfinite(features).all()
