"""Rows of a training set that are kept for validation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["held_out"]


def held_out(labels: Tensor, fraction: float, source: Path, items: str) -> Tensor:
    """Marks the last rows of each class, rounded down.

    Args:
        labels: class of each row, (n,).
        fraction: share of each class, between 0 and 1.
        source: of the rows, for messages.
        items: what the rows are, likewise.

    Returns:
        (n,) bool.

    Raises:
        ValueError: if none would be left to train on, or to validate on.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        held[members[len(members) - int(fraction * len(members)) :]] = True
    if not bool(held.any()) or bool(held.all()):
        raise ValueError(
            f"{source}: data.val_fraction={fraction} of {len(labels):,} {items} leaves none to "
            "train or to validate on; change it"
        )
    return held
