"""SPE: exact kernels with orthogonal noise, unbiased with random noise, one noise for all calls."""

import copy
import math

import pytest
import torch
from contract import EXACT
from families import randn

from molflt.attention.positions.stochastic import ConvSPE, SineSPE

F64 = torch.float64
HEADS, DIM = 2, 3


def make(kind: str, realizations: int = 8, gated: bool = True):
    """Small encodings of visible kernels: a few tokens are a sizable part of every period."""
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


def expectation(spe, r, q, k):
    """sum_d q_d P_d(i - j) k_d, from the closed form."""
    kernel = spe.kernel(r[0] - r[0].T)  # [h, d, i, j]
    return torch.einsum("bhid,hdij,bhjd->bhij", q, kernel, k)


def formula(spe, lags):
    """The papers' kernels, (heads, d, lags)."""
    if isinstance(spe, SineSPE):
        frequency, gain = 0.5 * spe.frequency.sigmoid(), torch.nn.functional.softplus(spe.gain)
        phase = 2 * math.pi * frequency[..., None] * lags + spe.offset[..., None]
        value = (gain[..., None] ** 2 * phase.cos()).sum(dim=2)
    else:
        value = torch.zeros(HEADS, DIM, len(lags), dtype=F64)
        for i, lag in enumerate(lags.tolist()):
            for p in range(max(0, -lag), min(5, 5 - lag)):
                value[..., i] += spe.query_filter[..., p] * spe.key_filter[..., p + lag]
    if spe.gate is None:
        return value
    gate = spe.gate.sigmoid()[..., None]
    return gate + (1 - gate) * value


KINDS = pytest.mark.parametrize("kind", ["sine", "conv"])
GATES = pytest.mark.parametrize("gated", [False, True])


@KINDS
@GATES
def test_kernel_is_the_formula(kind, gated):
    spe, lags = make(kind, gated=gated), torch.arange(-7, 8)
    kernel = spe.kernel(lags)
    torch.testing.assert_close(kernel, formula(spe, lags), **EXACT)
    # It is not even: phases and two filters tell the past from the future.
    assert (kernel - kernel.flip(-1)).abs().max() > 0.05


@KINDS
@GATES
def test_orthogonal_noise_gives_the_kernel_exactly(kind, gated):
    """With noise of exactly unit covariance, one realization set equals its expectation."""
    per_coordinate = 8 if kind == "sine" else 16  # 2 sines; max_tokens + kernel_size - 1
    rows = DIM * (per_coordinate + gated)
    spe = make(kind, rows, gated=gated)
    unit = math.sqrt(rows) * torch.eye(rows, dtype=F64).view(DIM, -1, rows)  # [d, component, r]
    with torch.no_grad():
        spe.noise.copy_(unit[:, :per_coordinate])
        if gated:
            spe.gate_noise.copy_(unit[:, -1])
    q, k = qk(9)
    r = count(9, start=2)
    torch.testing.assert_close(logits(spe, r, q, k), expectation(spe, r, q, k), **EXACT)
    if kind == "sine":  # real positions in any order
        r = 7 * torch.randn(1, 9, 1, dtype=F64)
        torch.testing.assert_close(logits(spe, r, q, k), expectation(spe, r, q, k), **EXACT)


@KINDS
def test_a_saturated_gate_has_finite_gradients(kind):
    spe = make(kind, 4)
    with torch.no_grad():
        spe.gate.copy_(torch.tensor([[-800.0, 800.0, 0.0]]))
    logits(spe, count(3), *qk(3)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in spe.parameters())


@KINDS
def test_noise_is_the_same_until_redrawn(kind):
    spe = make(kind)
    q, k = qk(6)
    before = logits(spe.train(), count(6), q, k)
    torch.manual_seed(99)
    for twin in (spe, spe.eval(), copy.deepcopy(spe)):
        torch.testing.assert_close(logits(twin, count(6), q, k), before, rtol=0, atol=0)
    spe = make(kind, 500)
    assert all(abs(noise.std() - 1) < 0.03 and abs(noise.mean()) < 0.03 for noise in spe.buffers())


@KINDS
def test_batching_is_exact(kind):
    """Padding, batching and positions per row change nothing."""
    spe = make(kind)
    q, k = qk(10)
    alone = logits(spe, count(4, start=3), q[:1, :, :4], k[:1, :, :4])
    rows = torch.cat((count(10), count(10)))
    rows[0, :4] = count(4, start=3)
    rows[0, 4:] = 0.0  # padding, at one place
    batch, shared = logits(spe, rows, q, k), logits(spe, count(10), q, k)
    torch.testing.assert_close(batch[:1, :, :4, :4], alone, **EXACT)
    torch.testing.assert_close(batch[1], shared[1], **EXACT)
    torch.testing.assert_close(logits(spe, count(10).expand(2, -1, -1), q, k), shared, **EXACT)
    assert logits(spe, rows[:0], q[:0], k[:0]).shape == (0, HEADS, 10, 10)
