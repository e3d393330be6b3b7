"""Time and peak memory of attention layers from molflt and other packages by sequence length.

A layer includes its projections (FNet has no projections) and its encoding. Every pass evaluates
the encoding, as in training. See kit/layers.py for the measurement.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kit import layers
from kit.rows import Rows, markdown
from torch import Tensor, nn

from molflt.attention import Attention, make_position
from molflt.attention.fnet import FourierMixer

HEADS, HEAD_DIM, FEATURES, NODES = 8, 64, 64, 32
DIM = HEADS * HEAD_DIM
FAR = 8192
# Ratios at the largest length: quantity, two layers, and True for causal layers.
RATIOS = (
    ("time", "flt", "performer", False),
    ("memory", "flt", "performer", False),
    ("time", "flt, l = 1", "performer", False),
    ("memory", "flt, l = 1", "performer", False),
    ("time", "performer-pytorch", "performer", True),
    ("memory", "performer-pytorch", "performer", True),
    ("time", "fnet", "transformers fnet", False),
)


class Layer(nn.Module):
    """Attention with its encoding, for tokens on a line or atoms at random positions in 3D."""

    def __init__(self, length: int, causal: bool, position: str, dim: int, **options: Any) -> None:
        super().__init__()
        self.places = torch.arange(length)[None, :, None].float()
        if dim == 3:
            self.places = torch.rand(1, length, 3) * (layers.VOLUME * length) ** (1 / 3)
        mixing = options.get("mixing", "linear")
        sizes = {"toeplitz": {"max_tokens": length}, "spectral": {"dim": dim}}.get(position, {})
        if position == "spectral" and mixing != "softmax":  # softmax uses the exact mask
            sizes["num_nodes"] = NODES
        encoding = make_position(position, HEADS, HEAD_DIM, mixing=mixing, **sizes)
        self.attention = Attention(DIM, HEADS, causal=causal, position=encoding, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, None if self.attention.position is None else self.places)


def performer_pytorch(length: int, causal: bool) -> nn.Module:
    """Builds the layer from performer-pytorch, whose faster causal form needs CUDA."""
    from performer_pytorch import SelfAttention

    return SelfAttention(DIM, causal=causal, heads=HEADS, dim_head=HEAD_DIM, nb_features=FEATURES)


def transformers_fnet(length: int, causal: bool) -> nn.Module:
    """Builds Hugging Face's Fourier sublayer, changed to return a tensor instead of a tuple."""
    from transformers import FNetConfig
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    class First(FNetBasicFourierTransform):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    return First(FNetConfig(hidden_size=DIM))


def made(position: str = "none", dim: int = 1, **options: Any) -> Callable[..., nn.Module]:
    """Returns a function that builds a molflt layer."""
    if options.get("mixing") != "softmax":
        options = {"num_features": FEATURES, **options}
    return partial(Layer, position=position, dim=dim, **options)


# Each kind of attention has its own color. Lines of other packages are dashed, and lines of softmax
# with a mask are dotted.
LAYERS = {
    "softmax": (6, "-", made(mixing="softmax")),  # SDPA does not store an N x N matrix
    "softmax, spectral mask": (3, ":", made("spectral", 3, mixing="softmax")),
    "softmax, Toeplitz bias": (7, ":", made("toeplitz", mixing="softmax")),
    "performer": (0, "-", made()),
    "performer, relu": (5, "-", made(feature_map="relu")),
    "flt": (1, "-", made("spectral", 3)),
    "flt, l = 1": (1, "-.", made("spectral")),
    "log-linear": (4, "-", made("toeplitz")),
    "elu": (3, "-", made(feature_map="elu", num_features=None)),
    "fnet": (2, "-", lambda *_: FourierMixer(DIM)),
    "performer-pytorch": (0, "--", performer_pytorch),
    "PyG performer, relu": (5, "--", lambda *_: layers.pyg_performer(DIM, HEADS, FEATURES)),
    "transformers fnet": (2, "--", transformers_fnet),
}
ONE_WAY = ("softmax, spectral mask", "performer, relu", "fnet", "PyG performer, relu")
ONE_WAY += ("transformers fnet",)
STUDY = layers.Study(
    *("cost.scaling", "tokens", {name: layer for name, (_, _, layer) in LAYERS.items()}),
    lambda length: torch.randn(1, length, DIM),
    styles={name: (color, line) for name, (color, line, _) in LAYERS.items()},
    causal=LAYERS.keys() - ONE_WAY,
    passes=layers.PASSES,
    clock=time.perf_counter,
)
QUICK = {
    **{"sizes": (512, 1024), "rounds": 1, "passes": (layers.TRAINING,)},
    "mechanisms": ("flt", "softmax, Toeplitz bias"),
}
measure = partial(layers.measure_layers, STUDY, sizes=(512, 1024, 2048, 4096, FAR))
draw = STUDY.draw


def table(rows: Rows) -> str:
    """Formats the costs of a forward and backward pass, and the measured ratios in `RATIOS`."""
    text, lines = layers.cost_table(rows, "tokens"), []
    for quantity, one, other, causal in RATIOS:
        if value := layers.cost_ratio(rows, quantity, one, other, FAR, causal):
            label = f"{quantity} of {one} / {other}, {FAR} tokens{', causal' * causal}"
            lines.append([label, f"{value:.3g}"])
    return f"{text}\n\n{markdown(['ratio', 'measured'], lines)}" if lines else text
