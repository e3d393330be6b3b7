"""Sites on surfaces.

A site is a place where a probe, a sphere about as large as C, N or O, rests on the outside of a
slab: on one atom (top), in the saddle between two atoms (bridge), or on three or more atoms
(hollow). Unlike a triangulation of the topmost layer, this definition includes steps and open
surfaces. Places with the same elements at the same distances are the same site.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

if TYPE_CHECKING:
    from ase import Atoms


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

        self.plane = slab.cell.array[:2]
        self.inverse = np.linalg.pinv(self.plane)
        counts = np.ceil(_REACH * np.linalg.norm(self.inverse, axis=0)).astype(int)
        steps = sorted(product(*(range(-n, n + 1) for n in counts)), key=lambda one: one != (0, 0))
        self.images = np.array(steps) @ self.plane
        turns = np.floor(slab.positions @ self.inverse + 1e-6)  # atoms may be outside of the cell
        self.pos = (self.images[:, None] + slab.positions - turns @ self.plane).reshape(-1, 3)
        self.numbers = np.tile(slab.numbers, len(steps))
        self.covalent = covalent_radii[self.numbers]
        self.radii = self.covalent + _PROBE
        normal = unit(np.cross(*self.plane))
        self.up = normal * np.sign(normal @ slab.cell.array[2])

    def rests(self, count: int) -> _Array:
        """Returns the points (n, 3), in Å, where a probe can rest on one to three atoms.

        At least one of these atoms is among the first `count` atoms.
        """
        heights, tree, found = self.pos @ self.up, cKDTree(self.pos), []
        high = heights > heights.max() - _DEEP
        for i in np.flatnonzero(high[:count]):
            near = np.array(tree.query_ball_point(self.pos[i], 2 * self.radii.max()))
            near = near[high[near] & (near != i)]
            for size in range(3):
                groups = list(combinations(near, size))
                found.append(self._on(i, np.array(groups, int).reshape(len(groups), size)))
        points = np.concatenate(found)
        lengths, near = tree.query(points, min(16, len(self.pos)))
        return points[(lengths > self.radii[near] - 1e-3).all(axis=1)]

    def _on(self, i: np.int_, others: NDArray[np.int64]) -> _Array:
        """Returns the highest points where a probe touches atom i and one row of `others`."""
        apart = self.pos[others] - self.pos[i]
        inverse = np.linalg.pinv(apart)  # (n, 3, others)
        squares = self.radii[i] ** 2 - self.radii[others] ** 2 + (apart**2).sum(axis=2)
        center = (inverse @ squares[:, :, None] / 2)[:, :, 0]
        out = self.up - (inverse @ (apart @ self.up)[:, :, None])[:, :, 0]
        left = self.radii[i] ** 2 - (center**2).sum(axis=1)
        points = self.pos[i] + center + np.sqrt(left.clip(0))[:, None] * unit(out)
        lengths = np.linalg.norm(points[:, None] - self.pos[others], axis=2)
        exact = (np.abs(lengths - self.radii[others]) < 1e-3).all(axis=1)  # excludes atoms in line
        return points[exact & (left > 0) & (np.linalg.norm(out, axis=1) > 0.1)]

    def distances(self, points: _Array, numbers: NDArray[np.int64]) -> _Array:
        """Returns the sorted distances, in Å, from atoms at `points` (n, atoms, 3) to the slab."""
        parts, center = [], points.mean(axis=(0, 1))
        reach = _FAR + np.linalg.norm(points - center, axis=2).max(initial=0)
        near = np.linalg.norm(self.pos - center, axis=1) < reach
        for own, other in product(np.unique(numbers), np.unique(self.numbers)):
            group, rest = points[:, numbers == own], self.pos[near & (self.numbers == other)]
            lengths = cdist(group.reshape(-1, 3), rest).reshape(len(points), -1)
            most = int((lengths < _NEAR).sum(axis=1).max(initial=0))
            if most:
                parts.append(np.sort(np.partition(lengths, most - 1)[:, :most]).clip(max=_FAR))
        return np.concatenate(parts, axis=1)

    def lengths(self, away: _Array) -> _Array:
        """Returns the lengths, in Å, of vectors after shifts to the nearest image in the plane."""
        return np.linalg.norm(away - np.round(away @ self.inverse) @ self.plane, axis=1)

    def site(self, point: _Array) -> Site | None:
        """Returns the site at a point, or None if the probe cannot be lifted off."""
        from ase.symbols import Symbols

        away = self.pos - point
        touched = np.linalg.norm(away, axis=1) < _TOUCHING * self.radii
        normal = unit(-away[touched].sum(axis=0))
        along = away @ normal
        across = away - along[:, None] * normal
        wide = np.linalg.norm(across, axis=1)
        if normal @ self.up < 0.3 or ((along > 0.1) & (wide < 0.9 * self.radii)).any():
            return None
        below = (wide < 0.5) & (along < 0) & (along > -2 * self.radii)
        below &= ~touched | (touched.sum() > 1)
        outer = np.flatnonzero(touched & ~below)
        near = cdist(self.pos[outer], self.pos)
        near = near < _NEIGHBOR * np.add.outer(self.covalent[outer], self.covalent)
        name = _KINDS[min(touched.sum(), 3) - 1]
        name += f" {Symbols(self.numbers[outer]).get_chemical_formula()}"
        name += f" above {Symbols(self.numbers[below][:1])}" if below.any() else ""
        name += f" ({' '.join(map(str, np.sort(near.sum(axis=1) - 1)))})"
        around = np.flatnonzero((wide > 0.5) & (along > -2 * self.radii))
        keys = (-self.numbers[around], -along[around].round(1), wide[around].round(1))
        first = unit(across[around[np.lexsort(keys)[0]]])
        return Site(name, point, np.array([first, np.cross(normal, first), normal]))


def sites(slab: Atoms) -> list[Site]:
    """Returns the distinct sites on a slab that is periodic along its first two cell vectors.

    Of equivalent sites, only the site closest to the center of the cell is returned.
    """
    tiles = Tiles(slab)
    points = tiles.rests(len(slab))
    places = points[distinct(points, 0.01, tiles.lengths)]
    found = list(filter(None, map(tiles.site, places)))
    points = np.array([one.point for one in found])
    rows = tiles.distances(points[:, None], np.zeros(1, int))
    repeats = (cdist(rows, rows, "chebyshev") < _SAME).sum(axis=1)
    kinds = np.array([_KINDS.index(one.name.split()[0]) for one in found])
    heights = (points @ tiles.up).round(3)
    aside = np.abs(points @ tiles.inverse - 0.5).sum(axis=1).round(2)
    order = np.lexsort((aside, -heights, -kinds, repeats))
    order = order[distinct(points[order], _SAME_PLACE, tiles.lengths)]
    order = order[distinct(rows[order])]
    return [found[i] for i in order[np.lexsort((-heights[order], kinds[order]))]]


def unit(vectors: _Array) -> _Array:
    """Returns vectors (..., 3) divided by their lengths."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-9)


def _largest(differences: _Array) -> _Array:
    return np.abs(differences).max(axis=1, initial=0)


def distinct(
    rows: _Array, limit: float = _SAME, size: Callable[[_Array], _Array] = _largest
) -> list[int]:
    """Returns the indices of rows that differ from all earlier results by more than `limit`."""
    left, found = np.arange(len(rows)), []
    while len(left):
        found.append(int(left[0]))
        left = left[size(rows[left] - rows[left[0]]) > limit]
    return found
