"""Molecules on slabs: connected atoms, and bonds to periodic images."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import Data, Tag, lattice_heights

NONMETALS = (1, 6, 7, 8, 9, 15, 16, 17, 35, 53)  # H C N O F P S Cl Br I
BOND = 1.25  # length of the longest bond, relative to the sum of covalent radii
_FAR = 5.0  # Å between a molecule and its image, far beyond any bond
_GAP = 0.15  # Å, largest mismatch of the positions around a ring of bonds

_Flags = NDArray[np.bool_]
_Numbers = NDArray[np.int64]


def adsorbates(record: Data) -> _Numbers:
    """Returns the index of the adsorbate of each atom, of shape (N,); -1 for slab atoms.

    Adsorbates are connected atoms with tag 2, numbered in the order of their first atoms.
    """
    from ase.data import covalent_radii
    from scipy.spatial.distance import cdist

    atoms = np.flatnonzero(record.tags.numpy() == Tag.ADSORBATE)
    labels = np.full(len(record.tags), -1)
    if len(atoms):
        numbers, pos, *lattice = _subset(record, atoms)
        radii = BOND * covalent_radii[numbers]
        i, j = np.nonzero(cdist(pos, pos) < np.add.outer(radii, radii))
        labels[atoms] = connected(i, j, len(atoms))
        if labels.max() > 0:  # there may be bonds across the boundary, which take longer to find
            i, j, _ = _bonds(numbers, pos, *lattice)
            labels[atoms] = connected(i, j, len(atoms))
    return labels


def touches_image(record: Data) -> bool:
    """Returns True if a molecule with tag 2 is bonded to its periodic image."""
    molecular = np.isin(record.atomic_numbers.numpy(), NONMETALS)
    atoms = np.flatnonzero(molecular & (record.tags.numpy() == Tag.ADSORBATE))
    numbers, pos, cell, pbc = _subset(record, atoms)
    if len(atoms) < 2:
        return False
    extent = np.linalg.norm(np.ptp(pos, axis=0))
    far = lattice_heights(cell, pbc).min() > extent + _FAR
    return not far and in_one_piece(numbers, pos, cell, pbc) is None


def in_one_piece(
    numbers: _Numbers, pos: NDArray[np.float64], cell: NDArray[np.float64], pbc: _Flags
) -> NDArray[np.float64] | None:
    """Shifts positions, in Å, by lattice vectors such that bonded atoms are neighbors.

    Returns None if bonds connect a molecule to its periodic image.
    """
    i, j, vectors = _bonds(numbers, pos, cell, pbc)
    first = np.searchsorted(i, np.arange(len(pos) + 1))  # index of the first bond of each atom
    moved, seen = pos.copy(), set[int]()
    for start in range(len(pos)):
        waiting = [start] if start not in seen else []
        while waiting:
            atom = waiting.pop()
            seen.add(atom)
            for k in range(first[atom], first[atom + 1]):
                if j[k] not in seen:
                    moved[j[k]] = moved[atom] + vectors[k]
                    waiting.append(int(j[k]))
    gaps = moved[i] + vectors - moved[j]
    return None if np.abs(gaps).max(initial=0.0) > _GAP else moved


def _subset(record: Data, atoms: _Numbers) -> tuple[Any, ...]:
    """Returns the atomic numbers and positions of `atoms`, the cell (3, 3), in Å, and pbc (3,)."""
    numbers, pos = record.atomic_numbers.numpy()[atoms], record.pos.double().numpy()[atoms]
    return numbers, pos, record.cell[0].double().numpy(), record.pbc[0].numpy()


def _bonds(numbers: _Numbers, pos: Any, cell: Any, pbc: Any) -> tuple[Any, ...]:
    """Returns both atoms of each bond and the vector between them, in Å, sorted by first atom."""
    from ase.data import covalent_radii
    from ase.geometry import complete_cell
    from ase.neighborlist import primitive_neighbor_list

    radii = BOND * covalent_radii[numbers]
    lattice = complete_cell(np.where(pbc[:, None], cell, 0.0))
    bonds: tuple[Any, ...] = primitive_neighbor_list("ijD", pbc, lattice, pos, radii)
    return bonds


def connected(i: _Numbers, j: _Numbers, count: int) -> _Numbers:
    """Returns labels of atoms, of shape (count,); connected atoms have equal labels."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(i)), (i, j)), (count, count))
    return np.asarray(connected_components(graph, directed=False)[1])
