from typing import Any

import contract
import pytest
import torch
from contract import EXACT
from torch import Tensor

from molflt.attention import POSITIONS, make_position
from molflt.data.images.augment import augment
from molflt.evaluation.common import attention_of
from molflt.image.classifier import ImageClassifier, _sinusoids

MIXTURE = {"spectrum": "gaussian_mixture", "num_gaussians": 3, "num_nodes": 5, "amplitude": 0.5}
# Options that make encodings visible; other encodings are built with their defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "spectral": MIXTURE,
    "multiplicative": {**MIXTURE, "amplitude": 0.1},
    "toeplitz": {"std": 0.5},
    "low_rank": {"rank": 3},
    "sine_spe": {"num_realizations": 8},
    "conv_spe": {"num_realizations": 8},
}


def model(seed: int = 0, **options: Any) -> ImageClassifier:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"classes": 5, "channels": 2, "image_size": 12, "patch_size": 4}
    small = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 24}
    given = contract.with_features(6, {**sizes, **small, **options})
    return ImageClassifier(**given).double().eval()


def images(count: int = 3, size: int = 12, channels: int = 2, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, channels, size, size, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", POSITIONS)
def test_encodings_see_where_patches_are(name: str) -> None:
    x = images(2)
    shuffled = x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)[:, :, [3, 1, 7, 0, 8, 2, 6, 5, 4]]
    shuffled = shuffled.unflatten(2, (3, 3)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    plain = model(absolute="none")
    torch.testing.assert_close(plain(x), plain(shuffled), **EXACT)
    given = {"absolute": "none", "position": name, "position_options": OPTIONS.get(name)}
    own = make_position(name, 2, 8, **contract.OPTIONS.get(name, {}))
    net = model(mixing="linear" if "linear" in own.mixings else "softmax", **given)
    assert (net(x) - net(shuffled)).abs().max() > 1e-7


def test_weights_of_attention_and_the_mean_over_patches() -> None:
    net, x = model(mixing="softmax", position="spectral", layers=1), images()
    tokens, block = net.tokens(x), net.stack.blocks[0]
    (weights,) = attention_of(net.stack, lambda: net(x))
    expected = block.attention.weights(block.attention_norm(tokens), net.positions)
    torch.testing.assert_close(weights, expected, **EXACT)
    out = net.stack(tokens, net.positions)
    torch.testing.assert_close(net(x), net.head(out.mean(dim=1)), **EXACT)


def test_patches_are_embedded_as_vectors_of_pixels() -> None:
    net = model(absolute="none")
    net.set_normalizer([0.2, 0.4], [0.5, 2.0])
    x = images(1)
    pixels = (x - torch.tensor([0.2, 0.4])[:, None, None]) / torch.tensor([0.5, 2.0])[:, None, None]
    second = pixels[0, :, 0:4, 4:8].flatten()  # row 0, column 1
    expected = net.embed.weight.flatten(1) @ second + net.embed.bias
    torch.testing.assert_close(net.tokens(x)[0, 1], expected, rtol=1e-6, atol=1e-7)


def test_sinusoids_are_those_of_rows_and_columns() -> None:
    """Products of two positions are functions of both offsets alone, and depend on each offset."""
    waves = _sinusoids(3, 16)[0]
    gram = (waves @ waves.T).reshape(3, 3, 3, 3)
    torch.testing.assert_close(gram[0, 0, 1, 2], gram[1, 0, 2, 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gram[0, 0, 1, 0], gram[0, 0, 0, 1], rtol=1e-5, atol=1e-5)
    assert gram[0, 0, 0, 0] > gram[0, 0, 0, 1] + 0.1
    assert not (waves[1] == waves[3]).all()


@pytest.mark.parametrize("dim", [15, 18])
def test_sinusoids_of_odd_widths(dim: int) -> None:
    """The width of a model, or of an axis, can be odd."""
    assert model(dim=dim, heads=3, absolute="sinusoidal")(images()).shape == (3, 5)
    assert _sinusoids(3, dim)[0].unique(dim=0).shape == (9, dim)


@pytest.mark.parametrize("name", ["none", "spectral", "bucketed"])
def test_class_token(name: str) -> None:
    net = model(pool="token", position=name, position_options=OPTIONS.get(name))
    x = images()
    assert net.tokens(x).shape == (3, 10, 16)
    assert attention_of(net.stack, lambda: net(x))[0].shape == (3, 2, 10, 10)
    out = net.stack(net.tokens(x), net.positions if net.stack.position else None)
    torch.testing.assert_close(net(x), net.head(out[:, 0]), **EXACT)
    if net.positions.shape[-1] == 2:
        assert (net.positions[0, 0] == 0).all()
    else:
        assert net.positions[0, :, 0].tolist() == list(range(10))


def test_position_scale_and_given_options() -> None:
    half = model(position="spectral", position_options=MIXTURE, position_scale=0.5)
    whole = model(position="spectral", position_options=MIXTURE)
    torch.testing.assert_close(2 * half.positions, whole.positions)
    assert model(position="toeplitz").stack.position.shape == (3, 3)
    assert model(position="toeplitz", position_options={"max_tokens": 9}).positions.shape[-1] == 1
    assert model(position="cosine", feature_map="cosformer").stack.position.max_tokens == 9
    line = model(position="spectral", position_options={**MIXTURE, "dim": 1})
    assert line.positions[0, :, 0].tolist() == list(range(9))


@pytest.mark.parametrize("kind", ["none", "flip_crop", "resized_crop"])
@pytest.mark.parametrize("axes", [1, 2])
def test_default_device_and_type_change_nothing(axes: int, kind: Any) -> None:
    options = {**MIXTURE, "dim": axes}
    net, x = model(absolute="sinusoidal", position="spectral", position_options=options), images()

    def found() -> torch.Tensor:
        torch.manual_seed(0)
        return net(augment(x, kind))

    plain = found()
    with torch.device("meta"):
        torch.testing.assert_close(found(), plain, **EXACT)
    torch.set_default_dtype(torch.bfloat16)
    coarse = net(x)
    torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(coarse, net(x), **EXACT)


def test_bytes_and_shares_are_one_image() -> None:
    model = ImageClassifier(3, 1, 8, 4, dim=16, heads=2, layers=1, ffn_dim=16)
    whole = torch.randint(256, (2, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    expected = model(whole.to(torch.uint8))
    for same in (whole, whole / 255, whole.double() / 255):
        torch.testing.assert_close(model(same), expected, rtol=0, atol=1e-5)
