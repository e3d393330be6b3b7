"""Time and peak memory of one Transformer block against the number of patches of an image.

The measurement of FLT (arXiv:2302.01925), fig. 1, in two dimensions: a pre-norm block and one
image, forward and backward; relative encodings see row and column. See kit/layers.py; times are
processor times.
"""

import math
from functools import partial
from typing import Any

import torch
from kit import layers
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention import Attention, Block, make_position

DIM, HEADS, FFN, FEATURES, NODES, GAUSSIANS = 384, 12, 1536, 64, 64, 25
FAR = 3136
QUICK = {"sizes": (64, 256), "rounds": 1, "mechanisms": ("flt", "log-linear, FFT at once")}


class Patches(nn.Module):
    """A block, its encoding, and the places of the patches of a square image, row by row."""

    def __init__(
        self, patches: int, causal: bool, position: str, options: dict[str, Any], **attention: Any
    ) -> None:
        super().__init__()
        side = math.isqrt(patches)
        if side**2 != patches:
            raise ValueError(f"sizes must be square numbers, such as 196 of 14 x 14; got {patches}")
        line = torch.arange(side) - (side - 1) / 2
        self.register_buffer("places", torch.cartesian_prod(line, line)[None])
        if position == "toeplitz":
            options = {"shape": (side, side), **options}
        mixing = attention.get("mixing", "linear")
        encoding = make_position(position, HEADS, DIM // HEADS, mixing=mixing, **options)
        layer = Attention(DIM, HEADS, position=encoding, causal=causal, **attention)
        self.block = Block(layer, FFN)

    def forward(self, x: Tensor) -> Tensor:
        positioned = self.block.attention.position is not None
        return self.block(x, self.places if positioned else None)


class AtOnce(Patches):
    """Log-linear attention as published: one transform of all products of features and values."""

    def forward(self, x: Tensor) -> Tensor:
        layer, block = self.block.attention, self.block
        side = math.isqrt(x.shape[1])
        tokens = block.attention_norm(x)
        query, key, value = (
            to(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for to in (layer.to_query, layer.to_key, layer.to_value)
        )
        phi_q, phi_k = (
            layer.feature_map(F.normalize(t, dim=-1)).materialize() for t in (query, key)
        )
        value = F.pad(value, (0, 1), value=1.0)
        products = (phi_k[..., :, None] * value[..., None, :]).flatten(3).mT  # [b, h, m (d + 1), n]
        size = (3 * side - 2,) * 2
        table = layer.position.table.exp().flip(-2, -1)[None, :, None]
        spectra = (
            torch.fft.rfft2(t, s=size) for t in (products.unflatten(-1, (side, side)), table)
        )
        summed = torch.fft.irfft2(math.prod(spectra), s=size)
        summed = summed[..., side - 1 : 2 * side - 1, side - 1 : 2 * side - 1]
        sums = summed.flatten(-2).mT.unflatten(-1, (FEATURES, -1))
        out = (phi_q[..., None, :] @ sums)[..., 0, :]
        mixed = (out[..., :-1] / out[..., -1:]).transpose(1, 2).flatten(2)
        x = x + layer.to_out(mixed)
        return x + block.ffn(block.ffn_norm(x))


def made(
    position: str = "none",
    linear: bool = True,
    build: type[Patches] = Patches,
    options: dict[str, Any] | None = None,
    **attention: Any,
) -> layers.Mechanism:
    """A block; with a Toeplitz matrix as in configs/image/log-linear.yaml."""
    if attention.get("mixing") != "softmax":
        attention["num_features"] = FEATURES
        if position == "toeplitz":
            attention["normalize_qk"] = True
    parts = {"position": position, "options": options or {}, **attention}
    return layers.Mechanism(partial(build, **parts), linear=linear)


MIXTURE = {"dim": 2, "spectrum": "gaussian_mixture", "num_gaussians": GAUSSIANS}
MECHANISMS = {
    "performer": made(),
    "flt": made("spectral", options={**MIXTURE, "num_nodes": NODES}),
    "log-linear": made("toeplitz"),
    "log-linear, FFT": made("toeplitz", options={"method": "fft"}),
    "log-linear, FFT at once": made("toeplitz", build=AtOnce),
    "softmax": made(mixing="softmax"),  # SDPA keeps no N x N matrix
    "softmax, 2-D bias": made("toeplitz", linear=False, mixing="softmax"),
}
STUDY = layers.Study(
    *("cost.patches:STUDY", "patches", MECHANISMS, lambda patches: torch.randn(1, patches, DIM)),
    styles=dict(zip(MECHANISMS, enumerate(["-", "-", "-", "--", "--", ":", ":"]), strict=True)),
    ratios=(
        layers.Ratio("time", "flt", "performer", FAR),
        layers.Ratio("memory", "flt", "performer", FAR),
        layers.Ratio("time", "softmax, 2-D bias", "flt", FAR),
        layers.Ratio("memory", "softmax, 2-D bias", "flt", FAR),
        layers.Ratio("memory", "log-linear, FFT at once", "flt", 1600),
    ),
    budget=30.0,
)
measure = partial(layers.measure_layers, STUDY, sizes=(196, 400, 784, 1600, FAR))
table = STUDY.table
draw = STUDY.draw
