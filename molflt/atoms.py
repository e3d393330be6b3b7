"""What data and models both know of atoms: OC20's tags, and bounds of numbers."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MAX_ATOMIC_NUMBER = 118
FARTHEST = 1e5
"""Å, bound of each coordinate: there the steps of float32 are 0.01 Å."""
LOWEST = 0.5
"""Å, least distance of lattice planes: no crystal comes near it, and images abound below."""


class Tag(IntEnum):
    """Role of an atom in an OC20 system."""

    SUBSURFACE = 0
    SURFACE = 1
    ADSORBATE = 2


def lattice_heights(cell: NDArray[np.float64], pbc: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Distances of neighboring lattice planes.

    Args:
        cell: (..., 3, 3), rows are lattice vectors, Å; finite along periodic axes.
        pbc: (..., 3), which of them are periodic.

    Returns:
        (..., 3), Å; 0 where lattice vectors are dependent, infinite along axes that are not
        periodic.
    """
    rows = np.where(pbc[..., None], cell, 0.0)
    gram = rows @ np.swapaxes(rows, -1, -2) + np.eye(3) * ~pbc[..., None]
    i, j, k = np.array([0, 1, 2]), np.array([1, 2, 0]), np.array([2, 0, 1])
    # h_i^2 is the volume of all vectors over that of the others, squared; no inverse may fail here
    others = gram[..., j, j] * gram[..., k, k] - gram[..., j, k] ** 2
    mixed = gram[..., i, j] * gram[..., k, k] - gram[..., i, k] * gram[..., j, k]
    rest = gram[..., i, j] * gram[..., j, k] - gram[..., i, k] * gram[..., j, j]
    volume = gram[..., i, i] * others - gram[..., i, j] * mixed + gram[..., i, k] * rest
    heights = np.sqrt(np.maximum(volume, 0.0) / np.maximum(others, np.finfo(float).tiny))
    return np.where(pbc, heights, np.inf)
