"""Refused feature maps, positions, nodes, spectra, layers and stacks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from molflt.attention import (
    TOKEN_MIXERS,
    Attention,
    Stack,
    convert_weights_,
    make_position,
)
from molflt.attention.nodes import ShellNodes
from molflt.attention.nodes.reciprocal import reciprocal_nodes
from molflt.attention.positions.grid import LowRankPosition, ToeplitzPosition
from molflt.attention.positions.stochastic import ConvSPE
from refusals import Refusal

DIM, HEADS = 16, 2


def refused(
    call: Callable[[], Any],
    option: str,
    expected: str = "",
    got: str = "",
    error: type[Exception] = ValueError,
) -> Refusal:
    return Refusal(lambda _: call(), option, expected, got, error)


def layer(position: Any = None, **options: Any) -> Attention:
    return Attention(DIM, HEADS, position=position, **options)


def stack(**options: Any) -> Stack:
    return Stack(DIM, HEADS, 1, **options)


def position(name: str = "spectral", **options: Any) -> Any:
    small = {"low_rank": {"max_tokens": 9, "rank": 3}, "toeplitz": {"max_tokens": 9}}
    return make_position(name, HEADS, DIM // HEADS, **small.get(name, {}), **options)


def line(tokens: int = 5) -> Tensor:
    return torch.arange(float(tokens))[None, :, None]


X, R = torch.ones(1, 5, DIM), line().expand(1, 5, 3)
ODD = torch.tensor([[[0.0], [1.5], [2.0]]])
BEYOND = torch.tensor([[[0.0], [-1.0], [2.0]]])
MASK = torch.ones(1, 5, dtype=torch.bool)
CELL, PERIODIC = 7 * torch.eye(3).repeat(2, 1, 1), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
FLAT = torch.stack((CELL[0], torch.tensor([[7.0, 0, 0], [14.0, 1e-9, 0], [0, 0, 8.0]])))


def cells(*words: str, **change: Any) -> Refusal:
    arguments = {"cell": CELL, "pbc": PERIODIC, "extent": torch.zeros(2, 3), "max_frequency": 0.3}
    return refused(lambda: reciprocal_nodes(**{**arguments, **change}), *words)


def shells(option: str, expected: str, got: str, *sizes: Any, **options: Any) -> Refusal:
    return refused(lambda: ShellNodes(*sizes, **options), option, expected, got)


def converted(source: dict[str, Any], target: dict[str, Any]) -> Callable[[], object]:
    return lambda: convert_weights_(
        Attention(**{"dim": 32, "heads": 2, **source}),
        Attention(**{"dim": 32, "heads": 2, **target}),
    )


ROWS = [
    # options of a layer
    refused(lambda: layer(mixing="fast"), "mixing", "quadratic", "'fast'"),
    refused(lambda: layer(gate=True), "gate=True", "causal=True"),
    refused(lambda: layer(position("gaussian_bias")), "mixing", "softmax", "'linear'"),
    # options without effect
    refused(lambda: layer(feature_map="elu", num_features=8), "num_features=8", "no effect", "Elu"),
    # inputs of a layer
    refused(lambda: layer(position())(X, R[..., 0]), "positions", "(batch", "(1, 5)"),
    refused(lambda: layer()(X, key_mask=MASK[:, :3]), "key_mask", "(1, 5)", "(1, 3)"),
    refused(lambda: layer()(X, key_weight=-X[..., 0]), "key_weight", "finite", "-1"),
    refused(lambda: layer(causal=True)(X, context=X), "context", "causal=False"),
    refused(lambda: layer(position())(X), "SpectralPosition", "(batch, tokens, 3)"),
    refused(
        lambda: layer(position("toeplitz"), causal=True).decode(X, line()), "Toeplitz", "spectral"
    ),
    # stacks
    refused(lambda: stack(num_feature=3), "'num_feature'", "num_features", error=TypeError),
    refused(lambda: stack(mixer="fourier", causal=True), "mixer", "causal=False", "True"),
    # conversion of weights
    refused(
        lambda: convert_weights_(layer(), Attention(32, 2)),
        "to_query.weight",
        "(32, 32)",
        "(16, 16)",
    ),
    refused(converted({"heads": 4}, {}), "scaling", "2 in the target", "heads=4"),
    # token mixers
    refused(
        lambda: TOKEN_MIXERS["dense"](DIM, 4)(X, key_mask=MASK), "max_tokens=4", "at most", "5"
    ),
    # positions by name
    refused(lambda: position("toeplitz", radius=3), "radius", "max_tokens", "'toeplitz'"),
    refused(lambda: position(sampled=False, num_nodes=8), "num_nodes", "no effect", "softmax"),
    # positions on a grid
    refused(lambda: ToeplitzPosition(2, 4)("linear", line(), line()), "5 tokens", "4 places"),
    refused(lambda: LowRankPosition(2, max_tokens=8, rank=9), "rank=9", "max_tokens=8"),
    refused(lambda: position("low_rank")("linear", BEYOND, BEYOND), "positions", "[0, 9)", "-1"),
    refused(
        lambda: ConvSPE(2, 3, max_tokens=8)("linear", ODD, ODD),
        "positions",
        "integers",
        "fractions",
    ),
    # spectra and nodes
    shells("degree", "at most 131", "133", 100.0, 1.0),
    # cells
    cells("max_frequency", "reduce", "graph", max_frequency=1e4),
    cells("pbc", "linearly independent", "graph 1", cell=FLAT),
]
