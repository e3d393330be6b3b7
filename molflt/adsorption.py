"""Placements of molecules on surfaces: sites, orientations, rotations and heights.

A site is a place where a probe, a sphere with the covalent radius of C, N and O, rests on the
outside of a slab: on one atom (top), in the saddle between two (bridge), or on three or more
(hollow). Unlike a triangulation of the topmost layer, this includes steps and open surfaces. Places
with the same elements at the same distances count as one site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation

from molflt.atoms import Tag
from molflt.data.structures.ase_fields import fixed_atoms
from molflt.data.structures.records import make_record
from molflt.data.structures.tags import guess_tags

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Site", "molecule", "placements", "ranked", "sites", "varied"]

_PROBE = 0.75  # Å
_TOUCHING = 1.08  # times the sum of the radii of an atom and the probe
_NEIGHBOR = 1.25  # times the sum of covalent radii
_SAME_PLACE = 0.4  # Å between two places, of which the more symmetric one is kept
_SAME = 0.1  # Å, largest difference between distances of equal sites or placements
_NEAR, _FAR = 6.0, 8.0  # Å: distances to compare, and their upper bound
_REACH = 12.0  # Å around the cell in which atoms are considered
_DEEP = 6.0  # Å below the highest atom: no sites
_VACUUM = 4.5  # Å; crystals have smaller gaps
_CONTACT, _CONTACT_H = 0.1, 0.5  # Å added to radii in contacts with the slab; H in molecules
_APART, _ROOF = 1.0, 3.0  # Å added to radii between images of the molecule; below the next slab
_PAIR = 2.6  # Å between two atoms that may bind side by side, such as both O of HCOO

_Array = NDArray[np.float64]


class Site(NamedTuple):
    """A place on a surface where atoms can bind.

    Attributes:
        name: such as "hollow Cu3 above Cu (9 9 9)": the atoms that the probe touches, an atom
            directly below, and the number of slab neighbors of each touched atom.
        point: center of the probe, (3,), Å.
        axes: (3, 3), rows: two directions along the surface, and its outward normal.
    """

    name: str
    point: _Array
    axes: _Array


class _Tiles:
    """Atoms of a slab, and then of its images in the plane."""

    def __init__(self, slab: Atoms) -> None:
        from ase.data import covalent_radii

        self.plane = slab.cell.array[:2]
        self.inverse = np.linalg.pinv(self.plane)
        counts = np.ceil(_REACH * np.linalg.norm(self.inverse, axis=0)).astype(int)
        steps = sorted(product(*(range(-n, n + 1) for n in counts)), key=lambda one: one != (0, 0))
        self.images = np.array(steps) @ self.plane
        self.pos = (self.images[:, None] + slab.positions).reshape(-1, 3)
        self.numbers = np.tile(slab.numbers, len(steps))
        self.covalent = covalent_radii[self.numbers]
        self.radii = self.covalent + _PROBE
        self.tree = cKDTree(self.pos)
        self.count = len(slab)
        normal = _unit(np.cross(*self.plane))
        self.up = normal * np.sign(normal @ slab.cell.array[2])

    def rests(self) -> _Array:
        """Returns the places (n, 3) where a probe lies on one, two or three atoms of the slab."""
        heights, found = self.pos @ self.up, []
        high = heights > heights.max() - _DEEP
        for i in np.flatnonzero(high[: self.count]):
            near = np.array(self.tree.query_ball_point(self.pos[i], 2 * self.radii.max()))
            near = near[high[near] & (near != i)]
            for size in range(3):
                groups = list(combinations(near, size))
                found.append(self._on(i, np.array(groups, int).reshape(len(groups), size)))
        points = np.concatenate(found)
        lengths, near = self.tree.query(points, min(16, len(self.pos)))
        return points[(lengths > self.radii[near] - 1e-3).all(axis=1)]

    def _on(self, i: np.int_, others: NDArray[np.int64]) -> _Array:
        """Returns the highest places where a probe touches atom i and (n, 0 to 2) others."""
        apart = self.pos[others] - self.pos[i]
        inverse = np.linalg.pinv(apart)  # (n, 3, others)
        squares = self.radii[i] ** 2 - self.radii[others] ** 2 + (apart**2).sum(axis=2)
        center = (inverse @ squares[:, :, None] / 2)[:, :, 0]
        out = self.up - (inverse @ (apart @ self.up)[:, :, None])[:, :, 0]
        left = self.radii[i] ** 2 - (center**2).sum(axis=1)
        points = self.pos[i] + center + np.sqrt(left.clip(0))[:, None] * _unit(out)
        lengths = np.linalg.norm(points[:, None] - self.pos[others], axis=2)
        exact = (np.abs(lengths - self.radii[others]) < 1e-3).all(axis=1)  # not atoms in line
        return points[exact & (left > 0) & (np.linalg.norm(out, axis=1) > 0.1)]

    def distances(self, points: _Array, numbers: NDArray[np.int64]) -> _Array:
        """Returns sorted distances to the slab, Å, of points (n, atoms, 3) with these elements."""
        parts = []
        for own, other in product(np.unique(numbers), np.unique(self.numbers)):
            group, rest = points[:, numbers == own], self.pos[self.numbers == other]
            lengths = cdist(group.reshape(-1, 3), rest).clip(max=_FAR)
            lengths = lengths.reshape(len(points), group.shape[1] * len(rest))
            most = int((lengths < _NEAR).sum(axis=1).max(initial=0))
            parts.append(np.sort(lengths, axis=1)[:, :most])
        return np.concatenate(parts, axis=1)

    def apart(self, points: _Array, distance: float) -> list[int]:
        """Returns the indices of points farther than `distance`, Å, from those before them."""
        kept: list[int] = []
        for i, point in enumerate(points):
            away = points[kept] - point
            away -= np.round(away @ self.inverse) @ self.plane
            if (np.linalg.norm(away, axis=1) > distance).all():
                kept.append(i)
        return kept

    def site(self, point: _Array) -> Site | None:
        """Returns the site at a place; None if the probe cannot leave it."""
        from ase.symbols import Symbols

        away = self.pos - point
        touched = np.linalg.norm(away, axis=1) < _TOUCHING * self.radii
        normal = _unit(-away[touched].sum(axis=0))
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
        name = ("top", "bridge", "hollow")[min(touched.sum(), 3) - 1]
        name += f" {Symbols(self.numbers[outer]).get_chemical_formula()}"
        name += f" above {Symbols(self.numbers[below][:1])}" if below.any() else ""
        name += f" ({' '.join(map(str, np.sort(near.sum(axis=1) - 1)))})"
        around = np.flatnonzero((wide > 0.5) & (along > -2 * self.radii))
        keys = (-self.numbers[around], -along[around].round(1), wide[around].round(1))
        first = _unit(across[around[np.lexsort(keys)[0]]])
        return Site(name, point, np.array([first, np.cross(normal, first), normal]))


def sites(slab: Atoms) -> list[Site]:
    """Returns the distinct sites on a slab that is periodic along its first two cell vectors.

    Of equivalent sites, the one near the center of the cell is returned.
    """
    tiles = _Tiles(slab)
    points = tiles.rests()
    found = [one for i in tiles.apart(points, 0.01) if (one := tiles.site(points[i]))]
    points = np.array([one.point for one in found])
    rows = tiles.distances(points[:, None], np.zeros(1, int))
    repeats = (cdist(rows, rows, "chebyshev") < _SAME).sum(axis=1)
    kinds = np.array([("top", "bridge", "hollow").index(one.name.split()[0]) for one in found])
    heights = (points @ tiles.up).round(3)
    aside = np.abs(points @ tiles.inverse - 0.5).sum(axis=1).round(2)
    order = np.lexsort((aside, -heights, -kinds, repeats))
    order = order[tiles.apart(points[order], _SAME_PLACE)]
    order = order[_distinct(rows[order])]
    return [found[i] for i in order[np.lexsort((-heights[order], kinds[order]))]]


def _unit(vectors: _Array) -> _Array:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-9)


def _distinct(rows: _Array) -> list[int]:
    """Returns the indices of rows that differ from those before them."""
    left, found = np.arange(len(rows)), []
    while len(left):
        found.append(int(left[0]))
        left = left[np.abs(rows[left] - rows[left[0]]).max(axis=1, initial=0) > _SAME]
    return found


def molecule(name: str | Path) -> Atoms:
    """Returns a molecule by its name.

    Args:
        name: name in `ase.build.molecule`, such as CH3OH or CO (carbon monoxide); an element; a
            file; or smiles:TEXT, such as smiles:CCO, which needs RDKit.
    """
    from ase import Atoms
    from ase.build import molecule as of_ase
    from ase.io import read

    kind, _, text = str(name).partition("smiles:")
    if text:
        from rdkit.Chem import AddHs, AllChem, MolFromSmiles

        made = MolFromSmiles(text)
        if made is None or AllChem.EmbedMolecule(made := AddHs(made), randomSeed=0):
            raise ValueError(f"molecule {name}: RDKit finds no structure of this SMILES")
        AllChem.MMFFOptimizeMolecule(made)
        symbols = [atom.GetSymbol() for atom in made.GetAtoms()]
        return Atoms(symbols, made.GetConformer().GetPositions())
    try:
        found: Any = read(kind) if Path(kind).is_file() else of_ase(kind)
    except KeyError:
        raise ValueError(
            f"molecule {name}: no such file or name; expected a name of ase.build.molecule, an "
            "element, a file, or smiles:TEXT"
        ) from None
    return Atoms(found.numbers, found.positions)


def placements(
    slabs: Atoms | Sequence[Atoms],
    adsorbate: Atoms | str | Path,
    *,
    rotation: float = 30.0,
    share: tuple[float, float] | None = None,
) -> list[Atoms]:
    """Returns all distinct placements of a rigid molecule on the sites of slabs.

    Each atom, each pair of non-hydrogen neighbors, and each end of the three principal axes point
    toward each site in turn. The molecule is rotated about the outward normal, and lowered until it
    touches the slab. Placements near an image of the molecule or of the slab are left out.

    The results are periodic along all axes. Their tags are 0 subsurface, 1 surface, 2 adsorbate. If
    no atom of a slab is fixed, its lower half is fixed. `info` has slab (its number), site (its
    number and name), orientation, rotation (degrees) and height (of the lowest atom above the slab,
    Å).

    Args:
        slabs: slabs with vacuum along their third cell vector.
        adsorbate: molecule, or a name for `molecule`.
        rotation: step of the rotation, degrees.
        share: smallest and largest share of surface atoms in a slab, `model.domain.surface`; see
            `molflt.data.structures.tags.guess_tags`.
    """
    from ase import Atoms

    own = adsorbate if isinstance(adsorbate, Atoms) else molecule(adsorbate)
    found: list[Atoms] = []
    for number, given in enumerate([slabs] if isinstance(slabs, Atoms) else slabs):
        slab = _prepared(given)
        tiles, first = _Tiles(slab), len(found)
        heights = slab.positions @ tiles.up
        roof = heights.min() + tiles.up @ slab.cell.array[2] - _ROOF
        for place, one in enumerate(sites(slab)):
            site = f"{place} {one.name}"
            notes, points = _at(one, own, np.arange(0, 359.99, rotation), tiles, roof)
            for i in _distinct(tiles.distances(points, own.numbers)):
                whole = slab + Atoms(own.numbers, points[i], tags=[Tag.ADSORBATE] * len(own))
                height = round(float((points[i] @ tiles.up).min() - heights.max()), 3)
                whole.info = {"slab": number, "site": site, **notes[i], "height": height}
                found.append(whole)
        if len(found) == first:
            raise ValueError(
                f"{own.symbols}: too large for the cell of slab {number}, {slab.symbols}; expected "
                "its images apart by more than bonds, and vacuum above it; repeat the slab, or add "
                "vacuum"
            )
        _tag(found[first:], len(slab), share)
    return found


def _at(
    site: Site, own: Atoms, turns: _Array, tiles: _Tiles, roof: float
) -> tuple[list[dict[str, Any]], _Array]:
    """Returns orientation and rotation of the placements at a site, and points (n, atoms, 3)."""
    from ase.data import covalent_radii

    radii = covalent_radii[own.numbers]
    loose = np.where((own.numbers == 1) & (len(own) > 1), _CONTACT_H, _CONTACT)
    contact = np.add.outer(radii + loose, tiles.covalent)
    least = np.add.outer(radii, radii) + _APART
    turned = Rotation.from_rotvec(np.outer(turns, [0, 0, -1]), degrees=True).as_matrix()
    notes, found = [], []
    for name, pose in _poses(own):
        points = pose @ turned @ site.axes + site.point
        away = points[:, :, None] - tiles.pos
        along = away @ site.axes[2]
        left = contact**2 - (away**2).sum(axis=-1) + along**2
        lift = np.where(left > 0, np.sqrt(left.clip(0)) - along, -np.inf).max(axis=(1, 2))
        points += lift[:, None, None] * site.axes[2]
        own_images = (points[:, :, None] - points[:, None])[:, :, :, None] + tiles.images[1:]
        free = (np.linalg.norm(own_images, axis=-1).min(axis=-1) > least).all(axis=(1, 2))
        free &= (points @ tiles.up).max(axis=1) < roof
        found.append(points[free])
        notes += [{"orientation": name, "rotation": float(turn)} for turn in turns[free]]
    return notes, np.concatenate(found)


def _poses(own: Atoms) -> Iterator[tuple[str, _Array]]:
    """Yields names and positions (atoms, 3); the origin is above a site, the third axis is up."""
    pos, center = own.positions, own.positions.mean(axis=0)
    names = [f"{symbol}{i}" for i, symbol in enumerate(own.symbols)]
    for i, name in enumerate(names):
        if len(own) == 1 or np.linalg.norm(center - pos[i]) > 0.1:
            yield f"{name} down", _upright(pos - pos[i], center - pos[i])
    heavy = [i for i, number in enumerate(own.numbers) if number > 1]
    for i, j in combinations(heavy, 2):
        bond, middle = pos[j] - pos[i], (pos[i] + pos[j]) / 2
        up = center - middle
        up -= bond * (up @ bond) / (bond @ bond)
        if np.linalg.norm(bond) < _PAIR and np.linalg.norm(up) > 0.1:
            yield f"{names[i]}-{names[j]} down", _upright(pos - middle, up, bond)
    for number, axis in enumerate(np.linalg.svd(pos - center)[2], start=1):
        for way in ("up", "down"):
            yield f"axis {number} {way}", _upright(pos - center, axis if way == "up" else -axis)


def _upright(points: _Array, up: _Array, first: _Array | None = None) -> _Array:
    """Turns points (n, 3) such that `up` becomes z, and `first` or their longest extent x."""
    up = _unit(up)
    across = points - (points @ up)[:, None] * up if first is None else first[None]
    axis = np.linalg.svd(np.vstack([1e3 * up, across]))[2][1]
    return points @ np.array([axis, np.cross(up, axis), up]).T


def _prepared(slab: Atoms) -> Atoms:
    """Returns a slab in one piece, periodic along all axes, with fixed atoms."""
    from ase.constraints import FixAtoms

    area = np.linalg.norm(np.cross(*slab.cell.array[:2]))
    period = slab.cell.volume / area if area else 0.0
    heights = slab.get_scaled_positions(wrap=False)[:, 2] if period else np.zeros(0)
    order = np.sort(heights % 1)
    gaps = np.diff(order, append=order[:1] + 1)
    if not slab.pbc[:2].all() or gaps.max(initial=0) * period < _VACUUM:
        raise ValueError(
            f"{slab.symbols}: no slab; expected atoms that are periodic along the first two cell "
            f"vectors, with vacuum of at least {_VACUUM} Å along the third; cut a crystal along a "
            "facet, or add vacuum"
        )
    whole = slab.copy()
    whole.pbc = True
    turns = np.floor(heights - order[(gaps.argmax() + 1) % len(order)] + 1e-6)
    whole.positions -= turns[:, None] * whole.cell.array[2]
    heights = (heights - turns) * period
    if not fixed_atoms(whole).any():
        middle = (heights.min() + heights.max()) / 2 - 0.1
        whole.set_constraint(FixAtoms(mask=heights < middle))
    return whole


def _tag(structures: Sequence[Atoms], count: int, share: tuple[float, float] | None) -> None:
    """Sets the tags of placements on one slab of `count` atoms, in place."""
    one, fixed = structures[0], fixed_atoms(structures[0])
    at = {"pos": one.positions, "cell": one.cell.array, "fixed": fixed}
    tags = guess_tags(make_record(atomic_numbers=one.numbers, **at), share).tags[:count]
    tags = tags if tags.any() else np.where(fixed[:count], Tag.SUBSURFACE, Tag.SURFACE)
    for each in structures:
        each.set_tags([*tags.clip(max=Tag.SURFACE), *each.get_tags()[count:]])


def ranked(model: Any, structures: Sequence[Atoms]) -> list[tuple[Atoms, Any]]:
    """Returns placements with their `molflt.pretrained.Prediction`, lowest energy first.

    Total energies of different slabs are not compared; for such a model, slabs keep their order.

    Args:
        model: model of energies, such as `molflt.load()`.
        structures: results of `placements`.
    """
    found = zip(structures, model.predict(list(structures), tags="oc20"), strict=True)
    total = model.domain is not None and model.domain.kind == "total"
    return sorted(found, key=lambda one: (total and one[0].info["slab"], one[1].energy))


def varied(placed: Sequence[tuple[Atoms, Any]], count: int) -> list[tuple[Atoms, Any]]:
    """Returns the first results of `ranked` that differ in slab, site or orientation."""
    found: dict[tuple[object, ...], tuple[Atoms, Any]] = {}
    for atoms, one in placed:
        found.setdefault(tuple(map(atoms.info.get, ("slab", "site", "orientation"))), (atoms, one))
    return list(found.values())[:count]
