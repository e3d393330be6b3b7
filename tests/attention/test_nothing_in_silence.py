"""Given options have an effect; a position belongs to one module and learns."""

import copy

import pytest
import torch
from safetensors.torch import load, save

from molflt.attention import Attention, Block, Stack, make_position

DIM, HEADS = 16, 2


def position(name: str = "spectral", **options):
    small = {"low_rank": {"max_tokens": 9, "rank": 3}, "toeplitz": {"max_tokens": 9}}
    return make_position(name, HEADS, DIM // HEADS, **small.get(name, {}), **options)


def layer(own=None, **options) -> Attention:
    return Attention(DIM, HEADS, position=own, **options)


def stack_of(shared, *layers: Attention) -> Stack:
    return Stack.of([Block(each, 24) for each in layers], shared)


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


@pytest.mark.parametrize("name", POSITIONED)
def test_a_position_reaches_every_layer(name):
    """Outputs of layers and stacks depend on positions."""
    x, r = tokens(position(name).dim)
    order = torch.tensor([0, 3, 1, 4, 2])
    options = {"mixing": "softmax"} if name == "toeplitz" else {}  # else in order on a grid
    built = position(name)
    models = [layer(built, **options), stack_of(built, layer(built, **options))]
    models.append(Stack(DIM, HEADS, 1, position=position(name), **options))
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter) if parameter.ndim == 2 else None
        assert (model(x, r) - model(x, r[:, order])).abs().max() > 1e-6


def test_single_layers_register_their_position():
    own = position()
    attention = layer(own)
    names = {f"position.{name}" for name, _ in own.named_parameters()}
    assert names and names <= dict(attention.named_parameters()).keys()
    assert {f"position.{name}" for name in own.state_dict()} <= attention.state_dict().keys()
    attention(*tokens()).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in own.parameters())


@pytest.mark.parametrize("made_by_hand", [False, True])
def test_a_stack_registers_a_shared_position_once(made_by_hand):
    own = position()
    if made_by_hand:
        stack = stack_of(own, layer(own), layer(own))
    else:
        stack = Stack(DIM, HEADS, 2, position=own)
    names = [name for name, _ in stack.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in stack.named_buffers(remove_duplicate=False)]
    assert sorted(n for n in names if "position." in n) == sorted(
        f"position.{name}" for name in own.state_dict()
    )
    assert set(names) == stack.state_dict().keys()
    twin = copy.deepcopy(stack)
    for each in (stack, twin):
        assert all(block.attention.position is each.position for block in each.blocks)
    assert twin.position is not own
    x, r = tokens()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    assert (twin(x, r) - stack(x, r)).abs().max() > 1e-3
    stack.load_state_dict(load(save(twin.state_dict())))
    assert torch.equal(twin(x, r), stack(x, r))
    stack.double()(x.double(), r.double()).sum().backward()
    assert all(p.grad is not None for p in own.parameters())


@pytest.mark.parametrize("mixing", ["linear", "quadratic", "auto", "softmax"])
def test_no_sequence_at_all(mixing):
    assert layer(mixing=mixing)(torch.zeros(0, 5, DIM)).shape == (0, 5, DIM)


@pytest.mark.parametrize("name", ["spectral", "multiplicative", "rotary", "sine_spe"])
def test_softmax_decodes_with_the_places_of_all_tokens_or_not_at_all(name):
    """Otherwise one position would be broadcast to all keys."""
    own = position(name, mixing="softmax")
    block = Block(layer(own, mixing="softmax", causal=True), 24).double()
    x, r = (part.double() for part in tokens(own.dim))
    for part in (block, block.attention):
        expected, found, state = part(x, r), [], None
        for i in range(5):
            places = {"key_positions": r[:, : i + 1]}
            out, state = part.decode(x[:, i : i + 1], r[:, i : i + 1], state, **places)
            found.append(out)
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-10)
        for missing in (None, r[:, :1], r[:, :5]):
            with pytest.raises(ValueError, match="key_positions"):
                part.decode(x[:, :1], r[:, :1], state, key_positions=missing)
        for length in (1, 4):
            encoding = own("softmax", r[:, :1], r[:, :length])
            with pytest.raises(ValueError, match="encoding"):
                part.decode(x[:, :1], None, state, encoding=encoding)


@pytest.mark.parametrize("layers", [1, 2])
def test_softmax_freezes_radii_of_boxes_with_a_warning(layers):
    """The mask of a box is not differentiable with respect to its radius; other masks are."""

    def build(own, mixing):
        return Stack(DIM, HEADS, layers, position=own, mixing=mixing)

    box = {"spectrum": "local", "dim": 1}
    own = position(sampled=False, **box)
    with pytest.warns(UserWarning, match="log_radius") as caught:
        net = build(own, mixing="softmax")
    assert len(caught) == 1
    x, r = tokens(1)
    net(x, r).square().sum().backward()
    learned = {name for name, p in net.named_parameters() if p.requires_grad}
    assert not any("log_radius" in name for name in learned)
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
    for other, mixing in ((box, "linear"), (box | {"spectrum": "smooth_local"}, "softmax")):
        own = position(sampled=mixing != "softmax", **other)
        net = build(own, mixing=mixing)
        (slope,) = torch.autograd.grad(net(x, r).square().sum(), own.spectrum.log_radius)
        assert slope.abs().max() > 0


@pytest.mark.parametrize("name", ["spectral", "multiplicative", "toeplitz", "cosine", "low_rank"])
def test_a_normalizer_without_positions_has_an_effect(name):
    torch.manual_seed(0)
    own = position(name, **({"spectrum": "gaussian", "dim": 1} if name == "spectral" else {}))
    net, (x, r) = layer(own, normalize="unmasked").double(), tokens(own.dim)
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter)
    found = net(x.double(), r.double())
    net.normalize = "masked"
    assert (found - net(x.double(), r.double())).abs().max() > 1e-6
