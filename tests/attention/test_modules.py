"""Modules in other precisions, under transforms, on the meta device and with padding."""

import pytest
import torch
from contract import DIM, EXACT, HEADS
from torch.func import functional_call, grad, vmap

from molflt.attention import MIXINGS, POSITIONS, Attention, Position, Stack
from molflt.attention.nodes import NODES
from molflt.attention.nodes.shells import _directions

TOKENS = 6
NEEDED = {"low_rank": {"max_tokens": TOKENS, "rank": 3}, "toeplitz": {"max_tokens": TOKENS}}
NEEDED["gaussian_bias"] = {"dim": 1}
NEEDED["conv_spe"] = {"num_realizations": 8, "kernel_size": 4, "max_tokens": TOKENS}


def make(position: str, mixing: str, causal: bool = False, **options) -> Stack:
    torch.manual_seed(0)
    options = {**NEEDED.get(position, {}), **options}
    return Stack(
        DIM, HEADS, 1, ffn_dim=16, position=position, position_options=options, mixing=mixing,
        causal=causal,
    )  # fmt: skip


def claims(position: str, mixing: str) -> bool:
    own = make(position, "softmax" if position == "gaussian_bias" else "linear").position
    assert isinstance(own, Position)
    return mixing in own.mixings


PAIRS = [(p, m) for p in POSITIONS for m in MIXINGS if claims(p, m)]


def places(stack: Stack) -> torch.Tensor:
    return torch.arange(float(TOKENS))[None, :, None].expand(1, -1, stack.position.dim)


def tokens(count: int = 1) -> torch.Tensor:
    return torch.randn(count, TOKENS, DIM, generator=torch.manual_seed(1))


