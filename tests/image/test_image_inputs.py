"""Images that are none, from Python: one line says what is wrong."""

import numpy as np
import pytest
import torch

from molflt.image import ImageClassifier

SMALL = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
IMAGES = torch.zeros(2, 1, 8, 8)


@pytest.mark.parametrize(
    ("images", "error", "parts"),
    [
        (IMAGES[0], ValueError, ["images must be (batch, 1, 8, 8)", "got (1, 8, 8)"]),
        (IMAGES.expand(2, 3, 8, 8), ValueError, ["(batch, 1, 8, 8)", "got (2, 3, 8, 8)"]),
        (IMAGES.movedim(1, -1), ValueError, ["got (2, 8, 8, 1)"]),
        (IMAGES[:, :, 1:], ValueError, ["got (2, 1, 7, 8)"]),
        (IMAGES[:0], ValueError, ["got (0, 1, 8, 8)"]),
        (IMAGES.bool(), ValueError, ["images must be whole numbers", "torch.bool"]),
        (IMAGES.to(torch.complex64), ValueError, ["images must be", "torch.complex64"]),
        (IMAGES.long() + 300, ValueError, ["images must be 0 to 255", "got 300"]),
        (IMAGES.to("meta"), ValueError, ["images is on meta, but the weights are on cpu"]),
        (IMAGES.tolist(), TypeError, ["images must be a torch.Tensor; got list"]),
        (IMAGES.numpy(), TypeError, ["images must be a torch.Tensor; got ndarray"]),
    ],
    ids=range(11),
)
def test_no_images(images, error, parts) -> None:
    model = ImageClassifier(3, 1, 8, 4, **SMALL)
    with pytest.raises(error) as caught:
        model(images)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_numbers_are_images() -> None:
    model = ImageClassifier(3, 1, 8, 4, **SMALL)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 1, 8, 8)))
    expected = model(pixels.to(torch.uint8))
    for same in (pixels, pixels / 255, pixels.double() / 255):
        torch.testing.assert_close(model(same), expected, rtol=0, atol=1e-5)


def test_misspelt_arguments() -> None:
    with pytest.raises(TypeError, match="'layer'.*layers"):
        ImageClassifier(3, 1, 8, 4, layer=3)
    with pytest.raises(ValueError, match="dim must be at least 1; got -2"):
        ImageClassifier(3, 1, 8, 4, **{**SMALL, "dim": -2})
