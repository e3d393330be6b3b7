"""The model of pixels: positions in one and three dimensions, and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from molflt.attention import Attention
from molflt.sequence import PixelModel

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "pixels"
MECHANISMS = ("softmax", "prf", "nprf", "nprf-rpe", "flt", "flt-3d")
SIDE, CHANNELS = 3, 3
EXACT = {"rtol": 0.0, "atol": 1e-10}
FLT = {"position": "spectral", "position_scale": 0.5}
SPACE = {"dim": 3, "num_nodes": 5, "num_gaussians": 4}


def tiny(channels: int = CHANNELS, **options: Any) -> PixelModel:
    """A small model in float64, with a mask that is strong enough to be seen."""
    torch.manual_seed(0)
    small = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 16, "num_features": 8}
    if options.get("mixing") == "softmax":
        del small["num_features"]
    model = PixelModel(channels, SIDE, **{**options, **small}).double().eval()
    with torch.no_grad():
        for name, parameter in model.stack.named_parameters():
            if name.startswith("position.") and name.endswith(("amplitude", "table")):
                parameter.normal_()
    return model


def configured(mechanism: str, **options: Any) -> PixelModel:
    written = yaml.safe_load((CONFIGS / f"{mechanism}.yaml").read_text())
    return tiny(**{**written["model"], **options})


def images(batch: int = 2, channels: int = CHANNELS) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(256, (batch, channels, SIDE, SIDE), generator=draw, dtype=torch.uint8)


def places() -> Tensor:
    """(row, column, channel) of each byte, counted by NumPy."""
    grid = np.unravel_index(np.arange(SIDE * SIDE * CHANNELS), (SIDE, SIDE, CHANNELS))
    return torch.tensor(np.stack(grid, axis=-1)).double() * FLT["position_scale"]


def explicit(model: PixelModel, layer: Attention, x: Tensor) -> Tensor:
    """Outputs by the N x N matrix of one layer, whose mask is computed pair by pair.

    Softmax has f(r_i - r_j) itself, linear attention the sum over nodes that stands for it.
    """
    position = model.stack.position
    apart = places()[:, None] - places()[None]  # [query, key, axis]
    q, k, v = (
        to(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        for to in (layer.to_query, layer.to_key, layer.to_value)
    )
    q, k = layer.scaling(q), layer.scaling(k)
    if layer.mixing == "softmax":
        log_a = q @ k.mT + position.spectrum.mask(apart[None])
    else:
        xi, product, _ = position._sampled(None)
        waves = (2 * torch.pi * torch.einsum("ijl,hsl->hsij", apart, xi)).cos()
        mask = torch.einsum("hs,hsij->hij", product, waves)
        if type(position).__name__ == "SpectralPosition":
            at = places()[None]
            left, right = position.factors(at, at)
            torch.testing.assert_close((left @ right.mT)[0], mask, **EXACT)
            q, k = (
                torch.cat((n.expand(len(x), -1, -1, -1), y), -1) for n, y in ((left, q), (right, k))
            )
        phi_q, phi_k = (
            features.log_scale + (0 if features.values is None else features.values.log())
            for features in map(layer.feature_map, (q, k))
        )
        log_a = (phi_q[..., :, None, :] + phi_k[..., None, :, :]).logsumexp(dim=-1)
        if type(position).__name__ == "MultiplicativePosition":
            log_a = log_a + (mask + position.background).log()
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    share = log_a.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return layer.to_out((share @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("mixing", "position"),
    [("linear", "spectral"), ("linear", "multiplicative"), ("softmax", "spectral")],
)
def test_three_dimensions_are_the_quadratic_form_with_the_mask(mixing, position) -> None:
    own = {name: n for name, n in SPACE.items() if mixing == "linear" or name != "num_nodes"}
    model = tiny(mixing=mixing, **{**FLT, "position": position}, position_options=own)
    if position == "multiplicative":
        with torch.no_grad():  # a positive kernel
            model.stack.position.spectrum.amplitude.mul_(0.02)
    layer = model.stack.blocks[0].attention
    torch.manual_seed(2)
    x = torch.randn(2, model.longest, 16, dtype=torch.float64, requires_grad=True)
    at = model._positions(torch.arange(model.longest), model.stack)
    torch.testing.assert_close(at[0], places())
    weight = torch.randn(2, model.longest, 16, dtype=torch.float64)
    encoding = model.stack.position(mixing, at, at)
    outs = [layer(x, encoding=encoding), explicit(model, layer, x)]
    torch.testing.assert_close(outs[0], outs[1], **EXACT)
    learned = [x, layer.to_query.weight, *model.stack.position.parameters()]
    learned = [one for one in learned if one.requires_grad]
    grads = [torch.autograd.grad((out * weight).sum(), learned) for out in outs]
    assert max(float(g.abs().max()) for g in grads[0][2:]) > 1e-6  # the mask learns
    for fast, exact in zip(*grads, strict=True):
        torch.testing.assert_close(fast, exact, **EXACT)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_step_by_step_is_the_whole_and_no_byte_sees_itself(mechanism) -> None:
    model = configured(mechanism)
    values = model.bytes_of(images())
    given = torch.cat((torch.zeros_like(values[:, :1]), values[:, :-1]), dim=1)
    whole = model.log_probabilities(model(given))
    score = model.image_log_likelihood(images())
    torch.testing.assert_close(score, whole.gather(2, values[..., None])[..., 0], **EXACT)
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones_like(score), **EXACT)
    assert whole.shape[-1] == 256
    other = images()
    other[:, 2, 1, 2] ^= 255  # blue of row 1, column 2: byte (1 * 3 + 2) * 3 + 2
    changed = model.image_log_likelihood(other) != score
    assert changed[:, 17:19].all() and not changed[:, :17].any()
    assert model.decodes == (mechanism != "nprf-rpe")
    if model.decodes:
        parts, state = [], None
        for piece in (given[:, :4], *given[:, 4:].split(1, dim=1)):
            out, state = model.decode(piece, state)
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)


def test_images_survive_as_bytes_in_the_order_of_the_paper() -> None:
    model, given = tiny(), images()
    values = model.bytes_of(given)
    assert values[0, :4].tolist() == [*given[0, :, 0, 0].tolist(), int(given[0, 0, 0, 1])]
    assert torch.equal(model.images_of(values), given)
    gray = tiny(1)
    assert torch.equal(gray.bytes_of(images(1, 1)), images(1, 1).flatten(1).long())


def test_places_of_large_images_in_half_precision() -> None:
    small: dict[str, Any] = {"dim": 8, "heads": 1, "layers": 1, "absolute": "none"}
    where: dict[str, Any] = {"position": "multiplicative", "position_options": {"dim": 3}}
    model = PixelModel(1, 258, **small, **where).bfloat16()
    found = model._positions(torch.tensor([258 * 257 + 255, 258 * 257 + 257]), model.stack)
    assert found is not None and found[0].tolist() == [[257, 255, 0], [257, 257, 0]]
