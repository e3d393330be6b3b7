"""Random projections against dense references, exact moments and the kernel they must estimate."""

import math

import numpy as np
import pytest
import torch
from scipy import special
from scipy.linalg import hadamard
from torch.utils._python_dispatch import TorchDispatchMode

from molflt.attention import PROJECTIONS
from molflt.attention.numerics import by_head

F64 = torch.float64
EXACT = {"rtol": 0.0, "atol": 1e-12}
ORTHOGONAL = ("orthogonal", "hadamard", "givens")
# (heads, rows, dim): one head and one dimension, odd dim, rows below, at and above a block.
SIZES = [(1, 3, 1), (1, 5, 16), (2, 16, 16), (3, 40, 16), (2, 20, 7), (2, 4, 2)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(name: str, heads: int, rows: int, dim: int, seed: int = 0):
    projection = PROJECTIONS[name](heads, rows, dim).double()
    projection.redraw_(seeded(seed))
    return projection


def unit(dim: int, kind: str) -> torch.Tensor:
    """A unit vector: a coordinate axis, the diagonal, or a random direction."""
    if kind == "axis":
        z = torch.eye(dim, dtype=F64)[0]
    elif kind == "flat":
        z = torch.ones(dim, dtype=F64)
    else:
        z = torch.randn(dim, dtype=F64, generator=seeded(11))
    return z / z.norm()


def kernel(projection, z: torch.Tensor) -> torch.Tensor:
    """Estimates of E exp(w . z) by every head, relative to exp(|z|^2 / 2)."""
    tokens = z.expand(1, projection.heads, 1, -1)
    return (projection(tokens)[0, :, 0] - z.square().sum() / 2).exp().mean(dim=-1)


# ---- the interface


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


@pytest.mark.parametrize("name", PROJECTIONS)
def test_precision_is_that_of_the_input(name):
    x = torch.randn(2, 2, 4, 7, dtype=F64, generator=seeded(1))
    single = PROJECTIONS[name](2, 20, 7)
    coarse, fine = single(x.float()), single(x)
    assert (coarse.dtype, fine.dtype) == (torch.float32, F64)
    assert single.matrix().dtype == torch.float32
    torch.testing.assert_close(coarse, fine.float(), rtol=0, atol=2e-5)
    torch.testing.assert_close(fine, single.double()(x), **EXACT)  # only the buffers were rounded


@pytest.mark.parametrize("name", PROJECTIONS)
def test_redraw_depends_only_on_its_generator(name):
    projection = build(name, 2, 20, 7, seed=5)
    first = projection.matrix()
    torch.manual_seed(77)
    torch.randn(3)
    projection.redraw_(seeded(5))
    assert torch.equal(projection.matrix(), first)
    projection.redraw_(seeded(6))
    assert ((projection.matrix() - first).abs().amax(dim=(1, 2)) > 0.1).all()
    state = torch.get_rng_state()
    projection.redraw_(seeded(5))
    assert torch.equal(torch.get_rng_state(), state)
    projection.redraw_()
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_single_precision_and_other_devices_round_the_same_draw(name):
    double = build(name, 2, 20, 7, seed=3)
    single = PROJECTIONS[name](2, 20, 7)
    with torch.device("meta"):
        elsewhere = PROJECTIONS[name](2, 20, 7)
        assert all(buffer.is_meta for buffer in elsewhere.buffers())
        elsewhere.redraw_(seeded(3))
    elsewhere.to_empty(device="cpu")
    for projection in (single, elsewhere):
        projection.redraw_(seeded(3))
        for key, value in projection.state_dict().items():
            expected = double.state_dict()[key]
            assert value.dtype in (torch.float32, torch.int64)
            assert torch.equal(value, expected.to(value.dtype))


@pytest.mark.parametrize("name", ["orthogonal", "hadamard", "givens"])  # all ways to project
def test_compiles_to_one_graph(name):
    torch._dynamo.reset()
    projection = build(name, 2, 8, 3)
    compiled = torch.compile(projection, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (4, 9):
        x = torch.randn(3, 2, tokens, 3, dtype=F64, generator=seeded(1), requires_grad=True)
        y, expected = compiled(x), projection(x)
        torch.testing.assert_close(y, expected, **EXACT)
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


# ---- what is drawn


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


@pytest.mark.parametrize(("name", "dim"), [(n, 16) for n in ORTHOGONAL] + [("givens", 7)])
def test_directions_are_orthogonal_within_blocks(name, dim):
    rows = build(name, 2, 2 * dim + 3, dim).matrix()
    for block in (rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim :]):
        directions = torch.nn.functional.normalize(block, dim=-1)
        gram = directions @ directions.mT
        torch.testing.assert_close(gram, torch.eye(gram.shape[-1]).expand_as(gram).double())
        assert (gram - torch.eye(gram.shape[-1])).abs().max() < 1e-10


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


def test_sphere_rows_have_one_norm():
    norms = build("sphere", 2, 20, 7).matrix().norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(7)), **EXACT)


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


