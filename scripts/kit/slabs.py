"""Slabs with an adsorbate in other cells: repeated, lifted, and with a second adsorbate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.geometry import get_distances

from molflt.atoms import Tag

APART = 10.0  # Å between two adsorbates on one slab


class System(NamedTuple):
    """A slab below its vacuum, Å, and an adsorbate that no cell boundary cuts."""

    slab: Atoms
    adsorbate: Atoms
    vacuum: float

    @property
    def whole(self) -> Atoms:
        return self.slab + self.adsorbate


def separate(atoms: Atoms) -> System:
    """Moves atoms to other periodic images, and parts the adsorbate from the slab."""
    atoms = atoms.copy()
    scaled = atoms.get_scaled_positions(wrap=False)[:, 2]
    order = np.sort(scaled % 1)
    gaps = np.diff(order, append=order[0] + 1)
    start = order[(gaps.argmax() + 1) % len(order)] - 1e-6
    atoms.positions += np.round((scaled - start) % 1 + start - scaled)[:, None] * atoms.cell[2]
    mask = atoms.get_tags() == Tag.ADSORBATE
    adsorbate = atoms[mask]
    done, left = [0], list(range(1, len(adsorbate)))
    while left:  # attach the nearest atom by its nearest image
        pos = adsorbate.positions
        vectors, lengths = get_distances(pos[done], pos[left], atoms.cell, atoms.pbc)
        i, j = np.unravel_index(lengths.argmin(), lengths.shape)
        adsorbate.positions[left[j]] = pos[done[i]] + vectors[i, j]
        done.append(left.pop(j))
    vacuum = gaps.max() / np.linalg.norm(atoms.cell.reciprocal()[2])
    return System(atoms[~mask], adsorbate, float(vacuum))


def higher(atoms: Atoms, height: float, lift: float = 0.0) -> Atoms:
    """Adds to the height of the cell, Å, and lifts the adsorbate."""
    atoms = atoms.copy()
    up = atoms.cell.reciprocal()[2]  # normal of the surface
    up /= np.linalg.norm(up)
    atoms.cell[2] += height * up
    atoms.positions[atoms.get_tags() == Tag.ADSORBATE] += lift * up
    return atoms


def pair(one: System, other: System) -> tuple[Atoms, Atoms, Atoms] | None:
    """Two adsorbates on one slab, and each alone on it, as close to each other as `APART` allows.

    The slab is the smallest of 2x2 to 5x5 that has space for both; None if all are too small.
    """
    for n in range(2, 6):
        large, places = one.slab.repeat((n, n, 1)), []
        for i, j in product(range(n), repeat=2):
            moved = other.adsorbate.copy()
            moved.positions += i * one.slab.cell[0] + j * one.slab.cell[1]
            both = one.adsorbate.positions, moved.positions
            apart = get_distances(*both, large.cell, large.pbc)[1].min()
            if apart >= APART:
                places.append((apart, i, j, moved))
        if places:
            *_, moved = min(places, key=lambda place: place[:3])
            return large + one.adsorbate + moved, large + one.adsorbate, large + moved
    return None


def pairs(systems: Sequence[System]) -> list[tuple[Atoms, Atoms, Atoms]]:
    """Each system with the next one on the same slab, if there is a place for both."""
    found = []
    for i, one in enumerate(systems):
        others = (other for other in systems[i + 1 :] if _same(one.slab, other.slab))
        other = next(others, None)
        if other is not None and (atoms := pair(one, other)) is not None:
            found.append(atoms)
    return found


def _same(one: Atoms, other: Atoms) -> bool:
    close = len(one) == len(other) and np.allclose(one.positions, other.positions, atol=0.01)
    cells = np.allclose(one.cell.array, other.cell.array, atol=0.01)
    return close and cells and bool((one.numbers == other.numbers).all())
