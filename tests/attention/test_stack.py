"""Blocks and stacks: FNet's post-LayerNorm block, hybrids, decoding, conversion of weights."""

import contract
import pytest
import torch
from contract import Combination

from molflt.attention import (
    TOKEN_MIXERS,
    Attention,
    Block,
    Stack,
    convert_weights_,
    make_position,
)

DIM = 16


def test_fnet_block_equals_transformers():
    """A whole layer: Fourier sublayer, post-LayerNorm, feed-forward network with GELU."""
    fnet = pytest.importorskip("transformers.models.fnet.modeling_fnet")
    from transformers import FNetConfig

    config = FNetConfig(
        hidden_size=DIM,
        intermediate_size=24,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        use_tpu_fourier_optimizations=False,
    )
    theirs = fnet.FNetLayer(config).double().eval()
    ours = Block(TOKEN_MIXERS["fourier"](DIM), 24, norm="post").double().eval()
    pairs = (
        (ours.attention_norm, theirs.fourier.output.LayerNorm),
        (ours.ffn[0], theirs.intermediate.dense),
        (ours.ffn[3], theirs.output.dense),
        (ours.ffn_norm, theirs.output.LayerNorm),
    )
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())
    x = torch.randn(3, 11, DIM, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0], **contract.EXACT)


def test_hybrids_keep_the_contract():
    """FNet with attention in the last layers: no effect of padding or of other sequences."""
    torch.manual_seed(0)
    layers = TOKEN_MIXERS["fourier"](DIM), TOKEN_MIXERS["dense"](DIM, 24), Attention(DIM, 2)
    stack = Stack.of([Block(layer, 24, norm="post") for layer in layers]).double().eval()
    items = contract.ragged()
    for got, (x, _) in zip(contract.run(stack, items, 21, fill=3.7), items, strict=True):
        torch.testing.assert_close(got, stack(x[None])[0], **contract.EXACT)
    x, _, mask = contract.pad(items, 12)
    out = stack(x.requires_grad_(), key_mask=mask)
    grad = torch.autograd.grad(out[2][mask[2]].square().sum(), x)[0]
    assert (grad[[0, 1, 3, 4]] == 0).all() and grad[2].abs().max() > 0


def test_attention_of_a_hybrid_gets_its_encoding():
    torch.manual_seed(0)
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
    torch.testing.assert_close(stack(x, r), h, **contract.EXACT)


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
    position = make_position("spectral", 2, DIM // 2, dim=1, num_nodes=512, num_gaussians=4)
    options.update(mixing=mixing, position=position)
    return Stack(DIM, 2, 2, ffn_dim=24, **options).double().eval()


def test_softmax_to_kernelized_and_back():
    """The outputs of the converted model approach those of the trained one as m grows."""
    trained = pair("softmax", 0)
    x = torch.randn(2, 30, DIM, dtype=torch.float64)
    r = torch.arange(30.0, dtype=torch.float64).sub(14.5)[None, :, None].expand(2, -1, -1)
    errors = []
    for m in (16, 4096):
        fast = pair("linear", 1, num_features=m)
        assert convert_weights_(trained, fast) == []
        errors.append((fast(x, r) - trained(x, r)).norm().item())
    assert errors[1] < errors[0] / 3, errors
    back = pair("softmax", 2)
    assert convert_weights_(fast, back) == []
    torch.testing.assert_close(back(x, r), trained(x, r), rtol=0, atol=0)


def test_conversion_returns_unset_parameters():
    learned = pair("linear", 1, feature_map="learnable_exp", num_features=8)
    left = convert_weights_(pair("softmax", 0), learned)
    assert left == [f"blocks.{i}.attention.feature_map.weight" for i in (0, 1)]


def test_refinements_feed_the_output_back():
    stack = Stack(16, 2, 2, refinements=3).double()
    x = refined = torch.randn(2, 5, 16, dtype=torch.float64)
    for _ in range(3):
        refined = stack.one_pass(refined, None)
    torch.testing.assert_close(stack(x), stack.norm(refined), rtol=0, atol=0)
