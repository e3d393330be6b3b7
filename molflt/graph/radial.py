"""Functions of distances that vanish at a cutoff, together with all their derivatives."""

import math

import torch
from torch import Tensor

from molflt.attention.numerics import sinc

_E3NN = 1.14136  # e3nn's factor for a second moment of one
_NEAR = 0.1  # Å, far below any bond length; `softened` changes only shorter distances
_EDGE = 0.01  # smallest 1 - u^2; there exp(-2 / .) is 1e-87 and its slope is finite


def radial_bumps(distance: Tensor, number: int, cutoff: float) -> Tensor:
    """Evaluates smooth bumps of compact support at distances, in Å: (pairs,) -> (pairs, number).

    This is e3nn's "smooth_finite" basis (arXiv:2207.09453), scaled to a second moment of about one:
    exp(-1 / (1 + u) - 1 / (1 - u)) with u = (number + 1) |r| / cutoff - n for n = 1, 2, ...,
    number.
    """
    centers = torch.arange(1, number + 1, dtype=distance.dtype, device=distance.device)
    u = distance[:, None] * ((number + 1) / cutoff) - centers
    return _bump(u, 2) * (_E3NN * number**0.5)


def radial_waves(distance: Tensor, number: int, cutoff: float) -> Tensor:
    """Evaluates standing waves that fade out, at distances in Å: (pairs,) -> (pairs, number).

    These are DimeNet's Bessel functions (arXiv:2003.03123, eq. 7) with a different envelope, c / r
    sin(n pi u) exp(-u^2 / (1 - u^2)) for n = 1, ..., number and u = r / c. They resolve differences
    in bond length that are smaller than the width of a `radial_bumps` function.
    """
    u = distance / cutoff
    envelope = _bump(u, 1)
    waves = torch.arange(1, number + 1, dtype=distance.dtype, device=distance.device)
    return sinc(waves * u[:, None]) * (math.pi * waves) * envelope[:, None]


def _bump(u: Tensor, steepness: int) -> Tensor:
    """Returns exp(a - a / (1 - u^2)) for |u| < 1 and 0 elsewhere, where a is the steepness."""
    complement = 1 - u * u
    inside = complement > _EDGE
    bump = (steepness - steepness / torch.where(inside, complement, 1.0)).exp()
    return torch.where(inside, bump, 0.0)


def softened(square: Tensor) -> Tensor:
    """Returns squared distances, in Å^2, smoothly bounded from below by 1/300 Å^2.

    They are exact beyond 0.1 Å and twice differentiable. Quotients stay finite if atoms coincide.
    """
    closeness = (1 - square / _NEAR**2).clamp(min=0.0)  # 1 at distance 0, 0 beyond `_NEAR`
    return square + closeness**3 * (_NEAR**2 / 3)
