"""Tokens that are none, from Python: one line says what is wrong."""

import numpy as np
import pytest
import torch

from molflt.sequence import LanguageModel

SMALL = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
IDS = torch.zeros(2, 4, dtype=torch.long)


@pytest.fixture(params=[None, [3, 6]], ids=["plain", "adaptive"])
def model(request) -> LanguageModel:
    return LanguageModel(10, adaptive_cutoffs=request.param, **SMALL)


@pytest.mark.parametrize(
    ("tokens", "error", "parts"),
    [
        (IDS.float(), ValueError, ["tokens must be whole numbers", "torch.float32"]),
        (IDS.bool(), ValueError, ["tokens must be whole numbers", "torch.bool"]),
        (IDS + 10, ValueError, ["tokens must be 0 to 9", "got 10"]),
        (IDS - 1, ValueError, ["tokens must be 0 to 9", "got -1"]),
        (IDS[0], ValueError, ["tokens must be ids of shape (batch, length)", "(4,)"]),
        (IDS.to("meta"), ValueError, ["tokens is on meta, but the weights are on cpu"]),
        ([[1, 2]], TypeError, ["tokens must be a torch.Tensor; got list", "torch.as_tensor"]),
        (np.zeros((2, 4), int), TypeError, ["tokens must be a torch.Tensor; got ndarray"]),
        ("a text", TypeError, ["tokens must be a torch.Tensor; got str; pass a tensor"]),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")) if not isinstance(value, list) else "",
)
def test_no_tokens(model, tokens, error, parts) -> None:
    for call in (model, model.decode):
        with pytest.raises(error) as caught:
            call(tokens)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (IDS + 10, ["targets must be -1 to 9", "got 10"]),
        (IDS.float(), ["targets must be whole numbers"]),
        (IDS[:, :3], ["targets must have the shape of tokens, (2, 4); got (2, 3)"]),
    ],
    ids=["beyond", "float", "short"],
)
def test_no_targets(model, targets, parts) -> None:
    with pytest.raises(ValueError, match="targets") as caught:
        model.log_likelihood(IDS, targets)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_other_whole_numbers_are_tokens_and_nothing_is_a_batch(model) -> None:
    ids = torch.tensor([[1, 9, 0, 4]])
    for same in (ids.int(), ids.to(torch.uint8)):
        torch.testing.assert_close(model(same), model(ids), rtol=0, atol=0)
    assert model(IDS[:0]).shape == (0, 4, 16) and model(IDS[:, :0]).shape == (2, 0, 16)
    assert (model.log_likelihood(IDS, IDS - 1) == 0).all()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"layer": 2}, "'layer'"),
        ({"causal": False}, "'causal'"),
    ],
)
def test_misspelt_arguments(options, part) -> None:
    with pytest.raises(TypeError) as caught:
        LanguageModel(10, **SMALL, **options)
    assert part in str(caught.value)


def test_a_width_below_one() -> None:
    with pytest.raises(ValueError, match="dim must be at least 1; got -2"):
        LanguageModel(10, **{**SMALL, "dim": -2})
