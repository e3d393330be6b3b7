"""Toeplitz products: both fast forms against the dense oracle, loops and scipy."""

import importlib

import pytest
import torch
from families import EXACT
from scipy.linalg import matmul_toeplitz

from molflt.attention.features.base import Features
from molflt.attention.mixing.forms import quadratic
from molflt.attention.mixing.toeplitz import dense_log_kernel, toeplitz, toeplitz_matmul

# The package exports the function under the module's name.
module = importlib.import_module("molflt.attention.mixing.toeplitz")

HEADS, M, DV = 3, 5, 4
FORMS = ("fft", "blocks")
# queries, keys, shape of the grid (None: one dimension)
SIZES = {
    "1d": (13, 13, None),
    "1d, more keys": (6, 11, None),
    "1d, more queries": (11, 6, None),
    "1d, one token": (1, 1, None),
    "2d": (12, 12, (3, 4)),
    "2d, part of a row": (10, 10, (5, 4)),
    "2d, more keys": (6, 11, (3, 4)),
    "2d, more queries": (11, 6, (3, 4)),
    "2d, one column": (5, 5, (5, 1)),
    "2d, one row": (5, 5, (1, 5)),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several blocks and several pieces already for a dozen tokens."""
    monkeypatch.setattr(module, "_BLOCK", 4)
    monkeypatch.setitem(module._TRANSIENT, "cpu", 1000)


def features(kind, tokens, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(m):
        return torch.randn(2, HEADS, tokens, m, dtype=dtype, generator=generator)

    return {
        "log": lambda: Features(None, 2 * draw(M)),
        "plain": lambda: Features(draw(M).abs()),
        "both": lambda: Features(draw(M).abs(), draw(M)),
        "signed": lambda: Features(draw(M), 3 * draw(1)),
    }[kind]()


def kernel(queries, keys, shape):
    sizes = (queries + keys - 1,) if shape is None else tuple(2 * n - 1 for n in shape)
    generator = torch.Generator().manual_seed(3)
    return torch.randn(HEADS, *sizes, dtype=torch.float64, generator=generator)


def values(keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, HEADS, keys, DV, dtype=dtype, generator=generator)


def leaves(query, key, value, log_kernel):
    tensors = (*query, *key, value, log_kernel)
    return [x.requires_grad_() for x in tensors if x is not None]


@pytest.mark.parametrize("kind", ["log", "plain", "both", "signed"])
@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize(
    ("size", "causal"),
    [(s, c) for s, (n, k, g) in SIZES.items() for c in (False, True) if not (c and g and n != k)],
)
def test_equals_the_dense_form_with_gradients(size, causal, method, kind):
    queries, keys, shape = SIZES[size]
    mask = torch.ones(2, 1, keys, dtype=torch.bool)
    mask[0, :, keys // 2 + 1 :] = False  # ragged: a short sequence
    mask[1, :, : keys // 3] = False  # causal: the first queries without a key
    found = []
    for fast in (True, False):
        query, key = features(kind, queries, 0), features(kind, keys, 1)
        value, log_kernel = values(keys), kernel(queries, keys, shape)
        inputs = leaves(query, key, value, log_kernel)
        arguments = query, key.masked(mask), value
        if fast:
            sums = toeplitz(*arguments, log_kernel, causal=causal, method=method)
        else:
            dense = dense_log_kernel(log_kernel, queries, keys)
            sums = quadratic(*arguments, causal=causal, log_kernel=dense)
        # Signed normalizers come near 0: compare what is not divided.
        out = sums.extensive() if kind == "signed" else sums.ratio()
        norm = sums.normalizer * sums.log_scale.exp()
        loss = (out * torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)).sum()
        grads = torch.autograd.grad(loss, inputs)
        found.append([out, norm, *grads])
    assert ((found[0][1] == 0) == (found[1][1] == 0)).all()  # rows without a key
    for fast, exact in zip(*found, strict=True):
        scale = exact.abs().max().clamp(min=1.0)
        torch.testing.assert_close(fast / scale, exact / scale, **EXACT)


@pytest.mark.parametrize("method", FORMS)
def test_two_dimensions_equal_loops_over_cells(method):
    """Independent of the oracle's gather: loops over cells."""
    height, width, tokens = 3, 4, 10
    phi_q, phi_k = (features("plain", tokens, seed) for seed in (0, 1))
    value, log_kernel = values(tokens), kernel(tokens, tokens, (height, width))
    for causal in (False, True):
        expected = torch.zeros(2, HEADS, tokens, DV, dtype=torch.float64)
        for i in range(tokens):
            for j in range(i + 1 if causal else tokens):
                dy, dx = j // width - i // width, j % width - i % width
                c = log_kernel[:, dy + height - 1, dx + width - 1].exp()
                product = (phi_q.values[:, :, i] * phi_k.values[:, :, j]).sum(-1)
                expected[:, :, i] += (product * c)[..., None] * value[:, :, j]
        sums = toeplitz(phi_q, phi_k, value, log_kernel, causal=causal, method=method)
        torch.testing.assert_close(sums.extensive(), expected, **EXACT)


@pytest.mark.parametrize(("rows", "columns"), [(50, 50), (17, 40), (40, 17), (1, 1)])
def test_products_are_scipys(rows, columns):
    table, x = kernel(rows, columns, None), values(columns)[0]
    found = toeplitz_matmul(table, x)
    for head in range(HEADS):
        c = table[head].numpy()
        expected = matmul_toeplitz((c[:rows][::-1], c[rows - 1 :]), x[head].numpy())
        torch.testing.assert_close(found[head].numpy(), expected, rtol=0.0, atol=3e-14)


def test_every_row_has_its_own_scale_in_blocks():
    """float32 with keys that grow by exp(300) and a kernel down to exp(-300)."""
    tokens = 40
    slope = torch.linspace(0, 300, tokens)
    query, key = (features("log", tokens, seed, torch.float32) for seed in (0, 1))
    key = Features(None, key.log_scale + slope[:, None])
    value = values(tokens, dtype=torch.float32)
    log_kernel = -8.0 * torch.arange(1 - tokens, tokens).abs().expand(HEADS, -1)
    sums = toeplitz(query, key, value, log_kernel, causal=True, method="blocks")
    assert sums.normalizer.min() > 1e-3
    log_q, log_k = query.log_scale.double()[:, :, :, None], key.log_scale.double()[:, :, None]
    logits = torch.logsumexp(log_q + log_k, dim=-1) + dense_log_kernel(log_kernel, tokens, tokens)
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    expected = logits.masked_fill(~past, -torch.inf).softmax(-1) @ value.double()
    torch.testing.assert_close(sums.ratio().double(), expected, rtol=0.0, atol=2e-4)


@pytest.mark.parametrize("method", FORMS)
def test_large_kernels_do_not_overflow(method):
    arguments, c = (features("log", 9, 0), features("log", 9, 1), values(9)), kernel(9, 9, None)
    small, large = (toeplitz(*arguments, c + x, method=method).ratio() for x in (0, 2000))
    torch.testing.assert_close(large, small, rtol=0.0, atol=1e-9)
