"""Time and peak memory of one attention layer against the length, also of other packages' layers.

A layer has its projections (FNet has none) and its encoding, which every pass evaluates as in
training; see kit/layers.py.
"""

import time
from functools import partial
from typing import Any

import torch
from kit import layers
from kit.layers import Mechanism, Ratio
from torch import Tensor, nn

from molflt.attention import Attention, make_position
from molflt.attention.fnet import FourierMixer

HEADS, HEAD_DIM, FEATURES, NODES = 8, 64, 64, 32
DIM = HEADS * HEAD_DIM
QUICK = {"sizes": (512, 1024), "rounds": 1, "passes": (layers.TRAINING,)}
QUICK["mechanisms"] = ("flt", "softmax, Toeplitz bias", "PyG performer, relu")


class Layer(nn.Module):
    """Attention with its encoding; places along a line, or random ones at a metal's density."""

    def __init__(self, length: int, causal: bool, position: str, dim: int, **options: Any) -> None:
        super().__init__()
        self.places = torch.arange(length)[None, :, None].float()
        if dim == 3:
            self.places = torch.rand(1, length, 3) * (12.0 * length) ** (1 / 3)
        mixing = options.get("mixing", "linear")
        sizes = {"toeplitz": {"max_tokens": length}, "spectral": {"dim": dim}}.get(position, {})
        if position == "spectral" and mixing != "softmax":  # softmax takes the exact mask
            sizes["num_nodes"] = NODES
        encoding = make_position(position, HEADS, HEAD_DIM, mixing=mixing, **sizes)
        self.attention = Attention(DIM, HEADS, causal=causal, position=encoding, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, None if self.attention.position is None else self.places)


def performer_pytorch(length: int, causal: bool) -> nn.Module:
    """The chunked causal form in PyTorch; the other one needs CUDA and fast-transformers."""
    from performer_pytorch import SelfAttention

    return SelfAttention(DIM, causal=causal, heads=HEADS, dim_head=HEAD_DIM, nb_features=FEATURES)


def pyg(length: int, causal: bool) -> nn.Module:
    return layers.pyg_performer(DIM, HEADS, FEATURES)


def transformers_fnet(length: int, causal: bool) -> nn.Module:
    """Hugging Face's Fourier sublayer; its outputs come in a tuple."""
    from transformers import FNetConfig
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    class First(FNetBasicFourierTransform):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    return First(FNetConfig(hidden_size=DIM))


def made(
    position: str = "none", dim: int = 1, both: bool = True, linear: bool = True, **options: Any
) -> Mechanism:
    """A layer of molflt; exact softmax has no random features."""
    if options.get("mixing") != "softmax":
        options = {"num_features": FEATURES, **options}
    build = partial(Layer, position=position, dim=dim, **options)
    return Mechanism(build, causal=(False, True) if both else (False,), linear=linear)


# Other packages are dashed, softmax with a mask is dotted; one color per kind of attention.
LAYERS = {
    "softmax": (6, "-", made(mixing="softmax")),  # SDPA keeps no N x N matrix
    "softmax, spectral mask": (
        *(3, ":", made("spectral", 3, both=False, linear=False, mixing="softmax")),
    ),
    "softmax, Toeplitz bias": (7, ":", made("toeplitz", linear=False, mixing="softmax")),
    "performer": (0, "-", made()),
    "performer, relu": (5, "-", made(both=False, feature_map="relu")),
    "flt": (1, "-", made("spectral", 3)),
    "flt, l = 1": (1, "-.", made("spectral")),
    "log-linear": (4, "-", made("toeplitz")),
    "elu": (3, "-", made(feature_map="elu", num_features=None)),
    "fnet": (2, "-", Mechanism(lambda *_: FourierMixer(DIM))),
    "performer-pytorch": (
        *(0, "--", Mechanism(performer_pytorch, "performer-pytorch", (False, True))),
    ),
    "PyG performer, relu": (5, "--", Mechanism(pyg, "torch_geometric")),
    "transformers fnet": (2, "--", Mechanism(transformers_fnet, "transformers")),
}
FAR = 8192
STUDY = layers.Study(
    *("cost.scaling:STUDY", "tokens", {name: layer for name, (_, _, layer) in LAYERS.items()}),
    lambda length: torch.randn(1, length, DIM),
    styles={name: (color, line) for name, (color, line, _) in LAYERS.items()},
    ratios=(
        Ratio("time", "flt", "performer", FAR),
        Ratio("memory", "flt", "performer", FAR),
        Ratio("time", "flt, l = 1", "performer", FAR),
        Ratio("memory", "flt, l = 1", "performer", FAR),
        Ratio("time", "performer-pytorch", "performer", FAR, causal=True),
        Ratio("memory", "performer-pytorch", "performer", FAR, causal=True),
        Ratio("time", "fnet", "transformers fnet", FAR),
    ),
    passes=layers.PASSES,
    clock=time.perf_counter,
)
measure = partial(layers.measure_layers, STUDY, sizes=(512, 1024, 2048, 4096, FAR))
table = STUDY.table
draw = STUDY.draw
