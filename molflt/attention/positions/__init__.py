"""Relative positional encodings; `make_position` passes the options of models to them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from molflt.attention.checks import accepted, from_options, no_effect, one_of
from molflt.attention.positions.base import Position
from molflt.attention.positions.gaussian_bias import GaussianBias
from molflt.attention.positions.grid import BucketedPosition, LowRankPosition, ToeplitzPosition
from molflt.attention.positions.multiplicative import MultiplicativePosition
from molflt.attention.positions.rotary import CosinePosition, RotaryPosition
from molflt.attention.positions.spectral import SpectralPosition
from molflt.attention.positions.stochastic import ConvSPE, SineSPE

POSITIONS: dict[str, Callable[..., Position]] = {
    "spectral": SpectralPosition.build,
    "multiplicative": MultiplicativePosition.build,
    "toeplitz": ToeplitzPosition,
    "bucketed": BucketedPosition,
    "low_rank": LowRankPosition,
    "gaussian_bias": GaussianBias,
    "rotary": RotaryPosition,
    "cosine": CosinePosition,
    "sine_spe": SineSPE,
    "conv_spe": ConvSPE,
}

# The command line takes the choices of this option from its type.
if TYPE_CHECKING:
    PositionName = str
else:
    PositionName = Literal[("none", *POSITIONS)]


def known_options(name: str, **options: object) -> dict[str, object]:
    """Returns those options that the encoding `name` takes; {} if the name is unknown."""
    return accepted(POSITIONS[name], **options) if name in POSITIONS else {}


def make_position(
    name: str, heads: int, head_dim: int, *, mixing: str = "linear", **options: object
) -> Position | None:
    """Builds an encoding for attention with the given sizes; returns None for "none".

    Args:
        name: key of `POSITIONS`, or "none".
        heads: number of heads.
        head_dim: width d of queries and keys per head.
        mixing: value of `mixing` in the attention layer that uses the encoding.
        options: arguments of `POSITIONS[name]`, such as the `position_options` of a model.
    """
    if name == "none":
        no_effect("with position='none'", **options)
        return None
    one_of("position", name, ("none", *POSITIONS))
    # Each encoding receives the sizes that it depends on.
    sizes = known_options(name, heads=heads, head_dim=head_dim, sampled=mixing != "softmax")
    return from_options(POSITIONS[name], {**sizes, **options})
