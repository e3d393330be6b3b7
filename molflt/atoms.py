"""Constants and cells shared by data and models."""

from enum import IntEnum
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Batch, Data
else:  # for annotations only: reading signatures must not load these packages
    Atoms = Batch = Data = Any

_Array = NDArray[np.float64]
MAX_ATOMIC_NUMBER = 118
FARTHEST = 1e5
"""maximum magnitude of a coordinate, in Å, at which float32 has a resolution of 0.01 Å"""
LOWEST = 0.5
"""smallest distance between lattice planes of a reduced cell, in Å; smaller than in any crystal"""

_DEPENDENT = 1e-18  # relative to the square of the longest vector; less is a rounding error
_MOST_REDUCTIONS = 64  # maximum number of steps for a cell; about ten suffice for usual cells
_SIGNS = np.array([[1.0, 1, 1], [1, 1, -1], [1, -1, 1], [-1, 1, 1]])  # of sums of three vectors


class Tag(IntEnum):
    """Role of an atom in an OC20 system."""

    SUBSURFACE = 0
    SURFACE = 1
    ADSORBATE = 2


def symbol(number: SupportsIndex) -> str:
    """Returns the symbol of an element."""
    from ase.data import chemical_symbols

    return str(chemical_symbols[number])


def reduced_cell(cell: _Array, pbc: NDArray[np.bool_]) -> tuple[_Array, _Array]:
    """Returns Minkowski-reduced lattice vectors, the shortest vectors of the same lattice.

    Args:
        cell: matrices (graphs, 3, 3) with lattice vectors in Å as rows; finite along periodic axes.
        pbc: mask (graphs, 3), True for periodic axes.

    Returns:
        The reduced vectors, which are 0 along non-periodic axes, and unimodular matrices `steps`
        with vectors = steps @ cell, both (graphs, 3, 3). Reduced cells remain bitwise unchanged.
    """
    rows = np.where(pbc[..., None], cell, 0.0)
    steps = np.tile(np.eye(3), (len(rows), 1, 1))
    negligible = _DEPENDENT * np.square(rows).sum(axis=2).max(axis=1, initial=0.0)
    active = np.arange(len(rows))  # cells that are not reduced yet
    for _ in range(_MOST_REDUCTIONS):
        change = _shortening(steps[active] @ rows[active], negligible[active])
        changed = (change != np.eye(3)).any(axis=(1, 2))
        active = active[changed]
        if not len(active):
            break
        steps[active] = change[changed] @ steps[active]
    unchanged = (steps == np.eye(3)).all(axis=(1, 2))
    return np.where(unchanged[:, None, None], rows, steps @ rows), steps


def _shortening(vectors: _Array, negligible: _Array) -> _Array:
    """Returns unimodular matrices (graphs, 3, 3) that shorten one row of each cell, if possible.

    A multiple of another row is subtracted, or a signed sum of all rows replaces the longest row.
    Rows with a squared length of at most `negligible` (graphs,), in Å^2, are not used.
    """
    gram = vectors @ np.swapaxes(vectors, 1, 2)
    square = np.diagonal(gram, axis1=1, axis2=2)  # squared lengths
    ratio = gram / np.where(square > negligible[:, None], square, np.inf)[:, None]
    # multiples of row j to subtract from row i; 0.501 excludes ties at one half
    multiple = np.where(np.abs(ratio) > 0.501, ratio.round(), 0.0) * (1 - np.eye(3))
    gain = (multiple * (2 * gram - multiple * square[:, None])).reshape(-1, 9)  # in squared length
    change, graphs = np.tile(np.eye(3), (len(gram), 1, 1)), np.arange(len(gram))
    i, j = np.divmod(gain.argmax(axis=1), 3)
    change[graphs, i, j] -= multiple[graphs, i, j]
    square_of_sums = np.square(_SIGNS @ vectors).sum(axis=2)  # (graphs, signs)
    replaced = (square_of_sums.min(axis=1) < 0.999 * square.max(axis=1)) & (gain.max(axis=1) <= 0)
    replaced &= (square > negligible[:, None]).all(axis=1)
    best = square_of_sums[replaced].argmin(axis=1)
    change[replaced, square[replaced].argmax(axis=1)] = _SIGNS[best]
    return change


def lattice_heights(cell: _Array, pbc: NDArray[np.bool_]) -> _Array:
    """Returns the distances, in Å, between neighboring lattice planes of reduced cells.

    The distances have the shape (..., 3). They are 0 for linearly dependent lattice vectors and
    infinite along non-periodic axes.

    Args:
        cell: matrices (..., 3, 3) with lattice vectors in Å as rows; finite along periodic axes.
        pbc: mask (..., 3), True for periodic axes.
    """
    rows = reduced_cell(cell.reshape(-1, 3, 3), pbc.reshape(-1, 3))[0].reshape(cell.shape)
    gram = rows @ np.swapaxes(rows, -1, -2) + np.eye(3) * ~pbc[..., None]
    j, k = np.array([1, 2, 0]), np.array([2, 0, 1])  # the other two vectors of each vector
    square_area = gram[..., j, j] * gram[..., k, k] - gram[..., j, k] ** 2
    square_volume = np.maximum(np.linalg.det(gram), 0.0)[..., None]
    heights = np.sqrt(square_volume / np.maximum(square_area, np.finfo(float).tiny))
    return np.where(pbc, heights, np.inf)
