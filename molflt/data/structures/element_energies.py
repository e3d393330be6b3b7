"""Linear references of total energies: an energy per element, by least squares."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import MAX_ATOMIC_NUMBER
from molflt.data.structures.base import Structures
from molflt.data.structures.labels import beyond_rounding

__all__ = ["ElementEnergies", "fit_element_energies"]

_NEGLIGIBLE = 1e-10  # of the largest singular value


class ElementEnergies(NamedTuple):
    """What :func:`fit_element_energies` found.

    Attributes:
        energies: by atomic number, (119,), eV; 0 for elements that no structure has.
        present: by atomic number, (119,) bool, which elements some structure has.
        undetermined: how many combinations of elements the compositions leave open, in which the
            energies are then as small as they can be.
        mean: of what the references leave of the labels, eV.
        std: its standard deviation, eV; 0 where that is rounding.
    """

    energies: NDArray[np.float64]
    present: NDArray[np.bool_]
    undetermined: int
    mean: float
    std: float


def fit_element_energies(dataset: Structures) -> ElementEnergies:
    """Fits y_relaxed = sum over atoms of the energy of their element.

    Least squares of smallest norm, from the triangle of a QR decomposition that takes structures in
    blocks: exact in float64 also where energies are 1e5 eV, in memory that does not grow.

    Args:
        dataset: structures with labels, all of them finite.
    """
    columns = MAX_ATOMIC_NUMBER + 1
    labels, count = dataset.y_relaxed, len(dataset)
    present = np.zeros(columns, dtype=bool)
    triangle = np.zeros((0, columns + 2))  # of compositions, ones and labels
    for indices, atoms in dataset.composition_blocks():
        present |= atoms.any(axis=0)
        block = np.column_stack([atoms, np.ones(len(indices)), labels[indices]])
        triangle = np.asarray(np.linalg.qr(np.vstack([triangle, block]), mode="r"))
    found, _, rank, _ = np.linalg.lstsq(triangle[:, :-2][:, present], triangle[:, -1], _NEGLIGIBLE)
    energies = np.zeros(columns)
    energies[present] = found
    # an orthogonal matrix times the residuals, and times ones: their products stay the same
    left, ones = triangle[:, -1] - triangle[:, :-2] @ energies, triangle[:, -2]
    mean = float(left @ ones / count)
    spread = float(np.linalg.norm(left - mean * ones) / np.sqrt(count))
    spread = beyond_rounding(spread, labels)
    return ElementEnergies(energies, present, int(present.sum() - rank), mean, spread)
