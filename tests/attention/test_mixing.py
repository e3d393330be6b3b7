import contract
import pytest
import torch
from contract import EXACT, HEADS, Combination

from molflt.attention import FEATURE_MAPS, Attention, CrossAttention, Features, make_position
from molflt.attention.mixing import causal, forms
from molflt.attention.mixing.causal import causal_linear
from molflt.attention.mixing.forms import linear, quadratic
from molflt.attention.mixing.sums import Sums

DIM, TOKENS = 16, 12


@pytest.mark.parametrize(
    ("feature_map", "chunk"),
    [(name, 3) for name in FEATURE_MAPS]
    + [(name, chunk) for name in ("positive", "trigonometric", "elu") for chunk in (1, 4, 64)],
)
def test_causal_equals_its_quadratic_form_for_every_chunk(feature_map, chunk, monkeypatch):
    """Includes decay, masked keys and a prompt; signed sums cancel, so sums are not divided."""
    monkeypatch.setattr(causal, "_CHUNK", chunk)
    phi = FEATURE_MAPS[feature_map](8, 2).double()
    q, k, v = (0.7 * torch.randn(2, 2, 11, 8, dtype=torch.float64) for _ in "qkv")
    decay = -torch.rand(2, 2, 11, dtype=torch.float64)
    mask = torch.rand(2, 1, 11) > 0.2
    mask[0, 0, :2] = False  # no key is visible at first
    for t in (q, k, v, decay):
        t.requires_grad_()
    query, key = phi(q), phi(k).masked(mask)

    def decoded(*cuts):
        """Returns the sums of consecutive calls for the tokens of each pair (start, stop)."""
        state, outs = None, []
        for start, stop in cuts:
            part = slice(start, stop)
            phi_q, phi_k = (
                Features(*(None if x is None else x[:, :, part] for x in features))
                for features in (query, key)
            )
            decays = decay[:, :, part]
            sums, state = causal_linear(phi_q, phi_k, v[:, :, part], decays, state)
            outs.append(sums.extensive())
        return torch.cat(outs, dim=2)

    exact = quadratic(query, key, v, causal=True, log_decay=decay).extensive()
    whole = causal_linear(query, key, v, decay)[0].extensive()
    scale = exact.abs().max().detach()
    single = decoded(*((i, i + 1) for i in range(11)))
    for fast in (whole, single, decoded((0, 4), (4, 5), (5, 5), (5, 11))):
        torch.testing.assert_close(fast / scale, exact / scale, **contract.EXACT)
        grads = [
            torch.autograd.grad((o / scale).sum(), (q, k, v, decay), retain_graph=True)
            for o in (fast, exact)
        ]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("factor", [-3.0, 30.0])
@pytest.mark.parametrize("std", [0.3, 3.0])
def test_a_later_key_cannot_reach_back_in_float32(std, factor):
    """With a maximum over all keys, later keys would cause underflow without a gradient."""
    phi = FEATURE_MAPS["positive"](16, 2, 32)
    q, k = (std * torch.randn(1, 2, 300, 16) for _ in "qk")
    v = torch.randn(1, 2, 300, 8)
    before = causal_linear(phi(q), phi(k), v)[0]
    k[:, :, 200:] *= factor
    after = causal_linear(phi(q), phi(k), v)[0]
    assert torch.equal(after.ratio()[:, :, :200], before.ratio()[:, :, :200])
    assert (after.normalizer > 0).all() and torch.isfinite(after.ratio()).all()
    exact = [Features(None, phi(x).log_scale.double()) for x in (q, k)]
    expected = quadratic(*exact, v.double(), causal=True).ratio()
    torch.testing.assert_close(after.ratio().double(), expected, rtol=0, atol=1e-4)


