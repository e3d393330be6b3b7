"""Tags from the geometry: adsorbate by connectivity, surface and subsurface by height.

Conventions of tags in files, and checks of tags that contradict the geometry.
"""

import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from molflt.atoms import Atoms, Data, Tag
from molflt.data.structures.base import Part, Structures, Tags, with_bar
from molflt.data.structures.geometry import BOND, NONMETALS, _Flags, _Numbers, connected

MIN_VACUUM = 4.5  # Å, smallest gap that counts as vacuum; in layered crystals, gaps are smaller
_SLAB_OR_MOLECULE = (3, 5, 14)  # Li B Si, in molecules on a slab of other elements
_CONTACT = 1.3  # length of the longest contact with a slab, relative to covalent radii
_SURFACE_DEPTH = 2.0  # Å, depth of the surface below the highest atom of the slab, as in OC20
_MIN_GAP = 0.5  # Å, minimum distance between a slab and atoms of `_SLAB_OR_MOLECULE`
_ADSORBATE_DEPTH = 1.5  # Å; deeper atoms below the top of the slab do not belong to an adsorbate
_SAME_SITE = 0.8  # Å, largest distance from a site of the continued lattice
_SHELL = 5.0  # Å: radius of the environment that a lattice repeats
_MAX_LISTED = 5  # maximum number of kinds of structures in a message
_LAYER = 0.15  # Å, minimum distance between two layers
_MAX_ASYMMETRY = 0.45  # maximum length of the mean direction to neighbors inside a slab
_MIN_THICKNESS = 3.0  # Å: thinner slabs do not have an inside
_MAX_ATOMS = 200  # maximum number of atoms to compare with
_MIN_NEIGHBORS = 4  # minimum number of neighbors to compare
_MATCH_AT_SURFACE, _MATCH_INSIDE = 0.8, 0.95  # minimum shares of matching neighbors
_MIN_FIXED = 0.2  # minimum share of fixed atoms if the free atoms are the surface
_ROUNDING = 1e-6  # shares of a model's training data are rounded to float32

_Vectors = list[NDArray[np.float64]]


class Guess(NamedTuple):
    """Tags (N,) of one structure; all 0 if the guess failed.

    `text` contains the number of atoms of each kind, or the reason why the guess failed.
    """

    tags: _Numbers
    text: str


def guess_tags(record: Data, share: tuple[float, float] | None = None) -> Guess:
    """Finds the adsorbate, surface and subsurface atoms of a slab with vacuum along one axis.

    Molecules of H, C, N, O, F, P, S, Cl, Br and I on the slab are the adsorbate, except for atoms
    that continue the lattice of the slab, such as oxygen in an oxide. Li, B and Si also belong to
    the adsorbate if they are bonded to such molecules above a slab of other elements. Atoms of all
    other elements belong to the slab if they touch it. If at least 20 % of the slab is fixed, below
    the free atoms, these are the surface, as in OC20. Otherwise, the surface consists of the atoms
    within 2 Å of the top or with fewer neighbors than deeper atoms. The guess fails for crystals,
    molecules, clusters and slabs without adsorbates.

    Args:
        record: structure from `molflt.data.structures.records.make_record`; tags are ignored.
        share: smallest and largest share of surface atoms in the slabs of a model's training data.
            If a guess is outside this range, the number of top layers closest to the range is used.
    """
    unknown = np.zeros(record.natoms, dtype=np.int64)
    atoms = _Atoms(record)
    if not atoms.open_axes:
        return Guess(unknown, "no vacuum")
    if len(atoms.open_axes) > 1:
        why = "vacuum along more" if atoms.pbc.sum() > 1 else "not periodic along more"
        return Guess(unknown, f"no slab ({why} than one axis)")
    atoms.find_bonds()
    adsorbate = atoms.adsorbate()
    if adsorbate.all():
        return Guess(unknown, "no slab")
    if not adsorbate.any():
        return Guess(unknown, "no adsorbate")
    tags = np.full(record.natoms, Tag.SUBSURFACE, dtype=np.int64)
    tags[atoms.surface(adsorbate, share)] = Tag.SURFACE
    tags[adsorbate] = Tag.ADSORBATE
    return Guess(tags, atoms.described(tags))


