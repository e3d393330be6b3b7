"""Encodings learned by offset: tables, T5's buckets and low-rank factors."""

import contract
import pytest
import torch
from families import EXACT

from molflt.attention.mixing.toeplitz import dense_log_kernel
from molflt.attention.positions.base import Position
from molflt.attention.positions.grid import BucketedPosition, LowRankPosition, ToeplitzPosition

HEADS = 2


def line(tokens):
    return contract.line(tokens)[None]


def cells(tokens):
    return contract.cells(tokens)[None]


def large(position: Position) -> Position:
    """With a table of order one, in float64."""
    with torch.no_grad():
        position.table.normal_(generator=torch.Generator().manual_seed(0))
    return position.double()


def smooth(position: LowRankPosition) -> LowRankPosition:
    """With masks whose singular values fall fast, one of them asymmetric."""
    n = position.shape[0]
    z = torch.arange(1 - n, n) / n
    with torch.no_grad():
        position.table.copy_(torch.exp(-((torch.stack((z, z - 0.3)) / 0.2) ** 2)))
    return position.double()


def toeplitz_case(name):
    if name == "2d":
        return large(ToeplitzPosition(HEADS, shape=contract.GRID)), cells
    kinds = {"1d": ToeplitzPosition, "bucketed": BucketedPosition}
    options = {"1d": {"max_tokens": 20}, "bucketed": {"num_buckets": 8, "max_distance": 10}}
    return large(kinds[name](HEADS, **options[name])), line


@pytest.mark.parametrize(
    ("queries", "keys"), [(13, 13), (6, 11), (11, 6), (1, 1), (20, 20), (0, 0)]
)
@pytest.mark.parametrize("name", ["1d", "2d", "bucketed"])
def test_kernel_and_bias_are_one_function_of_the_offset(name, queries, keys):
    position, places = toeplitz_case(name)
    query_positions, key_positions = places(queries), places(keys)
    bias = position("softmax", query_positions, key_positions).bias
    assert bias.shape == (1, HEADS, queries, keys)
    for mixing in ("linear", "quadratic"):
        log_kernel = position(mixing, query_positions, key_positions).log_kernel
        dense = dense_log_kernel(log_kernel, queries, keys)
        torch.testing.assert_close(dense, bias[0], rtol=0.0, atol=0.0)


def test_bias_on_a_grid_is_the_entry_of_both_offsets():
    position = large(ToeplitzPosition(HEADS, shape=(3, 4)))
    r = cells(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    bias = position("softmax", r[:, order], r).bias
    for i, place in enumerate(order.tolist()):
        for j in range(12):
            dy, dx = j // 4 - place // 4, j % 4 - place % 4
            expected = position.table[:, dy + 2, dx + 3]
            torch.testing.assert_close(bias[0, :, i, j], expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", ["1d", "2d", "bucketed"])
@pytest.mark.parametrize("mixing", ["linear", "quadratic"])
def test_tokens_off_the_grid_are_refused(name, mixing):
    position, places = toeplitz_case(name)
    r = places(8)
    gap = torch.cat((r[:, :5], r[:, 5:] + 1), dim=1)
    for other in (r.flip(1), gap, torch.cat((r, r.flip(1))), r.where(r != 3, torch.nan)):
        with pytest.raises(ValueError, match="grid"):
            position(mixing, other, other)
    with pytest.raises(ValueError, match="first key"):
        position(mixing, r, r + 1)
    position("softmax", r.flip(1), r.flip(1))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (6, 9), (64, 1000)])
def test_buckets_are_t5s(bidirectional, num_buckets, max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    position = BucketedPosition(1, num_buckets, max_distance, bidirectional)
    offsets = torch.arange(-1500, 1501)
    expected = t5.T5Attention._relative_position_bucket(
        offsets, bidirectional, num_buckets, max_distance
    )
    assert torch.equal(position.bucket(offsets), expected)
    assert position.bucket(offsets).max() == num_buckets - 1
    assert list(position.state_dict()) == ["table"]


def matrix(position: LowRankPosition) -> torch.Tensor:
    """N, (heads, L, L)."""
    return dense_log_kernel(position.table, *position.shape * 2)


def test_factors_of_full_rank_are_the_mask():
    position = large(LowRankPosition(HEADS, max_tokens=12, rank=12))
    left, right = position.factors()
    product = left @ right.transpose(-1, -2)
    torch.testing.assert_close(product, matrix(position), **EXACT)


@pytest.mark.parametrize("rank", [4, 10])
def test_error_is_near_the_best_of_that_rank(rank):
    """Measured 1.16 to 1.42 times the smallest, in the mean over draws of the probe."""
    torch.manual_seed(0)
    position = smooth(LowRankPosition(HEADS, max_tokens=64, rank=rank))
    exact, squares = matrix(position), []
    for seed in range(20):
        position.redraw_(torch.Generator().manual_seed(seed))
        left, right = position.factors()
        squares.append((left @ right.mT - exact).square().sum((-1, -2)))
    ratio = torch.stack(squares).mean(0) / torch.linalg.svdvals(exact)[:, rank:].square().sum(-1)
    assert (ratio >= 1 - 1e-9).all() and (ratio <= 1.7).all()


@pytest.mark.parametrize("table", ["zero", "constant", "one entry", "tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_low_rank_have_finite_factors_and_gradients(table, dtype):
    """A constant mask has rank 1: Gram-Schmidt would divide by rounding noise."""
    position = LowRankPosition(HEADS, max_tokens=24, rank=8, power_iterations=2)
    with torch.no_grad():
        position.table.zero_()
        if table == "one entry":
            position.table[:, 0] = 1.0
        elif table != "zero":
            position.table.fill_({"constant": 1.0, "tiny": 1e-18, "huge": 1e12}[table])
    position = position.to(dtype)
    left, right = position.factors()
    exact = matrix(position).detach()
    tolerance = 3e-6 if dtype == torch.float32 else 1e-13
    error = (left @ right.transpose(-1, -2) - exact).abs().max()
    assert error <= tolerance * exact.abs().max()
    weights = torch.randn(exact.shape, dtype=dtype)
    ((left @ right.transpose(-1, -2)) * weights).sum().backward()
    assert torch.isfinite(position.table.grad).all()
    assert position.table.grad.abs().max() > 1e-3  # also from zero


def test_gradient_is_that_of_the_projection():
    """Q is a constant: d(Q Q^T N) and not d(Q(N) Q(N)^T N)."""
    position = large(LowRankPosition(HEADS, max_tokens=10, rank=3))
    left, right = position.factors()
    weights = torch.randn(HEADS, 10, 10, dtype=torch.float64)
    fast = torch.autograd.grad((left @ right.transpose(-1, -2) * weights).sum(), position.table)
    basis = torch.linalg.qr(left.detach()).Q
    projected = basis @ basis.transpose(-1, -2) @ matrix(position)
    exact = torch.autograd.grad((projected * weights).sum(), position.table)
    torch.testing.assert_close(fast, exact, **EXACT)


def test_rows_are_gathered_by_position():
    position = smooth(LowRankPosition(HEADS, max_tokens=16, rank=16))
    generator = torch.Generator().manual_seed(0)
    query_positions = torch.randint(0, 16, (3, 5, 1), generator=generator)
    key_positions = torch.randint(0, 16, (3, 7, 1), generator=generator).double()
    left, right = position("linear", query_positions, key_positions).columns
    assert left.shape == (3, HEADS, 5, 16) and position.width(8) == 24
    bias = position("softmax", query_positions, key_positions).bias
    torch.testing.assert_close(left @ right.transpose(-1, -2), bias, **EXACT)
