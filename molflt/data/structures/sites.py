"""Sites on surfaces.

A site is a place where a probe, a sphere about as large as C, N or O, rests on the outside of a
slab: on one atom (top), in the saddle between two atoms (bridge), or on three or more atoms
(hollow). Unlike a triangulation of the topmost layer, this definition includes steps and open
surfaces. Places with the same elements at the same distances are the same site.
"""

from collections.abc import Callable
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

from molflt.atoms import Atoms

_PROBE = 0.75  # Å
_TOUCHING = 1.08  # largest distance of a touched atom, relative to its radius plus the probe's
_NEIGHBOR = 1.25  # largest distance of neighbors, relative to the sum of covalent radii
_SAME_PLACE = 0.4  # Å; of two closer places, only the more symmetric place is kept
_SAME = 0.1  # Å, largest difference between distances of equal sites or placements
_NEAR, _FAR = 6.0, 8.0  # Å; distances below the first are compared, and clipped to the second
_REACH = 12.0  # Å, range around the cell in which atoms are considered
_DEEP = 6.0  # Å, largest depth of sites below the highest atom
_KINDS = ("top", "bridge", "hollow")

_Array = NDArray[np.float64]


class Site(NamedTuple):
    """Place on a surface where atoms can bind."""

    name: str
    """touched atoms, atom below and coordination numbers, such as "hollow Cu3 above Cu (9 9 9)\""""
    point: _Array
    """center of the probe (3,), in Å"""
    axes: _Array
    """two directions along the surface and its outward normal, as rows (3, 3)"""


class Tiles:
    """Atoms of a slab, followed by the atoms of its periodic images in the plane."""

    def __init__(self, slab: Atoms) -> None:
        from ase.data import covalent_radii

        self.plane = slab.cell.array[:2]  # vectors along the surface, as rows, in Å
        self.inverse = np.linalg.pinv(self.plane)  # (3, 2)
        reach = np.ceil(_REACH * np.linalg.norm(self.inverse, axis=0)).astype(int)  # in cells
        cells = list(product(*(range(-n, n + 1) for n in reach)))
        cells.sort(key=lambda cell: cell != (0, 0))  # begins with the slab itself
        self.images = np.array(cells) @ self.plane  # shifts (images, 3), in Å
        turns = np.floor(slab.positions @ self.inverse + 1e-6)  # atoms may be outside of the cell
        self.pos = (self.images[:, None] + slab.positions - turns @ self.plane).reshape(-1, 3)
        self.numbers = np.tile(slab.numbers, len(cells))
        self.covalent = covalent_radii[self.numbers]
        self.radii = self.covalent + _PROBE  # distances of a probe that touches the atoms, in Å
        normal = unit(np.cross(*self.plane))
        self.up = normal * np.sign(normal @ slab.cell.array[2])

    def rests(self, count: int) -> _Array:
        """Returns the points (n, 3), in Å, where a probe can rest on one to three atoms.

        At least one of these atoms is among the first `count` atoms.
        """
        heights, tree, parts = self.pos @ self.up, cKDTree(self.pos), []
        is_high = heights > heights.max() - _DEEP
        for i in np.flatnonzero(is_high[:count]):
            near = np.array(tree.query_ball_point(self.pos[i], 2 * self.radii.max()))
            near = near[is_high[near] & (near != i)]
            for size in range(3):
                groups = list(combinations(near, size))
                parts.append(self._on(i, np.array(groups, int).reshape(len(groups), size)))
        points = np.concatenate(parts)
        lengths, near = tree.query(points, min(16, len(self.pos)))  # each (points, 16)
        return points[(lengths > self.radii[near] - 1e-3).all(axis=1)]  # outside of all atoms

    def _on(self, i: np.int_, others: NDArray[np.int64]) -> _Array:
        """Returns the highest points where a probe touches atom i and one row of `others`.

        `others` has shape (n, k), with k from 0 to 2; the result has up to n rows, (..., 3).
        """
        vectors = self.pos[others] - self.pos[i]  # (n, k, 3)
        inverse = np.linalg.pinv(vectors)  # (n, 3, k)
        squares = self.radii[i] ** 2 - self.radii[others] ** 2 + (vectors**2).sum(axis=2)
        center = (inverse @ squares[:, :, None] / 2)[:, :, 0]  # where the spheres intersect
        # the part of `up` that is perpendicular to all vectors
        outward = self.up - (inverse @ (vectors @ self.up)[:, :, None])[:, :, 0]
        rise_squared = self.radii[i] ** 2 - (center**2).sum(axis=1)
        points = self.pos[i] + center + np.sqrt(rise_squared.clip(0))[:, None] * unit(outward)
        lengths = np.linalg.norm(points[:, None] - self.pos[others], axis=2)
        exact = (np.abs(lengths - self.radii[others]) < 1e-3).all(axis=1)  # excludes atoms in line
        return points[exact & (rise_squared > 0) & (np.linalg.norm(outward, axis=1) > 0.1)]

    def distances(self, points: _Array, numbers: NDArray[np.int64]) -> _Array:
        """Returns the sorted distances, in Å, from atoms at `points` (n, atoms, 3) to the slab."""
        parts, center = [], points.mean(axis=(0, 1))
        reach = _FAR + np.linalg.norm(points - center, axis=2).max(initial=0)
        near = np.linalg.norm(self.pos - center, axis=1) < reach
        for element, of_slab in product(np.unique(numbers), np.unique(self.numbers)):
            atoms = points[:, numbers == element].reshape(-1, 3)
            lengths = cdist(atoms, self.pos[near & (self.numbers == of_slab)])
            lengths = lengths.reshape(len(points), -1)
            count = int((lengths < _NEAR).sum(axis=1).max(initial=0))
            if count:
                parts.append(np.sort(np.partition(lengths, count - 1)[:, :count]).clip(max=_FAR))
        return np.concatenate(parts, axis=1)

    def lengths(self, vectors: _Array) -> _Array:
        """Returns the lengths, in Å, of vectors after shifts to the nearest image in the plane."""
        return np.linalg.norm(vectors - np.round(vectors @ self.inverse) @ self.plane, axis=1)

    def site(self, point: _Array) -> Site | None:
        """Returns the site at a point, or None if the probe cannot be lifted off."""
        from ase.symbols import Symbols

        vectors = self.pos - point
        touched = np.linalg.norm(vectors, axis=1) < _TOUCHING * self.radii
        normal = unit(-vectors[touched].sum(axis=0))
        heights = vectors @ normal  # relative to the probe, in Å
        lateral = vectors - heights[:, None] * normal
        radial = np.linalg.norm(lateral, axis=1)
        blocks = (heights > 0.1) & (radial < 0.9 * self.radii)
        if normal @ self.up < 0.3 or blocks.any():
            return None
        below = (radial < 0.5) & (heights < 0) & (heights > -2 * self.radii)
        if touched.sum() == 1:  # on top of an atom, which is not below the site
            below &= ~touched
        outer = np.flatnonzero(touched & ~below)
        bonded = cdist(self.pos[outer], self.pos)
        bonded = bonded < _NEIGHBOR * np.add.outer(self.covalent[outer], self.covalent)
        name = _KINDS[min(touched.sum(), 3) - 1]
        name += f" {Symbols(self.numbers[outer]).get_chemical_formula()}"
        if below.any():
            name += f" above {Symbols(self.numbers[below][:1])}"
        coordination = np.sort(bonded.sum(axis=1) - 1)  # an atom is not its own neighbor
        name += f" ({' '.join(map(str, coordination))})"
        around = np.flatnonzero((radial > 0.5) & (heights > -2 * self.radii))
        keys = (-self.numbers[around], -heights[around].round(1), radial[around].round(1))
        first = unit(lateral[around[np.lexsort(keys)[0]]])
        return Site(name, point, np.array([first, np.cross(normal, first), normal]))


