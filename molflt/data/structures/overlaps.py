"""Coinciding atoms and equal structures, and a survey that collects them from a data set."""

import hashlib
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import Data, reduced_cell
from molflt.data.structures.tags import slab_has_one_tag

TOO_NEAR = 0.1
"""Distance, in Å, below which atoms count as coinciding. The shortest bond (H2) is 0.74 Å long."""

_SIGNS = np.array([*product((1, -1), (1, -1, 1), (1, -1))])
_WAVES = _SIGNS * np.random.default_rng(0).integers(1, 7, (12, 3))  # periods of waves along axes
_CENTERS = np.random.default_rng(1).uniform(0, 2 * np.pi, (12, 3))  # phases of peaks
_SHARP = 6.0  # exponent of peaks; larger values make them narrower
_LENGTH = 20.0  # Å, longest wavelength along axes that are not periodic
_EQUAL = 3e-5  # tolerance of features; float32 changes them by 1e-5


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
    the order of atoms or on the choice of periodic images.
    """
    from ase.geometry import complete_cell

    numbers, axes = record.atomic_numbers.numpy(), record.pbc[0].numpy()
    content = np.sort(numbers).tobytes() + axes.tobytes()
    if charge := float(record.charge.nan_to_num()):
        content += np.float64(charge).tobytes()
    digest = hashlib.blake2b(content, digest_size=6).digest()
    lattice = np.where(axes[:, None], record.cell[0].double().numpy(), 0.0)
    coordinates = record.pos.double().numpy() @ np.linalg.inv(complete_cell(lattice))
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