def open_axes(record: Data) -> list[int]:
    """Returns the axes that are not periodic or along which there is vacuum; [] for crystals."""
    return _Atoms(record).open_axes


class _Atoms:
    """Structure with its axes of vacuum and, for a slab, heights and pairs (i, j) in contact."""

    def __init__(self, record: Data) -> None:
        from ase.geometry import complete_cell

        self.numbers = record.atomic_numbers.numpy()
        self.pos = record.pos.double().numpy()
        self.pbc = record.pbc[0].numpy()
        cell = record.cell[0].double().numpy()
        # an axis that is not periodic is replaced by the normal of the other axes
        self.cell = complete_cell(np.where(self.pbc[:, None], cell, 0.0))
        self.fixed = record.fixed.numpy() & ~record.fixed.numpy().all()
        self.molecular = np.isin(self.numbers, NONMETALS)
        self.open_axes: list[int] = []
        inverse = np.linalg.inv(self.cell)
        spacings = 1 / np.linalg.norm(inverse, axis=0)  # of lattice planes, in Å
        for axis, spacing in enumerate(spacings):
            heights = self.pos @ inverse[:, axis] * spacing
            if self.pbc[axis]:
                heights %= spacing
                ordered = np.sort(heights)
                gaps = np.diff(ordered, append=ordered[0] + spacing)
                if gaps.max() < MIN_VACUUM:
                    continue
                lowest = ordered[(gaps.argmax() + 1) % len(ordered)]  # above the largest gap
                heights = (heights - lowest) % spacing
            self.open_axes.append(axis)
            self.heights = heights  # above the vacuum along the last of the open axes, in Å

    def find_bonds(self) -> None:
        """Sets the pairs in contact, and the molecular atoms and their bonds among these pairs."""
        from ase.data import covalent_radii
        from ase.neighborlist import primitive_neighbor_list

        radii = covalent_radii[self.numbers]
        self.i, self.j, vectors, lengths, self.shifts = primitive_neighbor_list(
            "ijDdS", self.pbc, self.cell, self.pos, _CONTACT * radii
        )
        self.directions = vectors / np.maximum(lengths, 1e-9)[:, None]
        near = lengths < BOND * (radii[self.i] + radii[self.j])
        for number in _SLAB_OR_MOLECULE:
            self.molecular |= self._of_molecules(number, near)
        self.bonded = near & self.molecular[self.i] & self.molecular[self.j]

    def _of_molecules(self, number: int, near: _Flags) -> _Flags:
        """Selects the atoms of an element if all of them are in molecules outside the slab."""
        element = self.numbers == number
        slab = ~self.molecular & ~element
        if not element.any() or element.sum() >= slab.sum():
            return np.zeros_like(element)
        low, high = self.heights[slab].min() - _MIN_GAP, self.heights[slab].max() + _MIN_GAP
        outside = (self.heights < low) | (self.heights > high)
        molecules = self.molecular | element
        bonds = near & molecules[self.i] & molecules[self.j]
        bonded = np.bincount(self.i[bonds & self.molecular[self.j]], minlength=len(element)) > 0
        is_film = (self._endless(bonds).any(axis=0) & element).any()  # such as h-BN
        in_molecules = (outside & bonded)[element].all() and not is_film
        return element if in_molecules else np.zeros_like(element)

    def adsorbate(self) -> _Flags:
        """Returns a mask of the molecular atoms that do not continue the lattice of the slab."""
        slab = self._slab_core() | self.fixed
        if not slab.any():
            return ~slab
        heights = self.heights
        low, high = heights[slab].min(), heights[slab].max()
        deep = (heights > low) & (heights < high - _ADSORBATE_DEPTH)
        two_contacts = np.bincount(self.i[slab[self.j]], minlength=len(slab)) > 1
        if high - low > _MIN_THICKNESS:
            surrounded = self._surrounded(slab)
            inside = surrounded & deep | self.fixed
        else:  # elements that occur on only one side are adsorbates
            above_middle = heights - (low + high) / 2
            top = self.numbers[two_contacts & (above_middle > -0.5)]
            bottom = self.numbers[two_contacts & (above_middle < 0.5)]
            on_both_sides = np.isin(self.numbers, np.intersect1d(top, bottom))
            inside = surrounded = two_contacts & on_both_sides | self.fixed
        slab_element = np.isin(self.numbers, np.unique(self.numbers[inside]))
        slab |= slab_element & (surrounded | deep)
        candidates = slab_element & ~slab
        if not candidates.any():
            return ~slab
        kinds = self.numbers[self.i] * 1000 + self.numbers[self.j]  # pairs of elements
        in_slab = np.unique(kinds[self.bonded & slab[self.i] & slab[self.j]])
        foreign = self.bonded & ~np.isin(kinds, in_slab)  # bonds between elements not bonded there
        plausible = two_contacts | (np.bincount(self.i[foreign], minlength=len(slab)) == 0)
        vectors, sites = self._surface_vectors(slab), slab | candidates
        slab[candidates] = [
            self._continues(int(atom), slab, sites, vectors, bool(plausible[atom]))
            for atom in np.flatnonzero(candidates)
        ]
        return ~slab

    def _slab_core(self) -> _Flags:
        """Returns a mask of slab atoms: connected metal atoms or an extended sheet of nonmetals."""
        solid = ~self.molecular
        sheet = self._endless(self.bonded).all(axis=0)
        if sheet.sum() <= solid.sum():
            ends = self._endless(np.ones(len(self.i), dtype=bool))
            return np.asarray(ends.any(axis=0) & solid)
        kinds, counts = np.unique(self.numbers[sheet], return_counts=True)
        for kind in kinds[np.argsort(counts)[:-1]]:  # such as O on graphene
            others = (self.numbers[self.i] != kind) & (self.numbers[self.j] != kind)
            smaller = self._endless(self.bonded & others).all(axis=0)
            sheet = smaller if smaller.any() else sheet
        return np.asarray(sheet)

    def _endless(self, pairs: _Flags) -> _Flags:
        """Returns a mask (axes, N) of atoms that `pairs` connect to their images along an axis."""
        count, masks = len(self.numbers), []
        for axis in sorted({0, 1, 2} - set(self.open_axes)):
            i, j, shift = self.i[pairs], self.j[pairs], self.shifts[pairs, axis]
            # two copies of the cell along the axis; an atom and its copy may be in one group
            first = np.concatenate([i, i + count])
            second = np.concatenate([j + shift % 2 * count, j + (1 + shift) % 2 * count])
            labels = connected(first, second, 2 * count)
            masks.append(labels[:count] == labels[count:])
        return np.array(masks)

    def _surrounded(self, slab: _Flags) -> _Flags:
        """Returns a mask (N,) of atoms that have slab atoms as neighbors on all sides."""
        near = slab[self.j]
        total = np.zeros((len(self.numbers), 3))
        np.add.at(total, self.i[near], self.directions[near])
        count = np.bincount(self.i[near], minlength=len(total))
        return (count > 1) & (np.linalg.norm(total, axis=1) < _MAX_ASYMMETRY * count)

    def _continues(
        self, atom: int, slab: _Flags, sites: _Flags, vectors: _Vectors, plausible: bool
    ) -> bool:
        """Returns True if an atom is at a site of the same element in the shifted lattice."""
        twins = np.flatnonzero(slab & (self.numbers == self.numbers[atom]))
        if not any(self._repeats(int(twin), atom, slab, sites) for twin in twins[:_MAX_ATOMS]):
            return False
        # atoms occupy all lattice sites on the surface, but not all adsorption sites
        others = self.pos[sites & (self.numbers == self.numbers[atom])] - self.pos[atom]
        differences = [self._wrapped(others - vector) for vector in vectors]
        occupied = [np.linalg.norm(x, axis=1).min() < _SAME_SITE for x in differences]
        return float(np.mean(occupied)) >= 0.5 if occupied else plausible

    def _surface_vectors(self, slab: _Flags) -> _Vectors:
        """Returns the lattice vectors of the slab along its surface and within the cell, in Å."""
        depth = np.where(slab, np.abs(self.heights - np.median(self.heights[slab])), np.inf)
        start = int(depth.argmin())
        layer = slab & (self.numbers == self.numbers[start])
        layer &= np.abs(self.heights - self.heights[start]) < 0.3
        layer[start] = False
        return [
            self.pos[end] - self.pos[start]
            for end in np.flatnonzero(layer)[:_MAX_ATOMS].tolist()
            if self._repeats(start, end, slab, slab, _MATCH_INSIDE)
        ]

    def _repeats(
        self, start: int, end: int, slab: _Flags, sites: _Flags, share: float = _MATCH_AT_SURFACE
    ) -> bool:
        """Returns True if the environment of a slab atom also occurs around another atom."""
        heights = self.heights[slab]
        shell = self._wrapped(self.pos[slab] - self.pos[start])
        distance = np.linalg.norm(shell, axis=1)
        shifted = heights + (self.heights[end] - self.heights[start])
        near = (distance > 0.1) & (distance < _SHELL)  # and not shifted out of the slab
        near &= (shifted < heights.max() + _SAME_SITE) & (shifted > heights.min() - _SAME_SITE)
        if near.sum() < _MIN_NEIGHBORS:
            return False
        around = self.pos[sites] - self.pos[end]
        lengths = np.linalg.norm(self._wrapped(shell[near, None] - around), axis=2)
        same = self.numbers[slab][near, None] == self.numbers[sites]
        return bool(((lengths < _SAME_SITE) & same).any(axis=1).mean() >= share)

    def _wrapped(self, vectors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Subtracts the nearest lattice vectors by rounding fractional coordinates."""
        turns = np.round(vectors @ np.linalg.inv(self.cell)) * self.pbc
        return np.asarray(vectors - turns @ self.cell)

    def surface(self, adsorbate: _Flags, share: tuple[float, float] | None) -> _Flags:
        """Returns a mask (N,) of surface atoms; see `guess_tags` for `share`."""
        slab = ~adsorbate
        fixed = slab & self.fixed
        heights = self.heights_toward(adsorbate)
        if _MIN_FIXED <= fixed.sum() / slab.sum() < 1 and (
            heights[fixed].mean() < heights[slab & ~fixed].mean() - _LAYER
        ):
            surface = slab & ~fixed
        else:
            near = slab[self.i] & slab[self.j]
            neighbors = np.bincount(self.i[near], minlength=len(slab))
            surface = slab & (heights > heights[slab].max() - _SURFACE_DEPTH)
            middle = np.median(heights[slab])
            for number in np.unique(self.numbers[slab]):
                element = slab & (self.numbers == number)
                inside = neighbors[element & (heights <= middle)].max(initial=0)
                surface |= element & (heights > middle) & (neighbors < inside)
        low, high = np.add(share or (0.0, 1.0), (-_ROUNDING, _ROUNDING))
        if low <= surface.sum() / slab.sum() <= high:
            return surface
        ordered = np.sort(heights[slab])[::-1]
        last = np.flatnonzero(ordered[:-1] - ordered[1:] > _LAYER)  # last atom of each layer
        if not len(last):
            return surface
        shares = (last + 1) / len(ordered)  # of the atoms down to each layer
        excess = np.maximum(low - shares, 0) + np.maximum(shares - high, 0)
        excess = excess.round(5)  # the first of equal values is chosen, despite rounding
        return slab & (heights >= ordered[last[excess.argmin()]] - 1e-9)

    def heights_toward(self, adsorbate: _Flags) -> NDArray[np.float64]:
        """Returns heights (N,), in Å, that increase toward the sides with adsorbates."""
        slab = ~adsorbate
        if not slab.any():
            return self.heights
        center = self.heights[slab].mean()
        above = self.heights[adsorbate] > center
        if above.all():
            return self.heights
        return np.abs(center - self.heights) if above.any() else center - self.heights

    def described(self, tags: _Numbers) -> str:
        """Describes the numbers of adsorbates, surface atoms and subsurface atoms."""
        from ase.symbols import Symbols

        adsorbate = tags == Tag.ADSORBATE
        bonds = self.bonded & adsorbate[self.i] & adsorbate[self.j]
        labels = connected(self.i[bonds], self.j[bonds], len(tags))
        molecules = [
            Symbols(self.numbers[labels == label]).get_chemical_formula("hill")
            for label in np.unique(labels[adsorbate])
        ]
        counts = np.bincount(tags, minlength=3)
        noun = "adsorbates" if len(molecules) > 1 else "adsorbate"
        return (
            f"{len(molecules)} {noun} {', '.join(molecules)}, "
            f"{counts[Tag.SURFACE]} surface, {counts[Tag.SUBSURFACE]} subsurface atoms"
        )


def sides_agree(record: Data) -> bool:
    """Returns True unless an adsorbate is on a side of the slab without surface atoms (tag 1)."""
    atoms = _Atoms(record)
    tags = record.tags.numpy()
    if len(atoms.open_axes) != 1 or not (tags != Tag.ADSORBATE).any():
        return True
    slab = atoms.heights[tags != Tag.ADSORBATE]
    surface, adsorbed = atoms.heights[tags == Tag.SURFACE], atoms.heights[tags == Tag.ADSORBATE]

    def occupied(distances: NDArray[np.float64]) -> np.bool_:
        return ((distances > _MIN_GAP) & (distances < _SHELL)).any()

    top_agrees = (surface > slab.mean() - _LAYER).any() or not occupied(adsorbed - slab.max())
    bottom_agrees = (surface < slab.mean() + _LAYER).any() or not occupied(slab.min() - adsorbed)
    return bool(top_agrees and bottom_agrees)


def heights_agree(record: Data) -> bool:
    """Returns True if mean heights do not decrease from subsurface to surface to adsorbate."""
    atoms = _Atoms(record)
    if len(atoms.open_axes) != 1:
        return True
    tags = record.tags.numpy()
    heights = atoms.heights_toward(tags == Tag.ADSORBATE)
    means = [heights[tags == tag].mean() for tag in Tag if (tags == tag).any()]
    return means == sorted(means)


def layers_as_tags(layers: _Numbers) -> _Numbers:
    """Converts the layer numbers of ``ase.build`` to tags."""
    if not (layers > 0).any():
        return layers  # unknown, or negative numbers, which are rejected later
    known = [layers == 0, layers == 1, layers > 1]
    return np.select(known, [Tag.ADSORBATE, Tag.SURFACE, Tag.SUBSURFACE], layers)


def tags_look_like(atoms: Atoms) -> Tags | None:
    """Guesses the convention of tags from the heights of atoms; returns None if undecided."""
    tags, cell = atoms.get_tags(), atoms.cell.array
    normal = np.cross(cell[0], cell[1])
    volume = normal @ cell[2]  # with the sign of the handedness; 0 without a third vector
    normal = normal * np.sign(volume) if volume else np.array([0.0, 0, 1])
    if normal[2] < -1e-3 * np.linalg.norm(normal):  # the surface may be on either side
        return None
    heights = atoms.positions @ normal
    with_0, with_1, with_2 = (heights[tags == tag] for tag in (0, 1, 2))
    if not with_1.size or not (with_0.size or with_2.size):
        return None
    # Adsorbates lie above the layer with tag 1; their tag is 0 in ASE and 2 here.
    middle = with_1.mean()
    if bool((with_0 > middle).all() and (with_2 < middle).all()):
        return "ase"
    return "oc20" if bool((with_0 < middle).all() and (with_2 > middle).all()) else None


class Tagged(Part):
    """Source with guessed tags, which are 0 for structures without a guess.

    The source is read once, and a summary is printed. See :func:`guess_tags` for `share`.
    """

    def __init__(self, source: Structures, share: tuple[float, float] | None = None) -> None:
        super().__init__(source)
        guesses = [guess_tags(record, share) for record in with_bar(source, "guessing tags")]
        self._tags = [torch.from_numpy(guess.tags) for guess in guesses]
        for title, is_known in (("tags guessed", True), ("no tags guessed", False)):
            texts = Counter(guess.text for guess in guesses if guess.tags.any() == is_known)
            if not texts:
                continue
            parts = [f"{text} ({count})" for text, count in texts.most_common(_MAX_LISTED)]
            if len(texts) > _MAX_LISTED:
                parts.append(f"{len(texts) - _MAX_LISTED} other kinds")
            listed = f"{texts.total()} of {len(guesses)} structures: {'; '.join(parts)}"
            print(f"molflt: {source.path}: {title} for {listed}", file=sys.stderr)

    def __getitem__(self, index: int) -> Data:
        record = super().__getitem__(index)
        record.tags = self._tags[self._stored(index)].clone()
        return record

    def to_atoms(self, index: int) -> Atoms:
        atoms = super().to_atoms(index)
        atoms.set_tags(self._tags[self._stored(index)].numpy())
        return atoms
