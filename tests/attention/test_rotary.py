"""Rotary encoding, cosFormer's kernel and the bias of 3D-Graphormer against their formulas."""

import math

import pytest
import torch
from contract import EXACT
from families import randn
from scipy.stats import norm

from molflt.attention.positions.gaussian_bias import GaussianBias
from molflt.attention.positions.rotary import CosinePosition, RotaryPosition

F64 = torch.float64


def rotated(position, r, q, k):
    return position("softmax", r, r).transform(q, k)


def test_rotary_equals_performer_pytorch():
    from performer_pytorch.performer_pytorch import apply_rotary_pos_emb

    q, k = randn(2, 2, 2, 9, 8)
    r = torch.arange(9, dtype=F64)
    angles = r[:, None] * 10000 ** (-torch.arange(0, 8, 2, dtype=F64) / 8)
    expected = apply_rotary_pos_emb(q, k, torch.cat((angles.sin(), angles.cos()), dim=-1)[None])
    got = rotated(RotaryPosition(8), r[None, :, None], q, k)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_rotated_pair_is_a_complex_product():
    """The formula itself, pair by pair: axis a, pair p turns by base^(-p / P) r_a."""
    q, k = randn(2, 2, 2, 5, 13)
    r = 20 * randn(2, 5, 2, seed=1)
    got, _ = rotated(RotaryPosition(13, 2, base=50.0), r, q, k)
    z = torch.view_as_complex(q[..., :12].unflatten(-1, (6, 2)).contiguous())
    assert torch.equal(got[..., 12], q[..., 12])
    for axis in range(2):
        for p in range(3):
            turn = torch.exp(1j * 50.0 ** (-p / 3) * r[:, None, :, axis])
            expected = z[..., 3 * axis + p] * turn
            pair = got[..., 2 * (3 * axis + p) :][..., :2]
            torch.testing.assert_close(torch.view_as_real(expected), pair, **EXACT)


def test_cosine_kernel_is_exact():
    m = 16
    r = torch.arange(m, dtype=F64)[None, :, None]
    u, v = CosinePosition(m)("linear", r, r).kernel
    expected = torch.cos(math.pi * (r[0] - r[0].T) / (2 * m))
    torch.testing.assert_close((u @ v.mT)[0, 0], expected, **EXACT)


def make(heads: int = 2, num_gaussians: int = 6, dim: int = 3, seed: int = 0) -> GaussianBias:
    torch.manual_seed(seed)
    return GaussianBias(heads, num_gaussians=num_gaussians, dim=dim, hidden_dim=5).double()


def bias(module: GaussianBias, queries: torch.Tensor, keys: torch.Tensor | None = None):
    return module("softmax", queries, queries if keys is None else keys).bias


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_bias_is_the_formula_of_the_paper(dim):
    """Pair by pair, with scipy's normal density and the network written out."""
    module = make(dim=dim)
    queries, keys = 2 * randn(2, 3, dim), 2 * randn(2, 4, dim, seed=1)
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


def test_gradients_are_finite_at_zero_distance():
    module = make()
    together = torch.zeros(1, 3, 3, dtype=F64, requires_grad=True)
    out = bias(module, together).square().sum()
    (grad,) = torch.autograd.grad(out, together, create_graph=True)
    assert (grad == 0).all()
    (again,) = torch.autograd.grad(grad.sum(), together, allow_unused=True)
    assert again is None or again.isfinite().all()
    bias(module, 2 * randn(2, 4, 3)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-8, name
