"""Outputs do not depend on the scale of tokens or on the form of the sums."""

import pytest
import torch
from contract import EXACT, HEADS

from molflt.attention import FEATURE_MAPS, Attention, Features, Stack
from molflt.attention.mixing import chunked
from molflt.attention.mixing.forms import linear, quadratic
from molflt.attention.mixing.sums import Sums
from molflt.attention.mixing.toeplitz import dense_log_kernel, toeplitz

DIM, TOKENS = 16, 12


def layer(mixing: str, **options) -> Attention:
    torch.manual_seed(3)
    return Attention(DIM, HEADS, mixing=mixing, **options).double()


def tokens(batch: int = 2, count: int = TOKENS) -> torch.Tensor:
    return torch.randn(batch, count, DIM, dtype=torch.float64, generator=torch.manual_seed(0))


@pytest.mark.parametrize("later", [10.0, 1000.0])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("mixing", ["linear", "quadratic"])
def test_causal_attention_does_not_see_the_future(mixing, feature_map, later):
    """Large later tokens must not rescale earlier ones."""
    attention = layer(mixing, causal=True, feature_map=feature_map).float()
    x = tokens().float()
    grown = x.clone()
    grown[:, 8:] *= later
    torch.testing.assert_close(attention(grown)[:, :8], attention(x)[:, :8], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("scale", "gate"), [(1.0, True), (30.0, False), (800.0, False)])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_quadratic_is_linear_at_any_scale(feature_map, scale, gate):
    """Both causal forms bound features in the same way: outputs agree, gradients are finite."""
    found = []
    for mixing in ("linear", "quadratic"):
        attention = layer(mixing, causal=True, feature_map=feature_map, gate=gate)
        x = (scale * torch.nn.functional.normalize(tokens(), dim=-1)).requires_grad_()
        out = attention(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x)
        assert slope.isfinite().all()
        found.append((out, slope))
    # Signed features cancel, and what is left of a normalizer is that much less certain.
    rtol = 1e-4 if FEATURE_MAPS[feature_map].signed else 1e-9
    torch.testing.assert_close(found[1][0], found[0][0], rtol=rtol, atol=1e-8)
    if scale == 1.0 and not FEATURE_MAPS[feature_map].signed:
        torch.testing.assert_close(found[1][1], found[0][1], rtol=rtol, atol=1e-8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", ["exp", "learnable_exp", "trigonometric", "positive"])
@pytest.mark.parametrize("mixing", ["linear", "quadratic"])
def test_gradients_of_large_tokens_are_finite_in_float32(mixing, feature_map, causal):
    attention = layer(mixing, causal=causal, feature_map=feature_map).float()
    x = (800 * torch.nn.functional.normalize(tokens(count=40).float(), dim=-1)).requires_grad_()
    attention(x).square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


def total(sums: Sums) -> torch.Tensor:
    """sum_j A_ij itself."""
    return sums.normalizer * sums.log_scale.exp()


def half(sums: Sums) -> float:
    """A floor that replaces half of the normalizers."""
    return 1.01 * float(total(sums).detach().abs().median())


@pytest.mark.parametrize("feature_map", ["trigonometric", "positive", "relu", "identity"])
def test_floor_is_that_of_the_sum_in_every_form(feature_map, monkeypatch):
    """Forms, chunks, padding of any size and scaled features have their own scales."""
    x = tokens()
    exact = layer("linear", feature_map=feature_map).sums(x)
    floor = half(exact)
    divisor = torch.copysign(total(exact).abs().clamp(min=floor), total(exact))
    linear, matrix = (
        layer(mixing, feature_map=feature_map, floor=floor) for mixing in ("linear", "quadratic")
    )
    expected = linear._join(exact.numerator * exact.log_scale.exp() / divisor)
    padded = torch.cat((x, 5 * tokens(count=40)), dim=1)
    mask = (torch.arange(padded.shape[1]) < TOKENS).expand(2, -1)
    for attention in (linear, matrix):
        torch.testing.assert_close(attention(x), expected, **EXACT)
        out = attention(padded, key_mask=mask)[:, :TOKENS]
        torch.testing.assert_close(out, expected, **EXACT)
    monkeypatch.setattr(chunked, "_LONG", 0)
    monkeypatch.setattr(chunked, "_LEAST", 5)
    monkeypatch.setattr(chunked, "_AT_ONCE", 1)
    torch.testing.assert_close(linear(x), expected, **EXACT)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("feature_map", ["trigonometric", "identity", "learnable_exp"])
def test_floor_of_causal_forms_is_one_floor(feature_map, gate):
    options = {"feature_map": feature_map, "causal": True, "gate": gate}
    x = tokens()
    free = layer("linear", **options)
    options["floor"] = half(free.sums(x))
    attention, matrix = layer("linear", **options), layer("quadratic", **options)
    out = attention(x)
    assert (out - free(x)).abs().max() > 1e-3
    torch.testing.assert_close(matrix(x), out, **EXACT)
    pieces, state = [], None
    for token in x.split(5, dim=1):
        piece, state = attention.decode(token, state=state)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim=1), out, **EXACT)
    grown = torch.cat((x[:, :8], 100 * x[:, 8:]), dim=1)
    for mixed in (attention(grown), matrix(grown)):
        torch.testing.assert_close(mixed[:, :8], out[:, :8], **EXACT)


