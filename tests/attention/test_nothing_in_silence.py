"""What was given has an effect or is refused; a position belongs to one module, and learns."""

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


@pytest.mark.parametrize("name", POSITIONED)
def test_positions_of_another_shape_are_refused(name):
    own = position(name)
    x, r = tokens(own.dim)
    for wrong in (r[..., 0], torch.cat([r, r], dim=-1)):
        with pytest.raises(ValueError, match=rf"must have shape \(batch, tokens, {own.dim}\); got"):
            layer(own)(x, wrong)


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("name", ["spectral", "multiplicative", "rotary"])
def test_integers_are_positions(name, dtype, mixing):
    own = position(name)
    made = layer(own, mixing=mixing)
    x, r = tokens(own.dim)
    torch.testing.assert_close(made(x, r.to(dtype)), made(x, r), rtol=0, atol=1e-5)


def test_a_name_is_no_position():
    with pytest.raises(TypeError, match="got 'spectral'; make one with molflt.attention.make_pos"):
        layer("spectral")


@pytest.mark.parametrize("name", POSITIONED)
def test_a_position_reaches_every_layer(name):
    """Stack, hand-made stack and layer: positions matter, or the object cannot be made."""
    shared = position(name)
    x, r = tokens(shared.dim)
    with pytest.raises(ValueError, match="block 0 was built for a .* expected none; give"):
        stack_of(None, layer(shared))(x, r)
    with pytest.raises(ValueError, match="block 1 was built without a position; expected the"):
        stack_of(shared, layer(shared), layer())(x, r)
    with pytest.raises(ValueError, match=r"block 0 was built for a \w+ of its own; expected the"):
        stack_of(shared, layer(position(name)))(x, r)
    order = torch.tensor([0, 3, 1, 4, 2])
    options = {"mixing": "softmax"} if name == "toeplitz" else {}  # else in order on a grid
    built = position(name)
    models = [layer(built, **options), stack_of(built, layer(built, **options))]
    models.append(Stack(DIM, HEADS, 1, position=position(name), **options))
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter) if parameter.ndim == 2 else None
        assert (model(x, r) - model(x, r[:, order])).abs().max() > 1e-6