class Largest(TorchDispatchMode):
    """Records the number of elements in the largest memory that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            stored = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.numel = max(self.numel, stored)
        return out


@pytest.mark.parametrize("name", ["hadamard", "givens"])
def test_no_dense_matrix_is_stored_or_formed(name):
    dim, rows, levels = 512, 1024, 9
    projection = PROJECTIONS[name](1, rows, dim)
    bound = 3 * rows if name == "hadamard" else 4 * levels * rows
    assert max(buffer.numel() for buffer in projection.buffers()) <= bound
    x = torch.zeros(1, 1, 1, dim)
    with Largest() as largest:
        projection(x)
    assert largest.numel <= (bound if name == "hadamard" else 2 * bound)  # sines and cosines
    assert largest.numel < dim * dim


# ---- moments and the kernel


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


@pytest.mark.parametrize("rows", [5, 16, 24])  # below, at and above one block of 16
@pytest.mark.parametrize("name", ["iid", "orthogonal", "sobol"])
def test_the_kernel_is_unbiased(name, rows):
    projection = build(name, 2000, rows, 16, seed=1)
    for kind in ("axis", "random"):
        estimates = kernel(projection, unit(16, kind))
        error = estimates.std() / math.sqrt(2000)
        assert error < 0.015
        assert abs(estimates.mean() - 1) < 4 * error


@pytest.mark.parametrize("dim", [4, 16])
def test_the_bias_of_the_sphere_is_the_one_in_its_docstring(dim):
    for norm in (1.0, 2.0):
        t = math.sqrt(dim) * norm
        exact = math.gamma(dim / 2) * special.iv(dim / 2 - 1, t) / (t / 2) ** (dim / 2 - 1)
        bias = exact * math.exp(-(norm**2) / 2) - 1
        estimates = kernel(build("sphere", 3000, 32, dim, seed=1), norm * unit(dim, "random"))
        error = estimates.std() / math.sqrt(3000)
        assert abs(estimates.mean() - 1 - bias) < 4 * error
        assert bias < -3 * error
    assert dim != 16 or -0.17 < bias < -0.16


def test_error_decays_as_one_over_sqrt_m():
    # Ranges over six seeds: slopes -0.47 to -0.54; ratios 0.83 to 0.91, Sobol 0.42 to 0.55.
    z, rmse = unit(16, "random"), {}
    for name in ("iid", "sobol", *ORTHOGONAL):
        for m in (16, 64):
            estimates = kernel(build(name, 500 if name == "sobol" else 2500, m, 16, seed=1), z)
            rmse[name, m] = (estimates - 1).square().mean().sqrt().item()
    for name in ("iid", *ORTHOGONAL):
        slope = math.log(rmse[name, 64] / rmse[name, 16]) / math.log(4)
        assert abs(slope + 0.5) < 0.06
    for name in ORTHOGONAL:
        assert rmse[name, 64] < 0.95 * rmse["iid", 64]
    assert rmse["sobol", 64] < 0.65 * rmse["iid", 64]


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
