"""Geometry of structures: molecules on slabs, coinciding atoms, and equal structures."""

import hashlib
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import Data, Tag, lattice_heights, reduced_cell

NONMETALS = (1, 6, 7, 8, 9, 15, 16, 17, 35, 53)  # H C N O F P S Cl Br I
BOND = 1.25  # length of the longest bond, relative to the sum of covalent radii
_FAR = 5.0  # Å between a molecule and its image, far beyond any bond
_GAP = 0.15  # Å, largest mismatch of the positions around a ring of bonds
TOO_NEAR = 0.1
"""Distance, in Å, below which atoms count as coinciding. The shortest bond (H2) is 0.74 Å long."""

_SIGNS = np.array([*product((1, -1), (1, -1, 1), (1, -1))])
_WAVES = _SIGNS * np.random.default_rng(0).integers(1, 7, (12, 3))  # periods of waves along axes
_CENTERS = np.random.default_rng(1).uniform(0, 2 * np.pi, (12, 3))  # phases of peaks
_SHARP = 6.0  # exponent of peaks; larger values make them narrower
_LENGTH = 20.0  # Å, longest wavelength along axes that are not periodic
_EQUAL = 3e-5  # tolerance of features; float32 changes them by 1e-5

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


class Survey:
    """Properties of structures, collected by calling an instance with each structure."""

    def __init__(self) -> None:
        self.sids: list[int] = []
        self.features: list[NDArray[np.float64]] = []  # of `fingerprint`
        self.overlapping: list[int] = []  # sids of structures with coinciding atoms
        self.one_tag: list[int] = []  # sids of structures whose slab atoms all have the same tag
        self.charged: list[int] = []  # indices of structures with a total charge other than 0
        self.untagged: list[int] = []  # indices of structures whose tags are all 0

    def __call__(self, record: Data) -> None:
        sid = int(record.sid)
        self.sids.append(sid)
        self.features.append(fingerprint(record))
        if atoms_coincide(record):
            self.overlapping.append(sid)
        if slab_has_one_tag(record):
            self.one_tag.append(sid)
        if record.charge.nan_to_num().any():
            self.charged.append(len(self.sids) - 1)
        if not record.tags.any():
            self.untagged.append(len(self.sids) - 1)


def atoms_coincide(record: Data) -> bool:
    """Returns True if two atoms, or their periodic images, are closer than `TOO_NEAR`."""
    from ase.geometry import complete_cell
    from scipy.spatial import cKDTree

    axes = record.pbc[0].numpy()
    basis = complete_cell(reduced_cell(record.cell.double().numpy(), record.pbc.numpy())[0][0])
    inverse = np.linalg.inv(basis)
    places = record.pos.double().numpy() @ inverse
    places[:, axes] %= 1
    if len(np.unique(places, axis=0)) < len(places):
        return True  # a search among equal points takes long
    for axis in np.flatnonzero(axes):  # images of the atoms near the lower side of the cell
        near = places[:, axis] < TOO_NEAR * np.linalg.norm(inverse[:, axis])
        places = np.concatenate([places, places[near] + np.eye(3)[axis]])
    points = places @ basis
    lengths, _ = cKDTree(points).query(points, 2, distance_upper_bound=TOO_NEAR)
    return bool(np.isfinite(lengths[:, 1]).any())


def fingerprint(record: Data) -> NDArray[np.float64]:
    """Returns 46 features, which are equal for equal structures up to rounding.

    The features are a hash of elements, periodic axes and total charge; the cell in Å; sums of
    waves over the atoms; and sums of peaks, for crystals whose waves cancel. They do not depend on
    the order of atoms, the choice of periodic images, or translations along open axes.
    """
    from ase.geometry import complete_cell

    numbers, axes = record.atomic_numbers.numpy(), record.pbc[0].numpy()
    content = np.sort(numbers).tobytes() + axes.tobytes()
    if charge := float(record.charge.nan_to_num()):
        content += np.float64(charge).tobytes()
    digest = hashlib.blake2b(content, digest_size=6).digest()
    lattice = np.where(axes[:, None], record.cell[0].double().numpy(), 0.0)
    coordinates = record.pos.double().numpy() @ np.linalg.inv(complete_cell(lattice))
    coordinates -= np.where(axes, 0.0, coordinates.mean(axis=0))
    phases = 2 * np.pi * np.where(axes, coordinates, coordinates / _LENGTH)  # (atoms, 3)
    weights = np.sqrt(numbers / numbers.sum())
    waves = weights @ np.exp(1j * phases @ _WAVES.T)  # (12,)
    peaks = weights @ np.exp(_SHARP * (np.cos(phases[:, None] - _CENTERS) - 1).sum(axis=2))  # (12,)
    digits = [int.from_bytes(digest)]
    return np.concatenate([digits, lattice.ravel(), waves.real, waves.imag, peaks])


def equal_structures(features: NDArray[np.float64]) -> NDArray[np.int64]:
    """Numbers the structures; equal ones share a number: (structures, 46) -> (structures,)."""
    projection = features[:, 1:] @ np.random.default_rng(1).normal(size=features.shape[1] - 1)
    order = np.lexsort((projection, features[:, 0]))  # equal structures become neighbors
    differ = (np.abs(np.diff(features[order], axis=0)) > _EQUAL).any(axis=1)
    numbers = np.empty(len(features), dtype=np.int64)
    numbers[order] = np.append(0, np.cumsum(differ))[: len(features)]
    return numbers


def overlaps_of(name: str, sids: Sequence[int] = (), count: int = 1) -> str:
    """Returns a warning that atoms coincide in the structures `sids`, out of `count` in total."""
    has, whose = "it has", "its energy is"
    if sids:
        has, whose = f"{len(sids)} of {count} structures have", "their energies are"
    first = f", for instance sid {sids[0]}" if sids else ""
    return (
        f"{name}: {has} two atoms closer than {TOO_NEAR} Å{first}; {whose} meaningless; remove "
        "duplicate atoms, which may be periodic images"
    )


def slab_has_one_tag(record: Data) -> bool:
    """Returns True if all atoms of a tagged slab are surface atoms, or all are subsurface atoms."""
    slab = record.tags[record.tags != Tag.ADSORBATE]
    return bool(record.tags.any()) and len(slab) > 0 and bool((slab == slab[0]).all())


def one_tagged(sids: Sequence[int], count: int) -> str:
    """Returns a warning about structures for which `slab_has_one_tag` is True."""
    return (
        f"slabs with a single tag: {len(sids)} of {count} systems; all slab atoms are surface (tag "
        f"1), or all are subsurface (tag 0), as in sid {sids[0]}; correct the tags, except those "
        "of single layers"
    )
