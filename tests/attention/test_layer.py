import copy
from typing import get_args, get_type_hints

import contract
import pytest
import torch
from contract import DIM, EXACT, HEADS, Combination
from refusals.attention import layer, position
from safetensors.torch import load, save

from molflt.attention import (
    MIXINGS,
    TOKEN_MIXERS,
    Attention,
    Block,
    Stack,
    convert_weights_,
    make_position,
)
from molflt.attention.layer import Scaling


def test_normalized_logits_are_temperature_times_cosine():
    scaling = Scaling(2, 8, normalize=True, learn_temperature=True).double()
    torch.nn.init.normal_(scaling.log_temperature)
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    expected = scaling.log_temperature.exp()[:, None, None] * cosine
    torch.testing.assert_close(scaling(q) @ scaling(k).mT, expected, **EXACT)


def test_norms_are_taken_in_single_precision_under_autocast():
    """In float16, 300² overflows and 1e-4² becomes 0."""
    scaling = Scaling(1, 8, normalize=True)
    for size in (1e-4, 300.0):
        x = (size * torch.randn(1, 1, 5, 8, generator=torch.manual_seed(0))).half()
        with torch.autocast("cpu", dtype=torch.float16):
            found = scaling(x)
        assert torch.equal(found, scaling(x))


def tokens(axes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 5, DIM), torch.arange(5.0)[None, :, None].expand(1, 5, axes)


def test_softmax_attention_computes_shapes_on_the_meta_device():
    x = torch.empty(2, 5, DIM, device="meta")
    assert Attention(DIM, 2, mixing="softmax").to("meta")(x).shape == x.shape


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("name", ["spectral", "multiplicative", "rotary"])
def test_positions_may_be_integers_or_in_half_precision(name, dtype, mixing):
    own = position(name)
    made = layer(own, mixing=mixing)
    x, r = tokens(own.dim)
    torch.testing.assert_close(made(x, r.to(dtype)), made(x, r), rtol=0, atol=1e-5)
    if dtype is torch.int64:  # float32 does not resolve these phases
        r = 2**26 + 1 + r.long()
        expected = made.double()(x.double(), r.double())
        torch.testing.assert_close(made(x.double(), r), expected, rtol=0, atol=1e-10)


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
    """Only the mask of a box is not differentiable with respect to its radius."""

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