def test_gate_is_the_recurrence_of_rfa():
    """S_t is g_t S_(t-1) + (1 - g_t) phi(k_t) v_t (RFA, arXiv:2103.02143, section 3.2)."""
    attention = Attention(16, 2, causal=True, gate=True, feature_map="rfa_arccos").double()
    with torch.no_grad():
        attention.to_gate.weight.normal_()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    query, key, value = attention._split(x)[:3]
    phi_q, phi_k = (attention.feature_map(t).materialize() for t in (query, key))
    g = torch.sigmoid(attention.to_gate(x)).transpose(1, 2)[..., None]
    value = torch.cat((value, torch.ones_like(value[..., :1])), dim=-1)
    state, outs = torch.zeros(2, 2, 64, 9, dtype=torch.float64), []
    for t in range(9):
        gt = g[:, :, t, :, None]
        state = gt * state + (1 - gt) * phi_k[:, :, t, :, None] * value[:, :, t, None]
        out = phi_q[:, :, t, None] @ state
        outs.append(out[..., :-1] / out[..., -1:])
    expected = attention.to_out(torch.cat(outs, dim=2).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, **contract.EXACT)


def test_decoding_keeps_a_state_for_each_normalizer():
    combination = Combination("positive", "gaussian_mixture", "linear", True)
    contract.check_decoding(combination, normalize="unmasked")


