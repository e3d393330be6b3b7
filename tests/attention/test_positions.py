import math

import contract
import numpy as np
import pytest
import torch
from contract import EXACT
from families import randn
from scipy.stats import norm

from molflt.attention import Attention, Position
from molflt.attention.mixing.toeplitz import dense_log_kernel
from molflt.attention.positions.gaussian_bias import GaussianBias
from molflt.attention.positions.grid import BucketedPosition, LowRankPosition, ToeplitzPosition
from molflt.attention.positions.rotary import CosinePosition, RotaryPosition
from molflt.attention.positions.stochastic import ConvSPE, SineSPE

HEADS, DIM = 2, 3
F64 = torch.float64


def large(position: Position) -> Position:
    """Returns a float64 position with a table of order one."""
    with torch.no_grad():
        position.table.normal_(generator=torch.Generator().manual_seed(0))
    return position.double()


def smooth(position: LowRankPosition) -> LowRankPosition:
    """Returns a position whose masks have fast-falling singular values; one is asymmetric."""
    n = position.shape[0]
    z = torch.arange(1 - n, n) / n
    with torch.no_grad():
        position.table.copy_(torch.exp(-((torch.stack((z, z - 0.3)) / 0.2) ** 2)))
    return position.double()


TABLES = {
    "1d": (ToeplitzPosition(HEADS, max_tokens=20), contract.line),
    "2d": (ToeplitzPosition(HEADS, shape=contract.GRID), contract.cells),
    "bucketed": (BucketedPosition(HEADS, num_buckets=8, max_distance=10), contract.line),
}


