import importlib
import warnings

import pytest
import torch
from families import EXACT, randn
from torch.autograd import gradcheck, gradgradcheck

from molflt.attention import Attention, Features, make_position
from molflt.attention.mixing import forms
from molflt.attention.mixing import sparse as products
from molflt.attention.mixing.forms import linear_with_kernel, quadratic
from molflt.attention.mixing.sparse import Pattern, correlate, gather, spread
from molflt.attention.mixing.toeplitz import dense_log_kernel, toeplitz

# the package exports the function under the name of the module
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
    """Sets sizes with which a dozen tokens need several blocks and pieces."""
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
    return randn(HEADS, *sizes, seed=3)


def values(keys, dtype=torch.float64):
    return randn(2, HEADS, keys, DV, seed=4).to(dtype)


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
    mask[1, :, : keys // 3] = False  # causal, where the first queries have no key
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
        # signed normalizers can be near 0, so sums are compared before the division
        out = sums.extensive() if kind == "signed" else sums.ratio()
        norm = sums.normalizer * sums.log_scale.exp()
        loss = (out * torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)).sum()
        grads = torch.autograd.grad(loss, inputs)
        found.append([out, norm, *grads])
    assert ((found[0][1] == 0) == (found[1][1] == 0)).all()  # rows without a key
    for fast, exact in zip(*found, strict=True):
        scale = exact.abs().max().clamp(min=1.0)
        torch.testing.assert_close(fast / scale, exact / scale, **EXACT)


@pytest.mark.parametrize("range_", [7, 300])
def test_rows_of_different_scales_in_blocks(range_):
    """Tests float32 with keys and a kernel that grow and fall by exp(range_)."""
    tokens = 40
    slope = torch.linspace(0, range_, tokens)
    query, key = (features("log", tokens, seed, torch.float32) for seed in (0, 1))
    key = Features(None, key.log_scale + slope[:, None])
    value = values(tokens, dtype=torch.float32)
    offsets = torch.arange(1 - tokens, tokens).abs().expand(HEADS, -1)
    log_kernel = -range_ / tokens * offsets
    sums = toeplitz(query, key, value, log_kernel, causal=True, method="blocks")
    assert sums.normalizer.min() > 1e-20
    log_q, log_k = query.log_scale.double()[:, :, :, None], key.log_scale.double()[:, :, None]
    logits = torch.logsumexp(log_q + log_k, dim=-1) + dense_log_kernel(log_kernel, tokens, tokens)
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    expected = logits.masked_fill(~past, -torch.inf).softmax(-1) @ value.double()
    torch.testing.assert_close(sums.ratio().double(), expected, rtol=0.0, atol=2e-4)


def test_small_products_of_features_have_gradients_in_blocks():
    """Tests float32 features with products of exp(-61), with kernels that are equal up to scale."""
    query, key = (
        Features(None, torch.tensor(x).expand(1, 1, 9, 2)) for x in ([0, -70.0], [-70.0, 0])
    )
    value, c = values(9, dtype=torch.float32)[:1, :1], kernel(9, 9, None)[:1].float()
    found = []
    for shift in (0, -15, -35):
        own = (c + shift).requires_grad_()
        out = toeplitz(query, key, value, own, causal=True, method="blocks").ratio()
        found.append(torch.autograd.grad(out.square().sum(), own)[0])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", FORMS)
def test_large_kernels_do_not_overflow(method):
    arguments, c = (features("log", 9, 0), features("log", 9, 1), values(9)), kernel(9, 9, None)
    small, large = (toeplitz(*arguments, c + x, method=method).ratio() for x in (0, 2000))
    torch.testing.assert_close(large, small, rtol=0.0, atol=1e-9)


ROWS, POINTS, CHANNELS = 5, 7, 3


def case():
    generator = torch.Generator().manual_seed(0)
    row = torch.tensor([0, 0, 0, 0, 1, 1, 3, 3, 3, 4])  # one row is empty
    column = torch.tensor([1, 1, 2, 3, 6, 0, 5, 1, 2, 2])  # one place occurs twice
    sizes = (len(row),), (ROWS, CHANNELS), (POINTS, CHANNELS)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in sizes]
    pattern = Pattern.of(row, column, ROWS, POINTS)
    assert torch.equal(pattern.rows().long(), row)
    return pattern, (row, column), *(x.requires_grad_() for x in made)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_products_equal_dense_ones_with_two_gradients(sparse, monkeypatch):
    monkeypatch.setattr(products, "has_sparse_products", lambda _: sparse)
    monkeypatch.setattr(products, "_TRANSIENT", 4 * CHANNELS)
    pattern, places, weight, x, y = case()
    matrix = torch.zeros(ROWS, POINTS, dtype=torch.float64)
    matrix = matrix.index_put(places, weight, accumulate=True)
    torch.testing.assert_close(spread(weight, x, pattern), matrix.T @ x, rtol=0, atol=1e-14)
    torch.testing.assert_close(gather(weight, y, pattern), matrix @ y, rtol=0, atol=1e-14)
    for product, other in ((spread, x), (gather, y)):
        assert gradcheck(lambda w, z, f=product: f(w, z, pattern), (weight, other))
        assert gradgradcheck(lambda w, z, f=product: f(w, z, pattern), (weight, other))
    expected = (x @ y.T)[places]
    torch.testing.assert_close(correlate(x, y, pattern), expected, rtol=0, atol=1e-14)
    assert gradcheck(lambda a, b: correlate(a, b, pattern), (x, y))
    assert gradgradcheck(lambda a, b: correlate(a, b, pattern), (x, y))