def encoded(mixing: str, name: str = "spectral"):
    own = position(name)
    _, r = tokens(own.dim)
    return own(mixing, r, r)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        # wrong kinds
        (lambda x, r: layer()(x, encoding=encoded("softmax")), "is Bias, for softmax attention"),
        (lambda x, r: layer().weights(x, encoding=encoded("softmax")), "is Bias, for softmax"),
        (lambda x, r: layer().sums(x, encoding=encoded("softmax")), "is Bias, for softmax"),
        (lambda x, r: layer(causal=True).decode(x, encoding=encoded("softmax")), "is Bias"),
        (
            lambda x, r: layer(mixing="softmax")(x, encoding=encoded("linear")),
            "is Factors, for kernelized attention; this layer has mixing='softmax'",
        ),
        (
            lambda x, r: layer(mixing="softmax")(x, encoding=encoded("linear", "multiplicative")),
            "is Kernel, for kernelized",
        ),
        (
            lambda x, r: layer(mixing="softmax")(x, encoding=encoded("linear", "toeplitz")),
            "is Toeplitz, for kernelized",
        ),
        (lambda x, r: layer()(x, encoding=encoded("linear")), "are 40 wide; .* built for 8"),
        (
            lambda x, r: layer(position())(x, encoding=encoded("linear", "low_rank")),
            "are 11 wide; .* built for 40",
        ),
        (lambda x, r: layer(position("gaussian_bias")), "does not go with mixing='linear'"),
        (
            lambda x, r: stack_of(position("gaussian_bias"), layer()),
            "built without a position; expected the GaussianBias",
        ),
        (
            lambda x, r: stack_of(p := position(), layer(p), layer(p, mixing="softmax")),
            "serves one kind of attention; got blocks of linear and softmax",
        ),
        # twice, or not at all
        (lambda x, r: layer(position())(x, r, encoding=encoded("linear")), "both positions and an"),
        (
            lambda x, r: layer(position())(x, key_positions=r, encoding=encoded("linear")),
            "both positions and an",
        ),
        (lambda x, r: layer()(x, key_positions=r), "got positions"),
        (lambda x, r: Stack(DIM, HEADS, 1)(x, key_positions=r), "got positions"),
        (lambda x, r: layer(position())(x), "SpectralPosition needs positions; pass them"),
        (lambda x, r: layer(position(), causal=True).decode(x), "needs positions"),
        (lambda x, r: layer()(x, r), "positions.*position="),
        (lambda x, r: Stack(DIM, HEADS, 1, position="spectral")(x), "needs positions; pass them"),
        (lambda x, r: Stack(DIM, HEADS, 1)(x, r), "got positions"),
        (lambda x, r: Stack(DIM, HEADS, 1, causal=True).decode(x, r), "got positions"),
        # options without effect
        (lambda x, r: layer(feature_map="elu", num_features=8), "num_features=8 has no effect in"),
        (lambda x, r: layer(feature_map="cosformer", num_features=8), "num_features=8 has no"),
        (lambda x, r: layer(feature_map="elu", projection="iid"), "projection='iid' has no effect"),
        (lambda x, r: layer(mixing="softmax", feature_map="relu"), "feature_map='relu' has no"),
        (lambda x, r: layer(mixing="softmax", num_features=8), "num_features=8 has no effect with"),
        (lambda x, r: layer(mixing="softmax", projection="iid"), "projection='iid' has no effect"),
        (lambda x, r: layer(dropout=2.0), r"dropout must be in \[0, 1\); got 2.0"),
        (lambda x, r: layer(floor=-1.0), "floor must be at least 0; got -1.0"),
        (lambda x, r: Stack(DIM, HEADS, 1, ffn_dim=0), "ffn_dim must be at least 1; got 0"),
        (lambda x, r: Stack(DIM, HEADS, 1, dropout=-0.1), "dropout must be in"),
        (
            lambda x, r: Stack(DIM, HEADS, 1, mixer="fourier", attention_dropout=0.1),
            "^attention_dropout=0.1 has no effect with mixer='fourier'",
        ),
        (lambda x, r: layer(mixing="softmax", floor=0.1), "floor=0.1 has no effect with mixing="),
        (lambda x, r: layer(normalize="none", floor=0.1), "floor=0.1 has no effect with normalize"),
        (
            lambda x, r: position(
                nodes="shells", num_nodes=8, node_diameter=5.0, node_max_frequency=0.3
            ),
            "num_nodes=8 has no effect with nodes='shells'",
        ),
        (lambda x, r: position(mixing="softmax", nodes="sobol"), "nodes='sobol' has no effect for"),
        (lambda x, r: position(mixing="softmax", num_nodes=8), "num_nodes=8 has no effect for"),
        (lambda x, r: position(mixing="softmax", node_sigma=1.0), "node_sigma=1.0 has no effect"),
        (lambda x, r: position(sampled=False, num_nodes=8), "num_nodes=8 has no effect for"),
        (lambda x, r: position(node_diameter=5.0), "node_diameter"),
        (lambda x, r: position(background=1.0), "background"),
        (lambda x, r: position("none", num_nodes=8), "num_nodes=8 has no effect with position="),
        (
            lambda x, r: Stack(DIM, HEADS, 1, position_options={"num_nodes": 8}),
            "num_nodes=8 has no effect with position='none'",
        ),
        (
            lambda x, r: Stack(DIM, HEADS, 1, position=position(), position_options={"dim": 3}),
            "position_options has no effect with a position that is made",
        ),
    ],
)
def test_what_would_be_dropped_is_refused(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call(*tokens())
    assert "\n" not in str(error.value)


def test_a_layer_alone_owns_its_position():
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


def test_misspelt_arguments_of_a_stack_are_answered():
    with pytest.raises(TypeError, match="'num_feature'.*num_features"):
        Stack(DIM, HEADS, 1, num_feature=3)


@pytest.mark.parametrize("mixing", ["linear", "quadratic", "auto", "softmax"])
def test_no_sequence_at_all(mixing):
    assert layer(mixing=mixing)(torch.zeros(0, 5, DIM)).shape == (0, 5, DIM)


@pytest.mark.parametrize("name", ["spectral", "multiplicative", "rotary", "sine_spe"])
def test_softmax_decodes_with_the_places_of_all_tokens_or_not_at_all(name):
    """One place was that of all keys: the outputs were others, without a word."""
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
            with pytest.raises(ValueError, match=r"must be of all 6 tokens so far.*; got [15]"):
                part.decode(x[:, :1], r[:, :1], state, key_positions=missing)
        for length in (1, 4):
            encoding = own("softmax", r[:, :1], r[:, :length])
            with pytest.raises(ValueError, match=rf"the encoding .*{length}.*; evaluate it"):
                part.decode(x[:, :1], None, state, encoding=encoding)


@pytest.mark.parametrize("layers", [1, 2])
def test_softmax_learns_no_radii_of_boxes_and_says_so(layers):
    """A box has no slope by its radius; a sampled or smooth one has."""

    def build(own, mixing):
        return Stack(DIM, HEADS, layers, position=own, mixing=mixing)

    box = {"spectrum": "local", "dim": 1}
    own = position(sampled=False, **box)
    with pytest.warns(UserWarning, match="log_radius.*softmax.*smooth_local") as told:
        net = build(own, mixing="softmax")
    assert len(told) == 1
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


@pytest.mark.parametrize("name", ["none", "rotary", "sine_spe", "conv_spe"])
def test_a_normalizer_without_positions_needs_a_position_that_weighs_keys(name):
    own = None if name == "none" else position(name)
    with pytest.raises(ValueError, match="normalize='unmasked' has no effect"):
        layer(own, normalize="unmasked")


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
