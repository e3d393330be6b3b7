"""What data and models both know of atoms: OC20's tags, and how far atomic numbers go."""

from enum import IntEnum

MAX_ATOMIC_NUMBER = 118


class Tag(IntEnum):
    """Role of an atom in an OC20 system."""

    SUBSURFACE = 0
    SURFACE = 1
    ADSORBATE = 2