def test_sparse_products_do_not_touch_the_warnings_of_other_threads(monkeypatch):
    filters, build, same = warnings.filters, torch.sparse_csr_tensor, []

    def during(*args, **options):
        same.append(warnings.filters is filters)
        return build(*args, **options)

    monkeypatch.setattr(torch, "sparse_csr_tensor", during)
    index = torch.arange(3)
    spread(torch.ones(3), torch.ones(3, 2), Pattern.of(index, index, 3, 3))
    assert same == [True]


def test_more_places_than_the_matrix_has_numbers():
    """A small cell has many images of few atoms."""
    row, column = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1, 1, 0, 0, 1, 0])
    x, y = torch.randn(2, 2, 3, dtype=torch.float64).unbind()
    found = correlate(x, y, Pattern.of(row, column, 2, 2))
    torch.testing.assert_close(found, (x @ y.T)[row, column], rtol=0, atol=1e-14)


@pytest.mark.parametrize("transient", [2**22, 200], ids=["whole", "pieces"])
@pytest.mark.parametrize("shared", [True, False], ids=["factors of all heads", "of each head"])
@pytest.mark.parametrize("columns", [1, 4, 19])
def test_by_column_and_by_feature(columns, shared, transient, monkeypatch):
    """Compares values and two derivatives; with more than 4 columns, sums run over features."""
    monkeypatch.setattr(forms, "_TRANSIENT", transient)
    heads = 1 if shared else 3
    features, kernel = [(2, 3, 6, 4), (2, 3, 7, 4)], [(2, heads, n, columns) for n in (6, 7)]
    shapes = [*features, (2, 3, 7, 2), *kernel]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, left, right = leaves

    def found(linear: bool) -> list[torch.Tensor]:
        features = Features(query.exp(), None), Features(key.square(), key)
        if linear:
            sums = linear_with_kernel(*features, value, (left, right))
        else:
            sums = quadratic(*features, value, kernel=left @ right.mT)
        parts = torch.cat((sums.numerator, sums.normalizer), dim=-1) * sums.log_scale.exp()
        first = torch.autograd.grad(parts.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sum() for x in first), leaves)
        return [parts, *first, *second]

    for one, other in zip(found(True), found(False), strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one / scale, other / scale, **EXACT)


TOKENS = 23
CASES = {
    "plain": {},
    "spectral": {"position": "spectral"},
    "multiplicative": {"position": "multiplicative"},
    "without a logarithm": {"feature_map": "relu"},
    "signed": {"feature_map": "trigonometric", "position": "spectral"},
    "sums": {"normalize": "none"},
    "auto": {"mixing": "auto"},
}


@pytest.fixture
def cut(monkeypatch):
    """Returns a function that sets the number of tokens per chunk; 0 turns chunks off."""

    def set_size(size: int) -> None:
        monkeypatch.setattr("molflt.attention.encodings.chunk_size", lambda *_: size)

    return set_size


def layer(position: str = "", feature_map: str = "positive", dtype=torch.float64, **options):
    """Returns a function that calls attention at random positions, and its leaves."""
    torch.manual_seed(0)
    drawn = (torch.randn(3, TOKENS, width, dtype=torch.float64) for width in (3, 8))
    places, x = (draw.to(dtype).requires_grad_() for draw in drawn)
    if position:
        options["position"] = make_position(position, 2, 4, num_nodes=3)
    attention = Attention(8, 2, feature_map=feature_map, num_features=6, **options).to(dtype)
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, -7:] = False
    mask[2] = False

    def run() -> torch.Tensor:
        return attention(x, places if position else None, key_mask=mask)

    return run, [x, *attention.parameters(), *([places] if position else [])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 4, TOKENS])
def test_chunks_change_nothing(cut, case, size):
    """Compares outputs and two derivatives; some chunks of one token do not contain a key."""
    found = []
    for tokens in (0, size):
        cut(tokens)
        run, leaves = layer(**CASES[case])
        out = run()
        loss = out.square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        second = torch.autograd.grad(first[0].square().sum(), leaves, allow_unused=True)
        found.append([x for x in (out, *first, *second) if x is not None])
    for whole, in_chunks in zip(*found, strict=True):
        scale = whole.abs().max().clamp(min=1.0)
        torch.testing.assert_close(in_chunks / scale, whole / scale, **EXACT)


def test_a_later_chunk_of_huge_keys_overflows_nothing(cut):
    """Log features reach thousands and grow along the sequence, in float32."""
    found = []
    for size, dtype in ((0, torch.float64), (4, torch.float32)):
        cut(size)
        run, (x, *_) = layer(feature_map="exp", dtype=dtype)
        with torch.no_grad():
            torch.manual_seed(1)
            x.copy_(torch.randn(TOKENS, 8, dtype=torch.float64).cumsum(0) * 60)
        found.append(run())
    error = (found[1] - found[0]).abs().max() / found[0].abs().max()
    assert error < 1e-5  # the measured error is 3e-6, as without chunks


def test_nothing_of_the_size_of_all_features_is_kept():
    """Autograd does not save tensors (heads, tokens, m) for 40,000 tokens."""
    attention = Attention(16, 8, num_features=64)
    x = torch.randn(1, 40_000, 16, requires_grad=True)
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attention(x)
    assert sizes and max(sizes) <= 2 * x.numel() < 8 * 64 * 40_000
    out.sum().backward()
    assert x.grad.isfinite().all()