@pytest.mark.parametrize(
    ("position", "mixing", "dtype"),
    [
        *((*pair, torch.bfloat16) for pair in PAIRS),
        *(("spectral", mixing, torch.float16) for mixing in MIXINGS),
    ],
)
def test_modules_in_half_precision(position, mixing, dtype):
    """Positions keep their precision; only tokens are rounded."""
    stack = make(position, mixing)
    x, r = tokens(), places(stack)
    exact = stack(x, r)
    out = stack.to(dtype)(x.to(dtype), r)
    assert out.dtype == dtype
    assert (out - exact).abs().max() < (0.15 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize(("position", "mixing"), PAIRS)
def test_tokens_decide_the_precision(position, mixing):
    """Positions in another precision are cast, such as float64 positions of ASE."""
    for dtype, other in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        stack = make(position, mixing).to(dtype)
        out = stack(tokens().to(dtype), places(stack).to(other))
        torch.testing.assert_close(out, stack(tokens().to(dtype), places(stack).to(dtype)))


@pytest.mark.parametrize(("position", "mixing"), PAIRS)
def test_gradients_of_single_samples(position, mixing):
    """`torch.func` gives what autograd gives."""
    stack = make(position, mixing, causal=mixing != "quadratic").double()
    x, r = tokens(3).double(), places(stack)
    own = {name: value.detach() for name, value in stack.named_parameters()}

    def loss(parameters, one):
        return functional_call(stack, parameters, (one[None], r)).square().sum()

    single = vmap(grad(loss), in_dims=(None, 0))(own, x)
    loss(dict(stack.named_parameters()), x[1]).backward()
    for name, value in stack.named_parameters():
        expected = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(single[name][1], expected, **EXACT)


NODE_RULES = [(rule, "gaussian") for rule in NODES] + [("shells", "shell_weights")]


def sampled_by(rule: str, spectrum: str, dim: int = 3) -> Stack:
    sizes = {"node_diameter": 4.0, "node_max_frequency": 0.5} if rule == "shells" else {}
    return make("spectral", "linear", dim=dim, spectrum=spectrum, nodes=rule, **sizes)


MODULES = {
    **{f"{p} {m}": (lambda p=p, m=m: make(p, m)) for p, m in PAIRS},
    **{f"{r} {s}": (lambda r=r, s=s: sampled_by(r, s)) for r, s in NODE_RULES},
    "shells on a line": lambda: sampled_by("shells", "gaussian", 1),
    "shells in a plane": lambda: sampled_by("shells", "gaussian", 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_made_without_memory(name):
    """A module on the meta device needs only a state dict."""
    make_one = MODULES[name]
    _directions.cache_clear()  # cached tensors must not be on the meta device
    with torch.device("meta"):
        empty = make_one().eval()
    module = make_one().eval()
    inputs = tokens(), places(module)
    expected = module(*inputs)
    empty = empty.to_empty(device="cpu")
    with torch.no_grad():
        for value in (*empty.parameters(), *empty.buffers()):
            value.fill_(7)  # arbitrary memory
    empty.load_state_dict(module.state_dict())
    torch.testing.assert_close(empty(*inputs), expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("position", "mixing", "garbage"),
    [*((*pair, torch.nan) for pair in PAIRS), ("spectral", "linear", torch.inf)],
)
def test_masked_tokens_may_hold_anything(position, mixing, garbage):
    """Outputs and gradients do not depend on masked tokens or their positions."""
    stack = make(position, mixing)
    x, r = tokens(2), places(stack).repeat(2, 1, 1)
    mask = torch.arange(TOKENS) < torch.tensor([[4], [6]])
    found = []
    for filling in (0.0, garbage):
        y = x.masked_fill(~mask[..., None], filling).requires_grad_()
        where = r if stack.position.grid else r.masked_fill(~mask[..., None], filling)
        stack.zero_grad()
        out = stack(y, where, key_mask=mask)[mask]
        out.square().sum().backward()
        slopes = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
        found.append([out, y.grad[mask], *slopes])
        assert (y.grad[~mask] == 0).all()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_masked_copies_and_contexts_may_hold_anything(mixing):
    """Keys by index, and keys of another sequence; valid tokens that are not finite are seen."""
    attention = Attention(DIM, HEADS, mixing=mixing)
    x, context = tokens(), tokens()[:, :4].clone()
    x[:, 4:] = torch.nan
    index = torch.tensor([[0, 1, 2, 3, 5, 0, 4]])
    mask = torch.tensor([[True, True, True, True, False, True, False]])
    clean = x.nan_to_num(0.0)
    found = [attention(y, key_index=index, key_mask=mask)[:, :4] for y in (x, clean)]
    torch.testing.assert_close(*found)
    context[:, 3:] = torch.inf
    kept = torch.tensor([[True, True, True, False]])
    found = attention(clean, context=context, key_mask=kept)
    torch.testing.assert_close(found, attention(clean, context=context[:, :3]))
    assert attention(x, key_mask=torch.ones(1, TOKENS, dtype=torch.bool)).isnan().all()


def test_masked_tokens_are_still_queries():
    x, mask = tokens(), torch.arange(TOKENS)[None] < 3
    attention = Attention(DIM, HEADS)
    expected = attention(x, context=x[:, :3])
    torch.testing.assert_close(attention(x, key_mask=mask), expected)


@pytest.mark.parametrize("feature_map", ["positive", "elu"])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_weights_of_keys_multiply(mixing, feature_map):
    """A key of weight 2 equals two copies; weights of masked keys do not matter."""
    options = {} if mixing == "softmax" else {"feature_map": feature_map}
    attention = Attention(DIM, HEADS, mixing=mixing, **options).double()
    x, mask = tokens().double(), torch.arange(TOKENS)[None] < 4
    weight = torch.tensor([[1.0, 1, 2, 1, 0, torch.nan]], requires_grad=True)
    index = torch.tensor([[0, 1, 2, 3, 2]])
    twice = attention(x, key_index=index)
    out = attention(x, key_weight=weight, key_mask=mask)
    torch.testing.assert_close(out, twice, **EXACT)
    (slope,) = torch.autograd.grad(out.square().sum(), weight)
    assert slope.isfinite().all() and slope[0, 2] != 0 and (slope[~mask] == 0).all()
    single = attention.float()(x.float(), key_weight=weight.double(), key_mask=mask)
    torch.testing.assert_close(single.double(), out, rtol=0, atol=1e-5)