@pytest.mark.parametrize("mixing", ["linear", "quadratic"])
@pytest.mark.parametrize("feature_map", ["positive", "elu", "polynomial"])
def test_gate_passes_over_masked_keys(feature_map, mixing):
    options = {"mixing": mixing, "feature_map": feature_map, "normalize": "none"}
    attention = Attention(8, 2, causal=True, gate=True, **options).double()
    x = torch.randn(1, 140, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 140, dtype=torch.bool)
    mask[0, [0, 3, 4, 70, 128, 139]] = False
    held = torch.where(mask[..., None], x, torch.tensor([5.0, torch.nan] * 4))
    outs = attention(held, key_mask=mask)[mask], attention(x[mask][None])[0]
    torch.testing.assert_close(*outs, **contract.EXACT)
    wanted = [x, *attention.parameters()]
    grads = [torch.autograd.grad(out.square().sum(), wanted) for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalize", ["masked", "unmasked", "none"])
@pytest.mark.parametrize("causally", [False, True])
@pytest.mark.parametrize("case", ["gaussian_mixture", "toeplitz", "cosine"])
def test_normalize_divides_by_its_normalizer(case, causally, normalize):
    options = {"causal": causally, "position": contract.CASES[case].build(), "feature_map": "exp"}
    attention = Attention(16, 2, normalize=normalize, **options).double()
    other = Attention(16, 2, mixing="quadratic", normalize=normalize, **options).double()
    other.load_state_dict(attention.state_dict())
    x, r = (part[None] for part in contract.ragged(case)[2])
    encoding = attention.position("linear", r, r)
    query, key, value = attention._split(x)[:3]

    def matrix(with_position):
        left, right = query, key
        if with_position and case == "gaussian_mixture":
            before, behind = encoding.columns
            left, right = torch.cat((before, query), -1), torch.cat((behind, key), -1)
        pads = (attention.feature_map.dim - left.shape[-1], 0)
        left, right = (torch.nn.functional.pad(t, pads) for t in (left, right))
        phi_q, phi_k = (attention.feature_map(t).materialize() for t in (left, right))
        out = phi_q @ phi_k.mT
        if with_position and case != "gaussian_mixture":
            out = out * encoding.dense(x.shape[1], x.shape[1])
        return out.tril() if causally else out

    weights = matrix(True)
    if normalize != "none":
        weights = weights / matrix(normalize == "masked").sum(-1, keepdim=True)
    expected = attention.to_out((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, r), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(other(x, r), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("options", [{}, {"mixing": "quadratic"}, {"causal": True}], ids=str)
def test_sums_with_key_dropout_are_those_of_all_keys_on_average(options, context):
    attention = Attention(8, 2, dropout=0.5, normalize="none", **options).double()
    attention.to_out = torch.nn.Identity()
    x, other = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    where = {"context": other} if context and not options else {}
    many = {name: value.expand(1000, -1, -1) for name, value in where.items()}
    drawn, expected = attention(x.expand(1000, -1, -1), **many), attention.eval()(x, **where)[0]
    assert drawn.std(dim=0).max() > 0.1 * expected.norm()
    assert (drawn.mean(0) - expected).norm() < 0.1 * expected.norm()


def layer(mixing: str, **options) -> Attention:
    torch.manual_seed(3)
    return Attention(DIM, HEADS, mixing=mixing, **options).double()


def tokens(batch: int = 2, count: int = TOKENS) -> torch.Tensor:
    return torch.randn(batch, count, DIM, dtype=torch.float64, generator=torch.manual_seed(0))


@pytest.mark.parametrize(("scale", "gate"), [(1.0, True), (30.0, False), (800.0, False)])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_quadratic_is_linear_at_any_scale(feature_map, scale, gate):
    """Both causal forms bound features in the same way; outputs agree and gradients are finite."""
    found = []
    for mixing in ("linear", "quadratic"):
        attention = layer(mixing, causal=True, feature_map=feature_map, gate=gate)
        x = (scale * torch.nn.functional.normalize(tokens(), dim=-1)).requires_grad_()
        out = attention(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x)
        assert slope.isfinite().all()
        found.append((out, slope))
    # signed features cancel, which makes normalizers less accurate
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
    """Returns sum_j A_ij."""
    return sums.normalizer * sums.log_scale.exp()


def half(sums: Sums) -> float:
    """Returns a floor that replaces half of the normalizers."""
    return 1.01 * float(total(sums).detach().abs().median())


@pytest.mark.parametrize("feature_map", ["trigonometric", "positive", "relu", "identity"])
def test_floor_is_that_of_the_sum_in_every_form(feature_map, monkeypatch):
    """The floor does not depend on the form, the chunks, padding or the scale of features."""
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
    cross = CrossAttention(DIM, HEADS, feature_map=feature_map, floor=floor).double()
    cross.load_state_dict(linear.state_dict())
    torch.testing.assert_close(cross.recall(x, cross.remember(x)), expected, **EXACT)
    monkeypatch.setattr(forms, "_LONG", 0)
    monkeypatch.setattr(forms, "_LEAST", 5)
    monkeypatch.setattr(forms, "_AT_ONCE", 1)
    torch.testing.assert_close(linear(x), expected, **EXACT)


def test_sums_over_no_keys_are_zero():
    cross, x = CrossAttention(DIM, HEADS).double(), tokens()
    found = cross.recall(x, cross.remember(x[:, :0]))
    torch.testing.assert_close(found, cross.to_out.bias.expand_as(x), **EXACT)
    assert layer("linear", causal=True)(x[:, :0]).shape == (2, 0, DIM)


@pytest.mark.parametrize("method", ["fft", "blocks"])
def test_a_batch_without_sequences_has_no_sums(method):
    position = make_position("toeplitz", HEADS, 8, max_tokens=4, method=method)
    found = layer("linear", position=position)(tokens()[:0, :4], torch.zeros(0, 4, 1))
    assert found.shape == (0, 4, DIM)


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


def test_long_causal_toeplitz_attention_takes_no_transforms():
    """Rounding errors of transforms are relative to the largest key, including later keys."""
    own = make_position("toeplitz", HEADS, DIM // HEADS, max_tokens=64)
    attention = Attention(DIM, HEADS, position=own, causal=True, feature_map="exp", num_features=8)
    x, r = torch.randn(1, 64, DIM), torch.arange(64.0)[None, :, None]
    grown = torch.cat((x[:, :40], 200 * x[:, 40:]), dim=1)
    ours, theirs = attention(grown, r)[:, :40], attention(x, r)[:, :40]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
