"""Feature maps and projections against theory and against other people's code."""

import math

import pytest
import torch

from molflt.attention import FEATURE_MAPS, PROJECTIONS, linear
from molflt.attention.feature_maps import PositiveFeatures


def test_positive_features_equal_performer_pytorch():
    performer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    d, m = 8, 20
    phi = PositiveFeatures(d, 1, m).double()
    x = torch.randn(2, 1, 11, d, dtype=torch.float64)
    theirs = performer.softmax_kernel(
        x, projection_matrix=phi.projection[0], is_query=True, eps=0.0
    )
    scaled = x * d**-0.25
    # They subtract the query's largest w.x; put it back to compare the features themselves.
    largest = (scaled @ phi.projection[0].T).amax(dim=-1, keepdim=True)
    torch.testing.assert_close(phi.phi(scaled), theirs * largest.exp(), rtol=1e-12, atol=0)


def test_linear_equals_performer_pytorch():
    performer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    q, k = (torch.rand(2, 3, 9, 5, dtype=torch.float64) for _ in "qk")
    v = torch.randn(2, 3, 9, 4, dtype=torch.float64)
    torch.testing.assert_close(
        linear(q, k, v), performer.linear_attention(q, k, v), rtol=0, atol=1e-12
    )


def test_relu_features_equal_pyg():
    pyg = pytest.importorskip("torch_geometric.nn.attention.performer")
    torch.manual_seed(0)
    theirs = pyg.PerformerProjection(num_cols=8, kernel=torch.nn.ReLU())
    ours = FEATURE_MAPS["relu"](8, 1, theirs.projection_matrix.shape[0])
    ours.projection[0] = theirs.projection_matrix
    q, k = (torch.randn(1, 1, 6, 8) for _ in "qk")
    v = torch.randn(1, 1, 6, 4)
    phi_q, phi_k = ours(q, k)
    torch.testing.assert_close(linear(phi_q, phi_k, v), theirs(q, k, v), rtol=1e-5, atol=1e-6)


def kernel_estimates(projection: str, m: int, draws: int, x, y) -> torch.Tensor:
    """Estimates of exp(x . y), one per draw."""
    generator = torch.Generator().manual_seed(0)
    phi = PositiveFeatures(len(x), draws, m, projection).double()
    phi.redraw_(generator)
    pair = torch.stack((x, y)).expand(1, draws, 2, -1)
    features = phi.phi(pair)
    return (features[0, :, 0] * features[0, :, 1]).sum(dim=-1)


@pytest.mark.parametrize("m", [5, 16, 24])  # below, at and above one orthogonal block of 16
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_positive_features_are_unbiased(projection, m):
    torch.manual_seed(1)
    x, y = (0.4 * torch.randn(16, dtype=torch.float64) for _ in "xy")
    draws = 3000
    estimates = kernel_estimates(projection, m, draws, x, y)
    error = estimates.mean() - (x @ y).exp()
    assert abs(error) < 4 * estimates.std() / math.sqrt(draws)


def test_error_falls_as_one_over_sqrt_m_and_orthogonal_is_lower():
    torch.manual_seed(2)
    # Small norms: the estimate's tails grow with exp|x + y|^2 and would hide the difference.
    x, y = (0.25 * torch.randn(16, dtype=torch.float64) for _ in "xy")
    exact = (x @ y).exp()
    rmse = {
        (name, m): (kernel_estimates(name, m, 2000, x, y) - exact).square().mean().sqrt()
        for name in PROJECTIONS
        for m in (16, 256)
    }
    slope = torch.log(rmse["iid", 256] / rmse["iid", 16]) / math.log(16)
    assert abs(slope + 0.5) < 0.08
    assert rmse["orthogonal", 256] < 0.97 * rmse["iid", 256]


@pytest.mark.parametrize("name", PROJECTIONS)
def test_rows_are_standard_normal(name):
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([PROJECTIONS[name](12, 8, generator) for _ in range(3000)])
    assert rows.shape == (36000, 8)
    assert rows.mean().abs() < 0.01
    covariance = rows.T @ rows / len(rows)
    assert (covariance - torch.eye(8)).abs().max() < 0.03
    assert abs(rows.square().sum(-1).var() - 16) < 0.7  # chi-squared with 8 degrees of freedom


def test_orthogonal_rows_are_orthogonal_within_blocks():
    rows = PROJECTIONS["orthogonal"](12, 8, None)
    for block in (rows[:8], rows[8:]):
        gram = block @ block.T
        assert (gram - torch.diag(gram.diagonal())).abs().max() < 1e-12


def test_redraw_follows_its_generator_and_touches_only_random_maps():
    for name, build in FEATURE_MAPS.items():
        phi = build(8, 2, 16)
        before = {key: value.clone() for key, value in phi.state_dict().items()}
        phi.redraw_(torch.Generator().manual_seed(5))
        once = {key: value.clone() for key, value in phi.state_dict().items()}
        phi.redraw_(torch.Generator().manual_seed(5))
        for key, value in phi.state_dict().items():
            assert torch.equal(value, once[key])
            assert torch.equal(value, before[key]) != (name in ("positive", "relu"))


def test_key_features_do_not_depend_on_masked_keys():
    torch.manual_seed(0)
    phi = FEATURE_MAPS["positive"](8, 2, 16).double()
    q, k = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in "qk")
    mask = torch.tensor([True] * 4 + [False] * 2).expand(1, 1, 6)
    _, before = phi(q, k, mask)
    k[:, :, 4:] = 1e6
    _, after = phi(q, k, mask)
    assert torch.equal(before, after)
