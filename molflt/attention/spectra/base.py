"""Base class for spectra.

The mask is f(z) = Re integral exp(2 pi i z . xi) g(xi) d xi (FLT, arXiv:2302.01925v1, eq. 4).
Positions are in the caller's unit of length (Å for atoms, 1 for tokens), and frequencies xi are in
cycles per unit of length. An amplitude is the amount added to a logit at zero distance. Amplitudes
start small and random, because the gradient of the sampled mask vanishes at amplitude 0.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one, interval
from molflt.attention.numerics import options_of


class Spectrum(nn.Module):
    """Base class for families g(xi) with one learnable function per head.

    A new family overrides `spectrum` and `mask`, a Fourier pair, and is registered in `SPECTRA`.

    Args:
        heads: number of heads.
        dim: dimension l of positions.
    """

    paper: ClassVar[str] = ""  #: source of the family
    nodes: ClassVar[str] = "gaussian"  #: rule of `NODES` that samples the family by default
    isotropic: ClassVar[bool] = False  #: True if g depends only on |xi| and f only on |z|
    #: parameters with respect to which a sampled mask is differentiable but `mask` is not
    without_slope: ClassVar[tuple[str, ...]] = ()
    on_shells: ClassVar[bool] = False  #: True if the family is defined on the radii of shells
    extra_repr = options_of

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        at_least_one(heads=heads, dim=dim)
        self.heads = heads
        self.dim = dim

    def spectrum(self, xi: Tensor) -> Tensor:
        """Returns the spectrum g at frequencies `xi`: (heads or 1, nodes, l) -> (heads, nodes).

        g is real for even masks and complex for masks that may be asymmetric. Its unit is length^l.
        """
        raise NotImplementedError(f"{type(self).__name__} must override spectrum(xi)")

    def mask(self, delta: Tensor) -> Tensor:
        """Returns the exact mask f at given differences: (batch, ..., l) -> (batch, heads, ...)."""
        raise NotImplementedError(f"{type(self).__name__} must override mask(delta)")


def _log_spaced(name: str, bounds: tuple[float, float], count: int) -> Tensor:
    """Returns `count` evenly spaced numbers between the logarithms of the bounds."""
    interval(name, bounds, above=0)
    low, high = map(math.log, bounds)
    return torch.linspace(low, high, count)
