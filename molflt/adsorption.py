"""Placements of molecules on surface sites: orientations, rotations and heights."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, build
from ase.collections import g2
from ase.constraints import FixAtoms
from ase.data import atomic_numbers, covalent_radii
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from molflt.atoms import Tag
from molflt.data.structures import ase_fields
from molflt.data.structures.ase_files import frames
from molflt.data.structures.geometry import in_one_piece
from molflt.data.structures.records import make_record
from molflt.data.structures.sites import Site, Tiles, distinct, sites, unit
from molflt.data.structures.tags import MIN_VACUUM, guess_tags, tags_look_like

_EMPTY = 7.0  # Å, gap too large for a crystal
_CONTACT, _CONTACT_H = 0.1, 0.5  # Å added to radii for contacts with the slab; the second for H
_APART, _ROOF = 1.0, 3.0  # Å added to radii for images of the molecule; gap below the next slab
_TO_CUBIC = {60.0: [[-1, 1, 1], [1, -1, 1], [1, 1, -1]], 109.5: [[0, 1, 1], [1, 0, 1], [1, 1, 0]]}
"""angle in degrees between the primitive vectors (fcc, bcc) -> matrix of the cubic cell"""
_FRAGMENTS: dict[str, tuple[Any, ...]] = {  # name in ase.build.molecule, and H atoms to remove
    "CHO": ("HCO",),
    "COH": ("H2COH", 3, 4),
    "CHOH": ("H2COH", 4),
    "CH2OH": ("H2COH",),
    "HCOO": ("HCOOH", 3),
    "COOH": ("HCOOH", 4),
    "OOH": ("H2O2", 3),
    "CH2": ("CH2_s3B1d",),
    "H2S": ("SH2",),
}
_PAIR = 2.6  # largest distance, in Å, of atoms that bind side by side, such as the two O in HCOO

_Array = NDArray[np.float64]
_Tags = NDArray[np.int64]


def cut(crystal: Atoms, facet: tuple[int, ...], layers: int = 4, vacuum: float = 15.0) -> Atoms:
    """Cuts a slab with `ase.build.surface`.

    Args:
        crystal: crystal that is periodic along all axes.
        facet: Miller indices (h, k, l), of the cubic cell if the crystal is a primitive fcc or bcc.
        layers: number of repetitions of the cell.
        vacuum: distance between the slab and its next image, in Å.
    """
    if len(facet) != 3 or not any(facet):
        raise ValueError(f"facet={facet}; expected three Miller indices, not all of them 0")
    crystal = crystal.copy()
    if crystal.cell.rank < 3 or max(_gap(crystal, axis)[0] for axis in range(3)) > _EMPTY:
        raise ValueError(
            f"{crystal.symbols}: expected a crystal to cut; got a structure with {_EMPTY} Å or "
            "more of vacuum; omit --facet for slabs"
        )
    lengths, angles = np.split(crystal.cell.cellpar(), 2)
    if np.ptp(lengths) < 1e-3 and np.ptp(angles) < 1e-2:
        crystal = build.make_supercell(crystal, _TO_CUBIC.get(round(angles[0], 1), np.eye(3)))
    crystal.positions += 0.02 * crystal.cell.sum(axis=0)  # keeps atoms away from the cuts
    return build.surface(crystal, facet, layers, vacuum / 2, periodic=True)


def element(symbol: str) -> Atoms:
    """Returns the crystal of an element; see `ase.build.bulk`."""
    try:
        return build.bulk(symbol)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{symbol}: expected a file or a solid element; {error}") from None


def molecule(name: str | Path) -> Atoms:
    """Returns a molecule from its name.

    `name` is a name in `ase.build.molecule`, such as CH3OH or CO (carbon monoxide), a fragment,
    such as COOH or OOH, an element, a file, or smiles:TEXT, such as smiles:CCO, which needs RDKit.
    """
    path, _, smiles = str(name).partition("smiles:")
    if smiles:
        return _molecule_of(smiles)
    if Path(path).is_file():
        return _molecule_in(Path(path))
    whole, *removed = _FRAGMENTS.get(path, (path,))
    try:
        atoms = Atoms(path) if atomic_numbers.get(path) else build.molecule(whole)
    except KeyError:
        near = ", ".join(get_close_matches(path, [*g2.names, *_FRAGMENTS])) or "CH3OH"
        known = f"a name such as {near}, an element, a file, or smiles:TEXT"
        raise ValueError(f"molecule {name}: no such file or name; expected {known}") from None
    del atoms[removed]
    return Atoms(atoms.numbers, atoms.positions)


def _molecule_of(smiles: str) -> Atoms:
    from rdkit.Chem import AddHs, AllChem, GetFormalCharge, MolFromSmiles

    parsed = MolFromSmiles(smiles)
    built = None if parsed is None else AddHs(parsed)
    if built is None or AllChem.EmbedMolecule(built, randomSeed=0) < 0:  # no conformer
        raise ValueError(f"molecule smiles:{smiles}: RDKit cannot build a structure from it")
    AllChem.MMFFOptimizeMolecule(built)
    symbols = [atom.GetSymbol() for atom in built.GetAtoms()]
    charge = {"charge": GetFormalCharge(built)}
    return Atoms(symbols, built.GetConformer().GetPositions(), info=charge)


def _molecule_in(path: Path) -> Atoms:
    structures = [atoms for _, atoms in frames(path)]
    if len(structures) != 1:
        raise ValueError(f"{path}: expected one molecule; got {len(structures)} structures")
    atoms = structures[0]
    try:
        if isinstance(atoms, ValueError):
            raise atoms
        atoms.pbc &= atoms.cell.volume > len(atoms)  # PDB files have placeholder cells of 1 Å
        ase_fields.check_fields(atoms)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    positions = in_one_piece(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
    if positions is None:
        raise ValueError(f"{path}: expected a molecule; got bonds to its periodic images")
    return Atoms(atoms.numbers, positions, info={"charge": _charge(atoms)})


def _charge(atoms: Atoms) -> float:
    """Returns the charge in e; ignores the multiplicity, which may change on the surface."""
    atoms = atoms.copy()
    atoms.info = {key: x for key, x in atoms.info.items() if "multiplicity" not in key.lower()}
    return ase_fields.total_charge(atoms) or 0.0


def placements(
    slabs: Atoms | Sequence[Atoms] | Mapping[str, Atoms],
    adsorbate: Atoms | str | Path,
    *,
    rotation: float = 30.0,
    share: tuple[float, float] | None = None,
) -> list[Atoms]:
    """Returns all distinct placements of a rigid molecule on the sites of slabs.

    If a slab has no fixed atoms, its lower half is fixed. `info` contains the number or name of the
    slab, the site, the orientation, the rotation in degrees, and the height of the lowest atom
    above the slab in Å. Tags are 0 (subsurface), 1 (surface) and 2 (adsorbate).

    Args:
        slabs: slabs with vacuum along their third cell vector, or a mapping from names to slabs.
        adsorbate: molecule, or a name that `molecule` accepts.
        rotation: step of rotations, in degrees.
        share: smallest and largest share of surface atoms in a slab, such as
            `model.domain.surface`; see `molflt.data.structures.tags.guess_tags`.
    """
    if rotation <= 0:
        raise ValueError(f"rotation={rotation}; expected a step above 0 degrees")
    if not isinstance(adsorbate, Atoms):
        adsorbate = molecule(adsorbate)
    results: list[Atoms] = []
    listed = [slabs] if isinstance(slabs, Atoms) else slabs
    by_key: Mapping[Any, Atoms] = listed if isinstance(listed, Mapping) else dict(enumerate(listed))
    for key, slab in by_key.items():
        name = f"slab {key}, {slab.symbols}"
        placed = _placed_on(_prepared(slab, name), adsorbate, np.arange(0, 359.99, rotation))
        if not placed:
            raise ValueError(
                f"{adsorbate.symbols}: too large for {name}; repeat the slab, or add vacuum"
            )
        tags = _slab_tags(slab.get_tags(), placed[0], share)
        for atoms in placed:
            atoms.set_tags([*tags, *atoms.get_tags()[len(slab) :]])
            atoms.info = {"slab": key, **atoms.info}
        results += placed
    return results


def _placed_on(slab: Atoms, adsorbate: Atoms, angles: _Array) -> list[Atoms]:
    """Returns the distinct placements on the sites of one slab, at angles (n,) in degrees."""
    total = _charge(slab) + _charge(adsorbate)
    charge = {"charge": total} if total else {}
    tags = [Tag.ADSORBATE] * len(adsorbate)
    tiles, placed = Tiles(slab), []
    heights = slab.positions @ tiles.up
    roof = heights.min() + tiles.up @ slab.cell.array[2] - _ROOF  # Å, limit for the highest atom
    for index, site in enumerate(sites(slab)):
        entries, points = _fitting(site, adsorbate, angles, tiles, roof)
        if not entries:
            continue
        for i in distinct(tiles.distances(points, adsorbate.numbers)):
            atoms = slab + Atoms(adsorbate.numbers, points[i], tags=tags)
            height = round(float((points[i] @ tiles.up).min() - heights.max()), 3)
            atoms.info = {"site": f"{index} {site.name}", **entries[i], "height": height, **charge}
            placed.append(atoms)
    return placed


def _slab_tags(tags: _Tags, placed: Atoms, share: tuple[float, float] | None) -> _Tags:
    """Returns the tags of a slab, guessed from one placement if `tags` do not name a surface."""
    if tags.any() and set(tags) <= {Tag.SUBSURFACE, Tag.SURFACE}:
        return tags
    fixed = ase_fields.fixed_atoms(placed)
    record = make_record(
        atomic_numbers=placed.numbers, pos=placed.positions, cell=placed.cell.array, fixed=fixed
    )
    guess = guess_tags(record, share).tags[: len(tags)]
    if guess.any():
        return guess.clip(max=Tag.SURFACE)
    return np.where(fixed[: len(tags)], Tag.SUBSURFACE, Tag.SURFACE)


def _fitting(
    site: Site, adsorbate: Atoms, angles: _Array, tiles: Tiles, roof: float
) -> tuple[list[dict[str, Any]], _Array]:
    """Returns n placements that fit at a site: entries for `info`, and positions (n, atoms, 3)."""
    radii, is_hydrogen = covalent_radii[adsorbate.numbers], adsorbate.numbers == 1
    added = np.where(is_hydrogen & (len(adsorbate) > 1), _CONTACT_H, _CONTACT)
    contact = np.add.outer(radii + added, tiles.covalent)  # (atoms, slab atoms)
    rotations = Rotation.from_rotvec(np.outer(angles, [0, 0, -1]), degrees=True).as_matrix()
    entries, positions = [], []
    for name, pose in _poses(adsorbate):
        points = pose @ rotations @ site.axes + site.point  # (angles, atoms, 3)
        points += _lifts(points, site, tiles, contact)[:, None, None] * site.axes[2]
        fits = _apart_from_images(points, radii, tiles)
        fits &= (points @ tiles.up).max(axis=1) < roof
        positions.append(points[fits])
        entries += [{"orientation": name, "rotation": float(angle)} for angle in angles[fits]]
    return entries, np.concatenate(positions)


def _lifts(points: _Array, site: Site, tiles: Tiles, contact: _Array) -> _Array:
    """Returns shifts (n,) along the normal, in Å, after which molecules touch the slab.

    Molecules are `points` (n, atoms, 3). `contact` contains distances (atoms, slab atoms), in Å.
    """
    normal = site.axes[2]
    lateral = np.linalg.norm(np.cross(tiles.pos - site.point, normal), axis=1)
    reach = np.linalg.norm(points - site.point, axis=2).max()
    near = lateral < reach + contact.max()
    vectors = points[:, :, None] - tiles.pos[near]
    heights = vectors @ normal
    # squared height of an atom above a slab atom that it touches
    square = contact[:, near] ** 2 - (vectors**2).sum(axis=-1) + heights**2
    lifts = np.where(square > 0, np.sqrt(square.clip(0)) - heights, -np.inf)
    lifts = lifts.max(axis=(1, 2), initial=-np.inf)
    return np.where(np.isneginf(lifts), 0.0, lifts)  # fits through a hole, as H does in graphene


def _apart_from_images(points: _Array, radii: _Array, tiles: Tiles) -> NDArray[np.bool_]:
    """Returns a mask (n,) of molecules (n, atoms, 3) that do not touch their periodic images."""
    min_distance = np.add.outer(radii, radii) + _APART
    vectors = points[:, :, None] - points[:, None]
    reach = np.linalg.norm(vectors, axis=-1).max() + min_distance.max()
    shifts = tiles.images[1:][np.linalg.norm(tiles.images[1:], axis=1) < reach]
    to_images = vectors[:, :, :, None] + shifts  # (n, atoms, atoms, shifts, 3)
    lengths = np.linalg.norm(to_images, axis=-1).min(axis=-1, initial=np.inf)
    return (lengths > min_distance).all(axis=(1, 2))


def _poses(adsorbate: Atoms) -> Iterator[tuple[str, _Array]]:
    """Yields names and positions (atoms, 3) of orientations; the site is at 0, and z is up."""
    pos, center = adsorbate.positions, adsorbate.positions.mean(axis=0)
    names = [f"{symbol}{i}" for i, symbol in enumerate(adsorbate.symbols)]
    for i, name in enumerate(names):
        if len(adsorbate) == 1 or np.linalg.norm(center - pos[i]) > 0.1:
            yield f"{name} down", _upright(pos - pos[i], center - pos[i])
    for i, j in combinations(np.flatnonzero(adsorbate.numbers > 1).tolist(), 2):
        bond, middle = pos[j] - pos[i], (pos[i] + pos[j]) / 2
        up = center - middle
        up -= bond * (up @ bond) / (bond @ bond)
        if np.linalg.norm(bond) < _PAIR and np.linalg.norm(up) > 0.1:
            yield f"{names[i]}-{names[j]} down", _upright(pos - middle, up, bond)
    for number, axis in enumerate(np.linalg.svd(pos - center)[2], start=1):
        yield f"axis {number} up", _upright(pos - center, axis)
        yield f"axis {number} down", _upright(pos - center, -axis)


def _upright(points: _Array, up: _Array, first: _Array | None = None) -> _Array:
    """Rotates points (n, 3): `up` becomes z; `first`, by default the longest extent, becomes x."""
    up = unit(up)
    lateral = points - (points @ up)[:, None] * up if first is None else first[None]
    # the first axis of largest extent is `up`, because of its length, and the second is lateral
    axis = np.linalg.svd(np.vstack([1e3 * up, lateral]))[2][1]
    return points @ np.array([axis, np.cross(up, axis), up]).T


def _prepared(slab: Atoms, name: str) -> Atoms:
    """Returns a slab in one piece, periodic along all axes, with fixed atoms; checks the slab."""
    is_slab = slab.cell.rank == 3 and slab.pbc[:2].all()
    vacuum, lowest = _gap(slab, axis=2) if is_slab else (0.0, 0.0)
    if vacuum < MIN_VACUUM or max(_gap(slab, axis)[0] for axis in (0, 1)) >= MIN_VACUUM:
        raise ValueError(
            f"{name}: not a slab; expected periodic axes 1 and 2, and at least {MIN_VACUUM} Å of "
            "vacuum along axis 3 only; set the cell, cut a facet, or add vacuum"
        )
    turns = np.floor(slab.get_scaled_positions(wrap=False)[:, 2] - lowest + 1e-6)
    whole = slab.copy()
    whole.positions -= turns[:, None] * slab.cell.array[2]
    whole.pbc = True
    ase_fields.drop_labels_(whole, moved=True)
    whole.arrays.pop("pos_relaxed", None)  # unknown with an adsorbate
    heights, fixed = whole.positions @ Tiles(whole).up, ase_fields.fixed_atoms(whole)
    if not fixed.any():
        lower = FixAtoms(mask=heights < (heights.min() + heights.max()) / 2 - 0.1)
        whole.set_constraint([*whole.constraints, lower])
    elif not fixed.all() and heights[fixed].max() > heights[~fixed].max() + 0.1:
        raise ValueError(
            f"{name}: expected free atoms on the side to which the third cell vector "
            "points, where molecules are placed; got fixed atoms there; turn the slab over"
        )
    if tags_look_like(whole) == "ase":
        adsorbate, found = 0, whole.get_tags().min()
    else:  # higher tags than that of adsorbates are layers
        adsorbate, found = int(Tag.ADSORBATE), whole.get_tags().max()
    if found == adsorbate:
        raise ValueError(
            f"{name}: expected a clean slab; got atoms with tag {adsorbate} "
            "(adsorbate); remove these atoms, or their tags if they belong to the slab"
        )
    return whole


def _gap(atoms: Atoms, axis: int) -> tuple[float, float]:
    """Returns the largest gap along a cell vector, in Å, and its end, a fractional coordinate."""
    order = np.sort(atoms.get_scaled_positions(wrap=False)[:, axis] % 1)
    gaps = np.diff(order, prepend=order[-1:] - 1)  # below each atom
    others = np.cross(atoms.cell.array[axis - 2], atoms.cell.array[axis - 1])
    return gaps.max() * atoms.cell.volume / np.linalg.norm(others), order[gaps.argmax()]


def ranked(model: Any, structures: Sequence[Atoms]) -> list[tuple[Atoms, Any]]:
    """Returns placements with their `molflt.pretrained.Prediction`, lowest energy first.

    `model` is an energy model, such as `molflt.load()`. Potentials and models of total energies
    rank the placements of each slab separately.
    """
    is_potential = getattr(model, "predicts_forces", False)
    total = is_potential or (model.domain is not None and model.domain.kind == "total")
    found = model.predict(list(structures), tags=None if is_potential else "oc20")
    pairs = zip(structures, found, strict=True)
    return sorted(pairs, key=lambda pair: (pair[0].info["slab"] if total else 0, pair[1].energy))


def varied(placed: Sequence[tuple[Atoms, Any]], count: int) -> list[tuple[Atoms, Any]]:
    """Returns the first `count` results of `ranked` that differ in slab, site or orientation."""
    best: dict[tuple[object, ...], tuple[Atoms, Any]] = {}
    for atoms, prediction in placed:
        key = tuple(atoms.info.get(name) for name in ("slab", "site", "orientation"))
        best.setdefault(key, (atoms, prediction))
    return list(best.values())[:count]
