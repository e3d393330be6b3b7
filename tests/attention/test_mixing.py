"""Mixing against its oracles, and the limits of the normalizer."""

import contract
import pytest
import torch
from contract import Combination, plain

from molflt.attention import FEATURE_MAPS, Attention, Features
from molflt.attention.mixing.causal import causal_linear
from molflt.attention.mixing.forms import linear, quadratic, softmax


def qkv(*lengths: int, width: int = 4, seed: int = 0, grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.rand(2, 3, n, width, dtype=torch.float64, requires_grad=grad) for n in lengths]


@pytest.mark.parametrize("causally", [False, True])
def test_softmax_with_a_bias_equals_flex_attention(causally):
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 16, 16) for _ in "qkv")
    bias = torch.randn(2, 3, 16, 16)

    def score(score, b, h, i, j):
        biased = score + bias[b, h, i, j]
        return torch.where(i >= j, biased, -torch.inf) if causally else biased

    with torch.no_grad():
        theirs = flex(q, k, v, score_mod=score, scale=1.0)
    ours = softmax(q, k, v, bias, causal=causally)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("feature_map", "chunk"),
    [(name, 3) for name in FEATURE_MAPS]
    + [(name, chunk) for name in ("positive", "trigonometric", "elu") for chunk in (1, 4, 64)],
)
def test_causal_equals_its_quadratic_form_for_every_chunk(feature_map, chunk):
    """With decay, masked keys and a prompt; extensive sums, because signed ones cancel."""
    torch.manual_seed(0)
    phi = FEATURE_MAPS[feature_map](8, 2).double()
    q, k, v = (0.7 * torch.randn(2, 2, 11, 8, dtype=torch.float64) for _ in "qkv")
    decay = -torch.rand(2, 2, 11, dtype=torch.float64)
    mask = torch.rand(2, 1, 11) > 0.2
    mask[0, 0, :2] = False  # nothing to see at first
    for t in (q, k, v, decay):
        t.requires_grad_()
    query, key = phi(q), phi(k).masked(mask)

    def cut(features, *ends):
        return Features(*(None if t is None else t[:, :, slice(*ends)] for t in features))

    def pieces(*cuts):
        state, outs = None, []
        for ends in cuts:
            a = slice(*ends)
            sums, state = causal_linear(
                cut(query, *ends), cut(key, *ends), v[:, :, a], decay[:, :, a], state, chunk
            )
            outs.append(sums.extensive())
        return torch.cat(outs, dim=2)

    exact = quadratic(query, key, v, causal=True, log_decay=decay).extensive()
    whole = causal_linear(query, key, v, decay, chunk=chunk)[0].extensive()
    scale = exact.abs().max().detach()
    single = pieces(*((i, i + 1) for i in range(11)))
    for fast in (whole, single, pieces((0, 4), (4, 5), (5, 5), (5, 11))):
        torch.testing.assert_close(fast / scale, exact / scale, **contract.EXACT)
        grads = [
            torch.autograd.grad((o / scale).sum(), (q, k, v, decay), retain_graph=True)
            for o in (fast, exact)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_causal_equals_performer_pytorch():
    performer = pytest.importorskip("performer_pytorch.performer_pytorch")
    q, k, v = qkv(40, 40, 40)
    theirs = performer.causal_linear_attention_noncuda(q, k, v, chunk_size=8, eps=0.0)
    ours = causal_linear(plain(q), plain(k), v, chunk=16)[0].ratio()
    torch.testing.assert_close(ours, theirs, **contract.EXACT)


@pytest.mark.parametrize("factor", [-3.0, 3.0, 30.0, 0.0])
@pytest.mark.parametrize("std", [0.3, 1.0, 3.0])
def test_a_later_key_cannot_reach_back_in_float32(std, factor):
    """Not even by underflow, where a maximum over all keys would leak without a gradient."""
    torch.manual_seed(0)
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


def test_causal_never_holds_a_prefix_tensor():
    """A plain cumulative sum would save a (tokens, m, dv) tensor, 16 times the largest here."""
    n, m, dv = 2048, 64, 64
    largest = []

    def pack(tensor):
        largest.append(tensor.numel())
        return tensor

    q, k, v = (torch.rand(1, 1, n, width, requires_grad=True) for width in (m, m, dv))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        causal_linear(plain(q), plain(k), v)[0].ratio().sum()
    assert max(largest) <= 2 * n * 128
    assert sum(largest) < n * m * dv / 2


def test_gate_is_the_recurrence_of_rfa():
    """S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t, RFA (arXiv:2103.02143), section 3.2."""
    torch.manual_seed(0)
    attention = Attention(16, 2, causal=True, gate=True, feature_map="rfa_arccos").double()
    with torch.no_grad():
        attention.to_gate.weight.normal_()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    query, key, value = attention._split(x)[:3]
    phi_q, phi_k = (attention.feature_map(t).materialize() for t in (query, key))
    g = torch.sigmoid(attention.to_gate(x)).transpose(1, 2)[..., None]
    state = torch.zeros(2, 2, 64, 8, dtype=torch.float64)
    total = torch.zeros(2, 2, 64, 1, dtype=torch.float64)
    outs = []
    for t in range(9):
        gt = g[:, :, t, :, None]
        state = gt * state + (1 - gt) * phi_k[:, :, t, :, None] * value[:, :, t, None]
        total = gt * total + (1 - gt) * phi_k[:, :, t, :, None]
        outs.append((phi_q[:, :, t, None] @ state) / (phi_q[:, :, t, None] @ total))
    expected = attention.to_out(torch.cat(outs, dim=2).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, **contract.EXACT)


@pytest.mark.parametrize("feature_map", ["positive", "rfa_gaussian", "elu"])
def test_gate_keeps_the_contract(feature_map):
    combination = Combination(feature_map, "gaussian_mixture", "linear", True)
    contract.check_oracle(combination, gate=True)
    contract.check_decoding(combination, gate=True)


@pytest.mark.parametrize("mixing", ["linear", "quadratic"])
@pytest.mark.parametrize("feature_map", ["positive", "elu", "polynomial"])
def test_gate_passes_over_masked_keys(feature_map, mixing):
    """Outputs and gradients equal those of the sequence without these tokens."""
    torch.manual_seed(0)
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
    for given, expected in zip(*grads, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalize", ["masked", "unmasked", "none"])
@pytest.mark.parametrize("causally", [False, True])
@pytest.mark.parametrize("case", ["gaussian_mixture", "toeplitz", "cosine"])
def test_normalize_divides_by_its_normalizer(case, causally, normalize):
    torch.manual_seed(0)
    options = {"causal": causally, "position": contract.CASES[case].build(), "feature_map": "exp"}
    attention = Attention(16, 2, normalize=normalize, **options).double()
    other = Attention(16, 2, mixing="quadratic", normalize=normalize, **options).double()
    other.load_state_dict(attention.state_dict())
    x, r = contract.ragged(case)[2]
    x, r = x[None], r[None]
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


@pytest.mark.parametrize("std", [1.0, 3.0, 10.0, 100.0])
def test_normalizer_of_exponential_features_is_at_least_one(std):
    """The stabilizer leaves a term 1 x 1 in every normalizer, so float32 cannot underflow."""
    torch.manual_seed(0)
    q, k = (std * torch.randn(2, 4, 50, 16) for _ in "qk")
    mask = torch.rand(2, 1, 50) > 0.5
    v = torch.randn(2, 4, 50, 3)
    for name in ("positive", "exp", "learnable_exp"):
        phi = FEATURE_MAPS[name](16, 4, 32)
        sums = linear(phi(q), phi(k).masked(mask), v)
        assert torch.isfinite(sums.numerator).all()
        assert sums.normalizer.min() >= 1.0


@pytest.mark.parametrize(("spread", "resolved"), [(55.0, True), (500.0, False)])
def test_causal_queries_with_tiny_weights(spread, resolved):
    """Weights are e^-55 or less, and the square of such a normalizer underflows in float32."""
    torch.manual_seed(0)
    slope = torch.linspace(0, spread, 8)
    noise = torch.rand(2, 2, 2, 20, 8)
    v = torch.randn(2, 2, 20, 3)

    def run(dtype):
        q = (slope + noise[0]).to(dtype).requires_grad_()
        k = (noise[1] - slope).to(dtype).requires_grad_()
        out = causal_linear(Features(None, q), Features(None, k), v.to(dtype), chunk=8)[0].ratio()
        return out, *torch.autograd.grad(out.square().sum(), (q, k))

    single, double = run(torch.float32), run(torch.float64)
    torch.testing.assert_close(single[0][:, :, 0], v[:, :, 0])  # the first token sees only itself
    for found, exact in zip(single, double, strict=True):
        assert torch.isfinite(found).all()
        if resolved:
            torch.testing.assert_close(found, exact.float(), rtol=0, atol=1e-4)


def test_key_dropout_only_in_training():
    torch.manual_seed(0)
    attention = Attention(16, 2, dropout=0.5).double()
    x = torch.randn(1, 10, 16, dtype=torch.float64)
    attention.eval()
    torch.testing.assert_close(attention(x), attention(x), rtol=0, atol=0)
    attention.train()
    assert (attention(x) - attention(x)).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("options", "context"),
    [
        ({"mixing": "linear"}, False),
        ({"mixing": "quadratic"}, False),
        ({"mixing": "linear"}, True),
        ({"causal": True}, False),
        ({"causal": True, "gate": True}, False),
    ],
    ids=str,
)
def test_sums_with_key_dropout_are_those_of_all_keys_on_average(options, context):
    torch.manual_seed(0)
    attention = Attention(8, 2, dropout=0.5, normalize="none", **options).double()
    attention.to_out = torch.nn.Identity()
    x, other = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    where = {"context": other.expand(1000, -1, -1)} if context else {}
    drawn = attention.train()(x.expand(1000, -1, -1), **where).mean(0)
    expected = attention.eval()(x, **({"context": other} if context else {}))[0]
    assert (drawn - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causally", [False, True])
def test_half_precision_at_a_standard_deviation_of_three(dtype, causally):
    """Outputs are finite; the error is the rounding of q, k and v."""
    torch.manual_seed(0)
    phi = FEATURE_MAPS["positive"](64, 2, 64)
    exact_phi = FEATURE_MAPS["positive"](64, 2, 64).double()
    exact_phi.load_state_dict(phi.state_dict())
    scale = 64**-0.25
    q, k, v = (torch.randn(1, 2, 256, 64) for _ in "qkv")
    q, k = 3 * scale * q, 3 * scale * k
    mix = (lambda *a: causal_linear(*a)[0]) if causally else linear
    expected = mix(exact_phi(q.double()), exact_phi(k.double()), v.double()).ratio()
    with torch.autocast("cpu", dtype=dtype):
        half = [t.to(dtype) for t in (q, k, v)]
        phi_q, phi_k = (phi(t.float()) for t in half[:2])
        got = mix(phi_q, phi_k, half[2]).ratio()
    assert torch.isfinite(got).all()
    error = (got.double() - expected).norm() / expected.norm()
    bound = {torch.float16: 0.05, torch.bfloat16: 0.4}[dtype]
    assert error < bound, error
