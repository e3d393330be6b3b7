"""Functions of distance with the derivatives that masks and forces need, also at distance 0."""

import math

import torch
from torch import Tensor


def distances(vector: Tensor) -> Tensor:
    """|v|, (..., l) -> (...), with the gradient 0 at 0: for functions that are flat there."""
    return root(vector.square().sum(dim=-1))


def root(square: Tensor) -> Tensor:
    """Square root with the gradient 0 at 0."""
    positive = square > 0
    # The inner `where` keeps the infinite slope of the root at 0 out of the gradient.
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x); torch.sinc has no second derivative at 0."""
    phase = math.pi * x
    away = phase != 0
    phase = torch.where(away, phase, 1.0)
    return torch.where(away, phase.sin() / phase, 1.0)


def fade(x: Tensor) -> Tensor:
    """1 for x <= 0, 0 for x >= 1, between them a polynomial; twice differentiable."""
    x = x.clamp(0.0, 1.0)
    return 1 - x**3 * (10 - 15 * x + 6 * x**2)