def test_attention_of_a_hybrid_gets_its_encoding():
    position = make_position("spectral", 2, DIM // 2, dim=1, num_nodes=3)
    blocks = [
        Block(TOKEN_MIXERS["fourier"](DIM), 24, norm="post"),
        Block(Attention(DIM, 2, position=position), 24, norm="post"),
        Block(Attention(DIM, 2, mixing="quadratic", position=position), 24, norm="post"),
    ]
    stack = Stack.of(blocks, position).double().eval()
    assert stack.mixings == ["linear", "quadratic"]
    x = torch.randn(1, 7, DIM, dtype=torch.float64)
    r = torch.arange(7.0, dtype=torch.float64)[None, :, None]
    h = blocks[0](x)
    h = blocks[1](h, r)
    h = blocks[2](h, encoding=position("linear", r, r))
    torch.testing.assert_close(stack(x, r), h, **EXACT)


def test_redraw_renews_features_and_noise_but_not_the_nodes_of_a_mask():
    for case, moves in (("sine_spe", True), ("gaussian_basis", False)):
        stack = contract.make_stack(Combination("positive", case, "linear", False))
        before = {key: value.clone() for key, value in stack.state_dict().items()}
        stack.redraw_(torch.Generator().manual_seed(9))
        changed = {k for k, v in stack.state_dict().items() if not torch.equal(v, before[k])}
        assert any("feature_map.projection" in key for key in changed)
        assert any(key.startswith("position.") for key in changed) == moves
        buffers = {key for key, _ in stack.named_buffers()}
        assert changed <= buffers


# --- conversion of weights ------------------------------------------------------------------


def pair(mixing: str, seed: int, **options) -> Stack:
    torch.manual_seed(seed)
    position = make_position("spectral", 2, DIM // 2, dim=1, num_nodes=8, num_gaussians=4)
    options.update(mixing=mixing, position=position, normalize_qk=True, learn_temperature=True)
    return Stack(DIM, 2, 2, ffn_dim=24, **options).double().eval()


def test_softmax_to_kernelized_and_back():
    trained = pair("softmax", 0)
    for block in trained.blocks:
        block.attention.scaling.log_temperature.data.uniform_(-0.3, 0.3)
    x = torch.randn(2, 30, DIM, dtype=torch.float64)
    r = torch.arange(30.0, dtype=torch.float64).sub(14.5)[None, :, None].expand(2, -1, -1)
    fast, back = pair("linear", 1, num_features=16), pair("softmax", 2)
    assert convert_weights_(trained, fast) == convert_weights_(fast, back) == []
    torch.testing.assert_close(back(x, r), trained(x, r), rtol=0, atol=0)
    learned = pair("linear", 1, feature_map="learnable_exp", num_features=8)
    missing = [f"blocks.{i}.attention.feature_map.weight" for i in (0, 1)]
    assert convert_weights_(trained, learned) == missing


TOKENS = 6


def words(count: int = 1) -> torch.Tensor:
    return torch.randn(count, TOKENS, DIM, generator=torch.manual_seed(1))


@pytest.mark.parametrize("mixing", MIXINGS)
def test_masked_copies_and_contexts_may_hold_anything(mixing):
    """NaN and infinity have no effect in masked keys, but they do in other keys."""
    attention = Attention(DIM, HEADS, mixing=mixing)
    x, context = words(), words()[:, :4].clone()
    x[:, 4:] = torch.nan
    index = torch.tensor([[0, 1, 2, 3, 5, 0, 4]])
    mask = torch.tensor([[True, True, True, True, False, True, False]])
    clean = x.nan_to_num(0.0)
    found = [attention(y, key_index=index, key_mask=mask)[:, :4] for y in (x, clean)]
    torch.testing.assert_close(*found)
    (slope,) = torch.autograd.grad(found[0].square().sum(), attention.to_query.weight)
    assert slope.isfinite().all()
    context[:, 3:] = torch.inf
    kept = torch.tensor([[True, True, True, False]])
    found = attention(clean, context=context, key_mask=kept)
    torch.testing.assert_close(found, attention(clean, context=context[:, :3]))
    assert attention(x, key_mask=torch.ones(1, TOKENS, dtype=torch.bool)).isnan().all()


@pytest.mark.parametrize("mixing", MIXINGS)
def test_one_context_serves_all_sequences(mixing):
    attention, x, context = Attention(DIM, HEADS, mixing=mixing), words(3), words()[:, :4]
    kept = torch.tensor([[True, True, True, False]])
    each = attention(x, context=context.expand(3, -1, -1), key_mask=kept.expand(3, -1))
    torch.testing.assert_close(attention(x, context=context, key_mask=kept), each)


@pytest.mark.parametrize("module", [Attention, Stack])
def test_calls_have_the_type_of_a_tensor(module):
    assert get_args(get_type_hints(module)["__call__"]) == (..., torch.Tensor)


@pytest.mark.parametrize("feature_map", ["positive", "elu"])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_weights_of_keys_multiply(mixing, feature_map):
    options = {} if mixing == "softmax" else {"feature_map": feature_map}
    attention = Attention(DIM, HEADS, mixing=mixing, **options).double()
    x, mask = words().double(), torch.arange(TOKENS)[None] < 4
    weight = torch.tensor([[1.0, 1, 2, 1, 0, torch.nan]], requires_grad=True)
    index = torch.tensor([[0, 1, 2, 3, 2]])
    twice = attention(x, key_index=index)
    out = attention(x, key_weight=weight, key_mask=mask)
    torch.testing.assert_close(out, twice, **EXACT)
    (slope,) = torch.autograd.grad(out.square().sum(), weight)
    assert slope.isfinite().all() and slope[0, 2] != 0 and (slope[~mask] == 0).all()
    single = attention.float()(x.float(), key_weight=weight.double(), key_mask=mask)
    torch.testing.assert_close(single.double(), out, rtol=0, atol=1e-5)


FIRST_OF_SEED_0 = {  # first numbers of tensors, in the order of the draws
    "position.spectrum.amplitude": -0.1125840,
    "position.nodes.eps": -0.0917417,
    "blocks.0.attention.to_query.weight": -0.1628664,
    "blocks.0.attention.feature_map.projection.rows": -1.3265783,
    "blocks.1.attention.to_out.weight": 0.1006569,
    "blocks.1.attention.feature_map.projection.rows": -0.7274079,
    "blocks.1.ffn.3.bias": 0.0206064,
}


def test_initial_weights_of_a_seed():
    """A seed must reproduce a run, so the order of draws must not change."""
    options = {
        "num_features": 8,
        "position": "multiplicative",
        "position_options": {"num_nodes": 3},
    }
    torch.manual_seed(0)
    state = Stack(DIM, HEADS, 2, **options).state_dict()
    found = {name: float(state[name].flatten()[0]) for name in FIRST_OF_SEED_0}
    assert found == pytest.approx(FIRST_OF_SEED_0, abs=1e-5)
