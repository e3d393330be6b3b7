"""The layer against that of torch, its automatic choices, and the position that it owns."""

import copy

import contract
import pytest
import torch
from safetensors.torch import load, save

from molflt.attention import Attention, Block, Stack, make_position
from molflt.attention.layer import Scaling
from molflt.attention.mixing.forms import cheaper


@pytest.mark.parametrize(("tokens", "form"), [(3, "quadratic"), (200, "linear")])
@pytest.mark.parametrize("columns", [None, 4])
def test_auto_takes_the_form_with_fewer_multiplications(tokens, form, columns):
    assert cheaper(tokens, tokens, 6, 4, columns) == form


def test_softmax_is_attention_of_torch():
    torch.manual_seed(0)
    ours = Attention(12, 3, mixing="softmax").double()
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    parts = ours.to_query, ours.to_key, ours.to_value
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.to_out.state_dict())
    x = 3 * torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    expected, weights = theirs(x, x, x, key_padding_mask=~mask, average_attn_weights=False)
    torch.testing.assert_close(ours(x, key_mask=mask), expected, **contract.EXACT)
    torch.testing.assert_close(ours.weights(x, key_mask=mask), weights, **contract.EXACT)


def test_normalized_logits_are_temperature_times_cosine():
    scaling = Scaling(2, 8, normalize=True, learn_temperature=True).double()
    torch.nn.init.normal_(scaling.log_temperature)
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    expected = scaling.log_temperature.exp()[:, None, None] * cosine
    torch.testing.assert_close(scaling(q) @ scaling(k).mT, expected, **contract.EXACT)


def test_norms_are_taken_in_single_precision_under_autocast():
    """Squares of 300 overflow in float16, and those of 1e-4 vanish."""
    scaling = Scaling(1, 8, normalize=True)
    for size in (1e-4, 300.0):
        x = (size * torch.randn(1, 1, 5, 8, generator=torch.manual_seed(0))).half()
        with torch.autocast("cpu", dtype=torch.float16):
            found = scaling(x)
        assert torch.equal(found, scaling(x))


DIM, HEADS = 16, 2


def position(name: str = "spectral", **options):
    small = {"low_rank": {"max_tokens": 9, "rank": 3}, "toeplitz": {"max_tokens": 9}}
    return make_position(name, HEADS, DIM // HEADS, **small.get(name, {}), **options)


def layer(own=None, **options) -> Attention:
    return Attention(DIM, HEADS, position=own, **options)


def tokens(axes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 5, DIM), torch.arange(5.0)[None, :, None].expand(1, 5, axes)


POSITIONED = ["spectral", "multiplicative", "low_rank", "toeplitz", "rotary", "sine_spe"]


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("name", ["spectral", "multiplicative", "rotary"])
def test_integers_are_positions(name, dtype, mixing):
    own = position(name)
    made = layer(own, mixing=mixing)
    x, r = tokens(own.dim)
    torch.testing.assert_close(made(x, r.to(dtype)), made(x, r), rtol=0, atol=1e-5)
    if dtype is torch.int64:  # phases that float32 does not resolve
        r = 2**26 + 1 + r.long()
        expected = made.double()(x.double(), r.double())
        torch.testing.assert_close(made(x.double(), r), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", POSITIONED)
def test_a_position_reaches_every_layer(name):
    """Outputs of layers and stacks depend on positions."""
    x, r = tokens(position(name).dim)
    order = torch.tensor([0, 3, 1, 4, 2])
    options = {"mixing": "softmax"} if name == "toeplitz" else {}  # else in order on a grid
    built = position(name)
    for model in (layer(built, **options), Stack(DIM, HEADS, 1, position=built, **options)):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter) if parameter.ndim == 2 else None
        assert (model(x, r) - model(x, r[:, order])).abs().max() > 1e-6


def test_a_stack_registers_a_shared_position_once():
    own = position()
    stack = Stack.of([Block(layer(own), 24) for _ in "ab"], own)
    names = [name for name, _ in stack.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in stack.named_buffers(remove_duplicate=False)]
    assert {n for n in names if "position." in n} == {f"position.{n}" for n in own.state_dict()}
    assert sorted(names) == sorted(stack.state_dict())
    twin = copy.deepcopy(stack)
    for each in (stack, twin):
        assert all(block.attention.position is each.position for block in each.blocks)
    x, r = tokens()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    assert (twin(x, r) - stack(x, r)).abs().max() > 1e-3
    stack.load_state_dict(load(save(twin.state_dict())))
    assert torch.equal(twin(x, r), stack(x, r))
    stack.double()(x.double(), r.double()).sum().backward()
    assert all(p.grad is not None for p in own.parameters())


def test_softmax_freezes_radii_of_boxes_with_a_warning():
    """The mask of a box is not differentiable with respect to its radius; other masks are."""

    def build(own, mixing):
        return Stack(DIM, HEADS, 2, position=own, mixing=mixing)

    box = {"spectrum": "local", "dim": 1}
    own = position(sampled=False, **box)
    with pytest.warns(UserWarning, match="log_radius") as caught:
        net = build(own, mixing="softmax")
    assert len(caught) == 1
    x, r = tokens(1)
    net(x, r).square().sum().backward()
    assert not own.spectrum.log_radius.requires_grad
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
    for other, mixing in ((box, "linear"), (box | {"spectrum": "smooth_local"}, "softmax")):
        own = position(sampled=mixing != "softmax", **other)
        net = build(own, mixing=mixing)
        (slope,) = torch.autograd.grad(net(x, r).square().sum(), own.spectrum.log_radius)
        assert slope.abs().max() > 0
