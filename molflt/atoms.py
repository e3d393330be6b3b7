"""What data and models both know of atoms: OC20's tags, and bounds of numbers."""

from enum import IntEnum

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