@pytest.mark.parametrize(
    ("queries", "keys"), [(13, 13), (6, 11), (11, 6), (1, 1), (20, 20), (0, 0)]
)
@pytest.mark.parametrize("name", TABLES)
def test_kernel_and_bias_are_one_function_of_the_offset(name, queries, keys):
    position, places = TABLES[name]
    query_positions, key_positions = places(queries)[None], places(keys)[None]
    bias = large(position)("softmax", query_positions, key_positions).bias
    assert bias.shape == (1, HEADS, queries, keys)
    for mixing in ("linear", "quadratic"):
        log_kernel = position(mixing, query_positions, key_positions).log_kernel
        dense = dense_log_kernel(log_kernel, queries, keys)
        torch.testing.assert_close(dense, bias[0], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
def test_a_position_with_one_head_is_shared(mixing):
    one, four = ToeplitzPosition(1, 9), ToeplitzPosition(4, 9)
    four.table.data.copy_(one.table.expand_as(four.table))
    layers = [Attention(16, 4, mixing=mixing, position=position) for position in (one, four)]
    layers[1].load_state_dict(layers[0].state_dict() | {"position.table": four.table})
    x, positions = torch.randn(2, 9, 16), torch.arange(9.0)[:, None].expand(2, 9, 1)
    torch.testing.assert_close(layers[0](x, positions), layers[1](x, positions))


def test_bias_on_a_grid_is_the_entry_of_both_offsets():
    position, r = large(ToeplitzPosition(HEADS, shape=(3, 4))), contract.cells(12)
    queries = r[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    bias = position("softmax", queries[None], r[None]).bias
    rows, columns = (r - queries[:, None] + torch.tensor([2, 3])).long().unbind(dim=-1)
    torch.testing.assert_close(bias[0], position.table[:, rows, columns], rtol=0.0, atol=0.0)


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
    torch.set_default_dtype(torch.bfloat16)
    coarse = BucketedPosition(1, num_buckets, max_distance, bidirectional)
    torch.set_default_dtype(torch.float32)
    assert coarse.buckets == position.buckets
    assert list(position.state_dict()) == ["table"]


def matrix(position: LowRankPosition) -> torch.Tensor:
    return dense_log_kernel(position.table, *position.shape * 2)


@pytest.mark.parametrize("rank", [4, 10])
def test_error_is_near_the_best_of_that_rank(rank):
    """The measured error is 1.16 to 1.42 times the smallest, averaged over draws of the probe."""
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
    position = LowRankPosition(HEADS, max_tokens=24, rank=8)
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
    assert position.table.grad.abs().max() > 1e-3  # including 0


def test_gradient_is_that_of_the_projection():
    """Q is constant: the derivative is d(Q Q^T N), not d(Q(N) Q(N)^T N)."""
    position = large(LowRankPosition(HEADS, max_tokens=10, rank=3))
    left, right = position.factors()
    weights = torch.randn(HEADS, 10, 10, dtype=torch.float64)
    fast = torch.autograd.grad((left @ right.transpose(-1, -2) * weights).sum(), position.table)
    basis = torch.linalg.qr(left.detach()).Q
    projected = basis @ basis.transpose(-1, -2) @ matrix(position)
    exact = torch.autograd.grad((projected * weights).sum(), position.table)
    torch.testing.assert_close(fast, exact, **EXACT)

    def loss(table: torch.Tensor) -> torch.Tensor:
        where = ("linear", places, places)
        left, right = torch.func.functional_call(position, {"table": table}, where).columns
        return (left @ right.mT * weights).sum()

    places, step = torch.arange(10.0)[None, :, None], torch.randn_like(position.table)
    _, forward = torch.func.jvp(loss, (position.table.detach(),), (step,))
    torch.testing.assert_close(forward, (exact[0] * step).sum(), **EXACT)


def test_rows_are_gathered_by_position():
    position = smooth(LowRankPosition(HEADS, max_tokens=16, rank=16))
    generator = torch.Generator().manual_seed(0)
    query_positions = torch.randint(0, 16, (3, 5, 1), generator=generator)
    key_positions = torch.randint(0, 16, (3, 7, 1), generator=generator).double()
    left, right = position("linear", query_positions, key_positions).columns
    assert left.shape == (3, HEADS, 5, 16) and position.width(8) == 24
    bias = position("softmax", query_positions, key_positions).bias
    torch.testing.assert_close(left @ right.transpose(-1, -2), bias, **EXACT)


def test_rotated_pair_is_a_complex_product():
    """Compares each pair with the formula: pair p of axis a turns by base^(-p / P) r_a."""
    q, k = randn(2, 2, 2, 5, 13)
    r = 20 * randn(2, 5, 2, seed=1)
    got, _ = RotaryPosition(13, 2, base=50.0)("softmax", r, r).transform(q, k)
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
    module = make(dim=dim)
    queries, keys = 2 * randn(2, 3, dim), 2 * randn(2, 4, dim, seed=1)
    got = bias(module, queries, keys)
    assert got.shape == (2, 2, 3, 4)
    state = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    distance = (queries[:, :, None] - keys[:, None]).norm(dim=-1, keepdim=True)
    psi = norm.pdf(distance, state["mean"], np.exp(state["log_std"]))
    hidden = psi @ state["mlp.0.weight"].T + state["mlp.0.bias"]
    hidden = hidden * norm.cdf(hidden)  # GELU
    expected = hidden @ state["mlp.2.weight"].T + state["mlp.2.bias"]
    assert abs(got.movedim(1, -1).detach().numpy() - expected).max() < 1e-10


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


def noisy(kind: str, realizations: int = 8, gated: bool = True):
    """Returns small encodings whose kernels change visibly within a few tokens."""
    torch.manual_seed(0)
    if kind == "sine":
        spe = SineSPE(HEADS, DIM, realizations, num_sines=4, gated=gated)
        with torch.no_grad():
            spe.frequency.add_(3.0)
            spe.gain.normal_()
    else:
        spe = ConvSPE(HEADS, DIM, realizations, kernel_size=5, gated=gated, max_tokens=12)
    return spe.double()


def qk(tokens: int):
    return randn(2, 2, HEADS, tokens, DIM, seed=1)


def count(tokens: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + tokens, dtype=F64)[None, :, None]


def logits(spe, r, q, k):
    a, b = spe("linear", r, r).transform(q, k)
    return a @ b.mT


def formula(spe, lags):
    """Returns the kernels of the papers, (heads, d, lags)."""
    if isinstance(spe, SineSPE):
        frequency, gain = 0.5 * spe.frequency.sigmoid(), torch.nn.functional.softplus(spe.gain)
        phase = 2 * math.pi * frequency[..., None] * lags + spe.offset[..., None]
        value = (gain[..., None] ** 2 * phase.cos()).sum(dim=2)
    else:
        value = torch.zeros(HEADS, DIM, len(lags), dtype=F64)
        for i, lag in enumerate(lags.int().tolist()):
            for p in range(max(0, -lag), min(5, 5 - lag)):
                value[..., i] += spe.query_filter[..., p] * spe.key_filter[..., p + lag]
    if spe.gate is None:
        return value
    gate = spe.gate.sigmoid()[..., None]
    return gate + (1 - gate) * value


KINDS = pytest.mark.parametrize("kind", ["sine", "conv"])


@KINDS
@pytest.mark.parametrize("gated", [False, True])
def test_orthogonal_noise_gives_the_kernel_exactly(kind, gated):
    per_coordinate = 8 if kind == "sine" else 16  # 2 sines; max_tokens + kernel_size - 1
    rows = DIM * (per_coordinate + gated)
    spe = noisy(kind, rows, gated=gated)
    unit = math.sqrt(rows) * torch.eye(rows, dtype=F64).view(DIM, -1, rows)  # [d, component, r]
    with torch.no_grad():
        spe.noise.copy_(unit[:, :per_coordinate])
        if gated:
            spe.gate_noise.copy_(unit[:, -1])
    q, k = qk(9)
    places = [count(9, start=2)]
    if kind == "sine":  # real positions in any order
        places.append(7 * torch.randn(1, 9, 1, dtype=F64))
    for r in places:
        lags = (r[0] - r[0].T).flatten()
        kernel = formula(spe, lags).unflatten(-1, (9, 9))  # [h, d, i, j]
        # The kernel is not even: phases and two filters distinguish past and future.
        assert (kernel - kernel.mT).abs().max() > 0.05
        expected = torch.einsum("bhid,hdij,bhjd->bhij", q, kernel, k)
        torch.testing.assert_close(logits(spe, r, q, k), expected, **EXACT)


@KINDS
def test_each_sequence_has_its_own_positions(kind):
    spe, (q, k) = noisy(kind), qk(4)
    r = torch.cat((count(4, start=1), count(4, start=5)))
    alone = [logits(spe, r[i : i + 1], q[i : i + 1], k[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(logits(spe, r, q, k), torch.cat(alone), **EXACT)


@KINDS
def test_a_saturated_gate_has_finite_gradients(kind):
    spe = noisy(kind, 4)
    with torch.no_grad():
        spe.gate.copy_(torch.tensor([[-800.0, 800.0, 0.0]]))
    logits(spe, count(3), *qk(3)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in spe.parameters())


@KINDS
def test_noise_is_standard_normal(kind):
    spe = noisy(kind, 500)
    assert all(abs(noise.std() - 1) < 0.03 and abs(noise.mean()) < 0.03 for noise in spe.buffers())


def test_biases_on_a_grid_compile_for_unknown_numbers_of_tokens() -> None:
    position, places = ToeplitzPosition(HEADS, max_tokens=9), torch.arange(9.0)[:, None]

    def biases(places: torch.Tensor) -> torch.Tensor:
        kept = places[places[:, 0].nonzero()[:, 0]][None]
        return position.bias(kept, kept)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(biases, fullgraph=True, backend="eager")(places)
    torch.testing.assert_close(compiled, biases(places))