def sites(slab: Atoms) -> list[Site]:
    """Returns the distinct sites on a slab that is periodic along its first two cell vectors.

    Of equivalent sites, only the site closest to the center of the cell is returned.
    """
    tiles = Tiles(slab)
    points = tiles.rests(len(slab))
    points = points[distinct(points, 0.01, tiles.lengths)]
    candidates = list(filter(None, map(tiles.site, points)))
    points = np.array([site.point for site in candidates])
    distances = tiles.distances(points[:, None], np.zeros(1, int))
    repeats = (cdist(distances, distances, "chebyshev") < _SAME).sum(axis=1)  # fewer: symmetric
    kinds = np.array([_KINDS.index(site.name.split()[0]) for site in candidates])
    heights = (points @ tiles.up).round(3)
    off_center = np.abs(points @ tiles.inverse - 0.5).sum(axis=1).round(2)
    order = np.lexsort((off_center, -heights, -kinds, repeats))
    order = order[distinct(points[order], _SAME_PLACE, tiles.lengths)]
    order = order[distinct(distances[order])]
    return [candidates[i] for i in order[np.lexsort((-heights[order], kinds[order]))]]


def unit(vectors: _Array) -> _Array:
    """Returns vectors (..., 3) divided by their lengths."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-9)


def _largest(differences: _Array) -> _Array:
    return np.abs(differences).max(axis=1, initial=0)


def distinct(
    rows: _Array, limit: float = _SAME, size: Callable[[_Array], _Array] = _largest
) -> list[int]:
    """Returns the indices of rows that differ from all earlier results by more than `limit`."""
    remaining, results = np.arange(len(rows)), []
    while len(remaining):
        results.append(int(remaining[0]))
        remaining = remaining[size(rows[remaining] - rows[remaining[0]]) > limit]
    return results