@pytest.mark.parametrize("padding", [3, 200])
@pytest.mark.parametrize("method", ["fft", "blocks"])
def test_floor_of_toeplitz_products_is_that_of_the_matrix(method, padding):
    """Offsets to padding, where the kernel may be largest, do not matter."""
    draw = torch.manual_seed(1)
    count = TOKENS + padding
    phi_q, phi_k, value = torch.randn(3, 1, HEADS, count, 6, dtype=torch.float64, generator=draw)
    log_kernel = 3 * torch.randn(HEADS, 2 * count - 1, dtype=torch.float64, generator=draw)
    log_kernel[:, [0, -1]] = 19.0
    near = log_kernel[:, padding : len(log_kernel[0]) - padding]
    short = (x[:, :, :TOKENS] for x in (phi_q, phi_k))
    kernel = dense_log_kernel(near, TOKENS, TOKENS)
    sums = quadratic(*map(Features, short), value[:, :, :TOKENS], log_kernel=kernel)
    key = Features(phi_k).masked(torch.arange(count) < TOKENS)
    out = toeplitz(Features(phi_q), key, value, log_kernel, method=method).ratio(half(sums))
    expected = sums.ratio(half(sums))
    torch.testing.assert_close(out[:, :, :TOKENS], expected, rtol=0.0, atol=1e-7)


def test_floor_gradient_is_that_of_the_normalizer():
    """Includes the decay of a gate, which is part of the scale."""
    draw = torch.manual_seed(0)
    inputs = list(torch.randn(5, 1, 1, 6, 4, dtype=torch.float64, generator=draw))

    def sums(q, k, v, log_q, log_k):
        return linear(Features(q, log_q), Features(k, log_k), v)

    floor = half(sums(*inputs))
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: sums(*x).ratio(floor), inputs)
    attention = layer("linear", causal=True, gate=True, feature_map="identity")
    x = tokens(1, 5)
    attention.floor = half(attention.sums(x))
    assert torch.autograd.gradcheck(attention, (x.requires_grad_(),))


@pytest.mark.parametrize("position", ["toeplitz", "bucketed"])
def test_long_causal_toeplitz_attention_takes_no_transforms(position):
    """Their rounding is relative to the largest key of all, the later ones included."""
    options = {"max_tokens": 64} if position == "toeplitz" else {}
    stack = Stack(
        DIM, HEADS, 1, position=position, position_options=options, causal=True,
        feature_map="exp", num_features=8,
    )  # fmt: skip
    x, r = torch.randn(1, 64, DIM), torch.arange(64.0)[None, :, None]
    grown = torch.cat((x[:, :40], 200 * x[:, 40:]), dim=1)
    mixed = [
        stack.blocks[0].attention(y, encoding=stack.position("linear", r, r)) for y in (x, grown)
    ]
    torch.testing.assert_close(mixed[1][:, :40], mixed[0][:, :40], rtol=0.0, atol=0.0)
