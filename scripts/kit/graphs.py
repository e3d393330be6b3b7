"""Shared training of graph models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from e3nn.math import soft_one_hot_linspace
from torch import Tensor, nn


def radial_basis(distance: Tensor, number: int, cutoff: float) -> Tensor:
    """Smooth bumps, zero with all derivatives at the cutoff: (pairs,) -> (pairs, number)."""
    basis: Tensor = soft_one_hot_linspace(
        distance, 0.0, cutoff, number, basis="smooth_finite", cutoff=True
    )
    return basis * number**0.5


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    peak: float,
    steps: int,
    loss: Callable[[], Tensor],
) -> None:
    """So many steps with one cycle of learning rates, gradients of a norm of at most 1."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
