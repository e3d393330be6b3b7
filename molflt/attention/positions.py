"""The positional encodings by name."""

import inspect
from collections.abc import Callable
from typing import Any

from molflt.attention.encoding import Position
from molflt.attention.gaussian_bias import GaussianBias
from molflt.attention.grid import BucketedPosition, LowRankPosition, ToeplitzPosition
from molflt.attention.kernels import one_of
from molflt.attention.multiplicative import KernelPosition
from molflt.attention.rotations import CosinePosition, RotaryPosition
from molflt.attention.spectral import SpectralPosition
from molflt.attention.stochastic import ConvSPE, SineSPE

POSITIONS: dict[str, Callable[..., Position]] = {
    "spectral": SpectralPosition.build,
    "kernel": KernelPosition.build,
    "toeplitz": ToeplitzPosition,
    "bucketed": BucketedPosition,
    "low_rank": LowRankPosition,
    "gaussian_bias": GaussianBias,
    "rotary": RotaryPosition,
    "cosine": CosinePosition,
    "sine_spe": SineSPE,
    "conv_spe": ConvSPE,
}


def known_options(name: str, **options: Any) -> dict[str, Any]:
    """Those of the options that the constructor of an encoding names; none if there is no such."""
    known = inspect.signature(POSITIONS[name]).parameters if name in POSITIONS else {}
    return {key: value for key, value in options.items() if key in known}


def make_position(name: str, heads: int, head_dim: int, **options: Any) -> Position | None:
    """Builds an encoding for attention of a given size.

    Args:
        name: key of `POSITIONS`, or "none".
        heads: number of heads.
        head_dim: width d of queries and keys per head.
        options: further arguments of the encoding's constructor.

    Raises:
        ValueError: if there is no encoding of that name, or it has no such option.
    """
    if name == "none":
        return None
    one_of("position", name, ("none", *POSITIONS))
    build = POSITIONS[name]
    # Each encoding asks for the sizes that it depends on.
    known = inspect.signature(build).parameters
    sizes = {"heads": heads, "head_dim": head_dim}
    options = {**known_options(name, **sizes), **options}
    free = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if unknown := [] if free else sorted(set(options) - set(known)):
        raise ValueError(
            f"position={name!r} has no option {', '.join(unknown)}; expected some of "
            f"{', '.join(set(known) - set(sizes))}"
        )
    return build(**options)
