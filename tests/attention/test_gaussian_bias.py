"""The bias of 3D-Graphormer: its formula, its invariances, and gradients at zero distance."""

import math

import pytest
import torch
from scipy.spatial.transform import Rotation
from scipy.stats import norm

from molflt.attention.positions.gaussian_bias import GaussianBias

EXACT = {"rtol": 0.0, "atol": 1e-10}
F64 = torch.float64


def make(heads: int = 2, num_gaussians: int = 6, dim: int = 3, seed: int = 0) -> GaussianBias:
    torch.manual_seed(seed)
    return GaussianBias(heads, num_gaussians=num_gaussians, dim=dim, hidden_dim=5).double()


def atoms(count: int = 7, dim: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(2, count, dim, dtype=F64, generator=generator)


def bias(module: GaussianBias, queries: torch.Tensor, keys: torch.Tensor | None = None):
    return module("softmax", queries, queries if keys is None else keys).bias


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_bias_is_the_formula_of_the_paper(dim):
    """Pair by pair, with scipy's normal density and the network written out."""
    module = make(dim=dim)
    queries, keys = atoms(3, dim), atoms(4, dim, seed=1)
    got = bias(module, queries, keys)
    assert got.shape == (2, 2, 3, 4)
    state = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    for b in range(2):
        for i in range(3):
            for j in range(4):
                distance = math.dist(queries[b, i].tolist(), keys[b, j].tolist())
                psi = norm.pdf(distance, state["mean"], [math.exp(s) for s in state["log_std"]])
                hidden = state["mlp.0.weight"] @ psi + state["mlp.0.bias"]
                hidden = hidden * norm.cdf(hidden)  # GELU
                expected = state["mlp.2.weight"] @ hidden + state["mlp.2.bias"]
                assert abs(got[b, :, i, j].detach().numpy() - expected).max() < 1e-10


def test_bias_is_invariant():
    module, r = make(), atoms()
    expected = bias(module, r)
    turn = torch.from_numpy(Rotation.random(rng=0).as_matrix())
    shift = torch.tensor([1.0, -20.0, 3.0], dtype=F64)
    for moved in (r @ turn.T, r + shift, -r):  # rotation, translation, inversion
        torch.testing.assert_close(bias(module, moved), expected, **EXACT)
    torch.testing.assert_close(expected, expected.mT, **EXACT)
    assert expected.std() > 0.01  # not constant


def test_gradients_also_at_zero_distance():
    module = make()
    r = atoms(4).requires_grad_()
    # Off the diagonal; on it the distance stays 0 however positions move.
    assert torch.autograd.gradcheck(lambda x: bias(module, x), (r,))
    assert torch.autograd.gradgradcheck(lambda x: bias(module, x)[:, 0, 0, 1], (r,))
    together = torch.zeros(1, 3, 3, dtype=F64, requires_grad=True)
    out = bias(module, together).square().sum()
    (grad,) = torch.autograd.grad(out, together, create_graph=True)
    assert (grad == 0).all()
    (again,) = torch.autograd.grad(grad.sum(), together, allow_unused=True)
    assert again is None or again.isfinite().all()
    bias(module, r).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-8, name


def test_radial_profile_is_the_bias_along_a_line():
    module = make()
    distances = torch.linspace(0, 9, 5, dtype=F64)
    r = torch.zeros(1, 5, 3, dtype=F64)
    r[0, :, 2] = distances
    torch.testing.assert_close(module.radial_profile(distances), bias(module, r)[0, :, 0], **EXACT)
