"""Random projections against dense references, exact moments and the kernel they must estimate."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from molflt.attention import PROJECTIONS
from molflt.attention.numerics import by_head

F64 = torch.float64
EXACT = {"rtol": 0.0, "atol": 1e-12}
# (heads, rows, dim): one head and one dimension, odd dim, rows below, at and above a block.
SIZES = [(1, 3, 1), (1, 5, 16), (2, 16, 16), (3, 40, 16), (2, 20, 7), (2, 4, 2)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(name: str, heads: int, rows: int, dim: int, seed: int = 0):
    projection = PROJECTIONS[name](heads, rows, dim).double()
    projection.redraw_(seeded(seed))
    return projection


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_forward_is_the_product_with_the_matrix(name, size):
    heads, rows, dim = size
    projection = build(name, *size)
    x = torch.randn(3, heads, 5, dim, dtype=F64, generator=seeded(1), requires_grad=True)
    w = projection.matrix()
    assert w.shape == size
    assert w.dtype == F64
    y = projection(x)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.einsum("hmd,bhnd->bhnm", w, x), **EXACT)
    c = torch.randn(3, heads, 5, rows, dtype=F64, generator=seeded(2))
    (gradient,) = torch.autograd.grad((c * y).sum(), x)
    torch.testing.assert_close(gradient, torch.einsum("hmd,bhnm->bhnd", w, c), **EXACT)


def test_dense_draws_keep_their_order():
    # Seeds must keep giving the same numbers: heads in order, and per head all blocks before norms.
    generator = seeded(4)
    iid = torch.stack([torch.randn(20, 7, dtype=F64, generator=generator) for _ in "ab"])
    assert torch.equal(build("iid", 2, 20, 7, seed=4).matrix(), iid)
    generator, heads = seeded(4), []
    for _ in range(2):
        blocks = []
        for _ in range(3):
            q, r = np.linalg.qr(torch.randn(7, 7, dtype=F64, generator=generator).numpy())
            blocks.append(q * np.sign(np.diag(r)))
        norms = torch.randn(20, 7, dtype=F64, generator=generator).norm(dim=-1)
        heads.append(norms[:, None] * torch.from_numpy(np.concatenate(blocks)[:20]))
    orthogonal = build("orthogonal", 2, 20, 7, seed=4).matrix()
    torch.testing.assert_close(orthogonal, torch.stack(heads), **EXACT)


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 33, 100])
def test_hadamard_equals_the_dense_product(dim):
    projection = build("hadamard", 2, 150, dim)
    p = 2 ** math.ceil(math.log2(dim))
    h = torch.from_numpy(hadamard(p)).double() / math.sqrt(p)
    blocks = []
    for signs in projection.signs.flatten(0, 1):
        assert signs.abs().eq(1).all()
        blocks.append(h @ signs[2].diag() @ h @ signs[1].diag() @ h @ signs[0].diag())
    directions = torch.stack(blocks)
    identity = torch.eye(p, dtype=F64).expand_as(directions)
    torch.testing.assert_close(directions @ directions.mT, identity, **EXACT)
    expected = directions.view(2, -1, p)[:, :150, :dim] * projection.norms[..., None]
    torch.testing.assert_close(projection.matrix(), expected, **EXACT)


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 33])
def test_givens_equals_the_dense_product(dim):
    projection = build("givens", 2, 2 * dim + 1, dim)
    heads = []
    for order, angles, norms in zip(
        projection.order.numpy(), projection.angles.numpy(), projection.norms, strict=True
    ):
        blocks = []
        for block in range(3):
            product = np.eye(dim)
            for indices, thetas in zip(order[block], angles[block], strict=True):
                product = np.eye(dim)[indices] @ product
                for k, theta in enumerate(thetas):
                    rotation = np.eye(dim)
                    rotation[np.ix_((2 * k, 2 * k + 1), (2 * k, 2 * k + 1))] = (
                        (np.cos(theta), -np.sin(theta)),
                        (np.sin(theta), np.cos(theta)),
                    )
                    product = rotation @ product
            blocks.append(product)
        heads.append(norms[:, None] * torch.from_numpy(np.concatenate(blocks)[: len(norms)]))
    torch.testing.assert_close(projection.matrix(), torch.stack(heads), **EXACT)
    assert (projection.order.sort(dim=-1).values == torch.arange(dim)).all()


def test_sobol_rows_are_stratified():
    # A power of two of points puts exactly one into each of m slices, along every coordinate.
    m = 64
    cells = (torch.special.ndtr(build("sobol", 2, m, 5).matrix()) * m).floor()
    assert (cells.sort(dim=1).values == torch.arange(m)[:, None]).all()


def test_sobol_survives_points_on_the_border(monkeypatch):
    border = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    monkeypatch.setattr(torch.quasirandom.SobolEngine, "draw", lambda *_, **__: border)
    rows = build("sobol", 1, 2, 2).matrix()
    assert (rows.abs() > 6).all()
    assert (rows.abs() < 7).all()


@pytest.mark.parametrize("dim", [1, 7, 16])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_rows_have_mean_0_and_covariance_1(name, dim):
    # 36000 rows; largest deviations over ten seeds: 0.018, 0.050 and (norms) 0.048.
    rows = build(name, 1500, 24, dim).matrix().flatten(0, 1)
    assert rows.mean(dim=0).abs().max() < 0.03
    assert (rows.T @ rows / len(rows) - torch.eye(dim)).abs().max() < 0.07
    if name != "sphere":
        variance = rows.square().sum(dim=-1).var()  # of chi squared with dim degrees of freedom
        assert abs(variance / (2 * dim) - 1) < 0.07


@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("batch", [0, 1, 6])
def test_one_product_per_head_is_that_of_each_sequence(batch, tokens):
    x = torch.randn(batch, 2, tokens, 5, generator=seeded(0), dtype=F64, requires_grad=True)
    matrices = torch.randn(2, 5, 16, generator=seeded(1), dtype=F64, requires_grad=True)
    found, wanted = by_head(x, matrices), torch.einsum("bhnd,hdm->bhnm", x, matrices)
    torch.testing.assert_close(found, wanted, **EXACT)
    weight = torch.randn(found.shape, generator=seeded(2), dtype=F64)
    each = (torch.autograd.grad(out, (x, matrices), weight) for out in (found, wanted))
    torch.testing.assert_close(*each, **EXACT)
