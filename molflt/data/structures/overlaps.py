"""Atoms at one place: no structure of nature has them, and no model has learned what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from molflt.atoms import lattice_heights, reduced_cell

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["TOO_NEAR", "atoms_coincide", "overlaps_of"]

TOO_NEAR = 0.1
"""Å; the shortest bond there is, that of hydrogen, is 0.74 Å."""

_SHIFTS = np.array([*product((0.0, 0.5), repeat=3)])
_PLACES = np.array([1, 1_000_003, 1_000_003**2])  # more than there are bins along an axis


def atoms_coincide(record: Data) -> bool:
    """Whether two atoms are closer than `TOO_NEAR`, periodic images included.

    Atoms are sorted into bins twice as wide as that, in eight grids shifted by half a bin: any two
    that are so close share a bin of one of these. The time grows as the number of atoms.
    """
    pos, axes = record.pos.double().numpy(), record.pbc[0].numpy()
    basis = reduced_cell(record.cell.double().numpy(), record.pbc.numpy())[0][0]
    normals = np.linalg.qr(basis[axes].T, mode="complete")[0].T
    basis[~axes] = normals[axes.sum() :]  # along open axes coordinates are in Å
    heights = lattice_heights(basis[None], np.ones((1, 3), dtype=bool))[0]
    inverse, bins = np.linalg.inv(basis), heights / (2 * TOO_NEAR)
    bins[axes] = np.floor(bins[axes])
    cells = np.floor((pos @ inverse * bins) + _SHIFTS[:, None]).astype(np.int64)
    cells[..., axes] %= bins[axes].astype(np.int64)
    keys = cells @ _PLACES  # (shifts, atoms)
    order = keys.argsort(axis=1)
    shared = np.diff(np.take_along_axis(keys, order, axis=1), axis=1) == 0
    apart = (pos[order[:, :-1][shared]] - pos[order[:, 1:][shared]]) @ inverse
    apart[:, axes] -= np.round(apart[:, axes])
    return bool((np.linalg.norm(apart @ basis, axis=1) < TOO_NEAR).any())


def overlaps_of(name: str, sids: Sequence[int] = (), count: int = 1) -> str:
    """What to say of structures with two atoms at one place.

    Args:
        name: of the structure, or of what holds several.
        sids: theirs; nothing for a single structure.
        count: structures in all.
    """
    has, whose = "it has", "its energy means"
    if sids:
        has, whose = f"{len(sids)} of {count} structures have", "their energies mean"
    first = f", for instance sid {sids[0]}" if sids else ""
    return (
        f"{name}: {has} two atoms closer than {TOO_NEAR} Å{first}; {whose} nothing; look for atoms "
        "that are there twice, also in a periodic image"
    )
