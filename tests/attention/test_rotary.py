"""Rotary and cosFormer encodings: functions of differences, equal to independent references."""

import math

import pytest
import torch

from molflt.attention.features.base import Features
from molflt.attention.mixing.forms import linear, quadratic
from molflt.attention.positions.rotary import CosinePosition, RotaryPosition

EXACT = {"rtol": 0.0, "atol": 1e-10}
F64 = torch.float64


def qk(tokens: int, dim: int, heads: int = 2, batch: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, dim)
    return [torch.randn(shape, dtype=F64, generator=generator) for _ in "qk"]


def places(tokens: int, dim: int = 1, batch: int = 2, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 20 * torch.randn(batch, tokens, dim, dtype=F64, generator=generator)


def rotated(position, r, q, k):
    return position("softmax", r, r).transform(q, k)


def test_rotary_equals_performer_pytorch():
    from performer_pytorch.performer_pytorch import apply_rotary_pos_emb

    q, k = qk(9, 8)
    r = torch.arange(9, dtype=F64)
    angles = r[:, None] * 10000 ** (-torch.arange(0, 8, 2, dtype=F64) / 8)
    expected = apply_rotary_pos_emb(q, k, torch.cat((angles.sin(), angles.cos()), dim=-1)[None])
    got = rotated(RotaryPosition(8), r[None, :, None], q, k)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_rotary_equals_llama_up_to_the_order_of_coordinates():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = qk(9, 8)
    r = places(9)
    angles = r * 500.0 ** (-torch.arange(0, 8, 2, dtype=F64) / 8)
    angles = torch.cat((angles, angles), dim=-1)
    order = torch.arange(8).view(4, 2).T.flatten()  # adjacent pairs to halves
    expected = llama.apply_rotary_pos_emb(q[..., order], k[..., order], angles.cos(), angles.sin())
    got = rotated(RotaryPosition(8, base=500.0), r, q, k)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[..., order], b, **EXACT)


@pytest.mark.parametrize(("dim", "head_dim"), [(1, 7), (2, 8), (3, 8), (3, 12)])
def test_rotated_products_depend_on_differences(dim, head_dim):
    q, k = qk(6, head_dim)
    r = places(6, dim)
    position = RotaryPosition(head_dim, dim)
    a, b = rotated(position, r, q, k)
    shift = torch.tensor([3.7, -11.0, 0.4], dtype=F64)[:dim]
    c, d = rotated(position, r + shift, q, k)
    torch.testing.assert_close(c @ d.mT, a @ b.mT, **EXACT)
    torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1), **EXACT)
    turning = 2 * dim * (head_dim // (2 * dim))
    torch.testing.assert_close(a[..., turning:], q[..., turning:], rtol=0, atol=0)
    # Every axis matters, and matters to every pair of its own.
    for axis in range(dim):
        moved = r.clone()
        moved[..., axis] += 1.0
        change = (rotated(position, moved, q, k)[0] - a).abs().amax(dim=(0, 1, 2))
        pairs = head_dim // (2 * dim)
        own = slice(2 * pairs * axis, 2 * pairs * (axis + 1))
        assert (change[own] > 1e-6).all()
        change[own] = 0
        assert (change == 0).all()


def test_rotated_pair_is_a_complex_product():
    """The formula itself, pair by pair: axis a, pair p turns by base^(-p / P) r_a."""
    q, k = qk(5, 12)
    r = places(5, 2)
    got, _ = rotated(RotaryPosition(12, 2, base=50.0), r, q, k)
    z = torch.view_as_complex(q.unflatten(-1, (6, 2)).contiguous())
    for axis in range(2):
        for p in range(3):
            turn = torch.exp(1j * 50.0 ** (-p / 3) * r[:, None, :, axis])
            expected = z[..., 3 * axis + p] * turn
            pair = got[..., 2 * (3 * axis + p) :][..., :2]
            torch.testing.assert_close(torch.view_as_real(expected), pair, **EXACT)


def test_rotary_gradients_and_integers():
    position = RotaryPosition(6, 2)
    q, k = (x[:1, :, :3].requires_grad_() for x in qk(3, 6))
    r = places(3, 2, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda r, q, k: rotated(position, r, q, k), (r, q, k))
    counted = torch.arange(3)[None, :, None].expand(1, 3, 2)
    torch.testing.assert_close(
        rotated(position, counted, q, k), rotated(position, counted.double(), q, k), **EXACT
    )


def cosine_kernel(position: CosinePosition, r: torch.Tensor) -> torch.Tensor:
    u, v = position("linear", r, r).kernel
    return u @ v.mT


def test_cosine_kernel_is_positive_and_exact():
    m = 16
    r = torch.arange(m, dtype=F64)[None, :, None]
    kernel = cosine_kernel(CosinePosition(m), r)[0, 0]
    for i in range(m):
        for j in range(m):
            assert abs(kernel[i, j].item() - math.cos(math.pi * (i - j) / (2 * m))) < 1e-10
    assert kernel.min() > 0.09  # cos(pi 15 / 32) = 0.098


@pytest.mark.parametrize("is_causal", [False, True])
def test_cosine_attention_equals_the_authors_formula(is_causal):
    """[relu(q) sin, relu(q) cos] against sums one by one; their index starts at 1 and M = N."""
    n = 7
    q, k = qk(n, 4)
    v = qk(n, 3, seed=5)[0]
    angle = 0.5 * math.pi * torch.arange(1, n + 1, dtype=F64)[:, None] / n
    phi_q, phi_k = (
        torch.cat((x.relu() * angle.sin(), x.relu() * angle.cos()), dim=-1) for x in (q, k)
    )
    expected = torch.zeros_like(v)
    for i in range(n):
        top, bottom = 0.0, 0.0
        for j in range(i + 1 if is_causal else n):
            weight = (phi_q[:, :, i] * phi_k[:, :, j]).sum(dim=-1, keepdim=True)
            top, bottom = top + weight * v[:, :, j], bottom + weight
        expected[:, :, i] = top / bottom.where(bottom > 0, 1.0)
    r = torch.arange(n, dtype=F64)[None, :, None]
    u, w = CosinePosition(n)("linear", r, r).kernel
    features = Features(q.relu()).kronecker(u), Features(k.relu()).kronecker(w)
    got = quadratic(*features, v, causal=is_causal).ratio()
    torch.testing.assert_close(got, expected, **EXACT)
    if not is_causal:
        torch.testing.assert_close(linear(*features, v).ratio(), expected, **EXACT)
