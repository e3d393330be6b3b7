"""Validation sets made of training rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["held_out"]


def held_out(labels: Tensor, fraction: float, source: Path, items: str) -> Tensor:
    """Returns a bool mask (n,) of the last rows of each class; their number is rounded down.

    Args:
        labels: class of each row, (n,).
        fraction: share of each class, between 0 and 1.
        source: file or folder of the rows, for messages.
        items: plural noun for the rows, for messages.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        held[members[len(members) - int(fraction * len(members)) :]] = True
    if not bool(held.any()) or bool(held.all()):
        raise ValueError(
            f"{source}: expected a data.val_fraction that leaves {items} for training and for "
            f"validation; got {fraction} of {len(labels):,} {items}"
        )
    return held
