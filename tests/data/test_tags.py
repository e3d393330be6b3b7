"""Tags guessed from the geometry: against those of data sets, and of slabs built here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import (
    add_adsorbate,
    bulk,
    fcc100,
    fcc111,
    graphene,
    molecule,
    mx2,
    surface,
)
from ase.constraints import FixAtoms

from molflt.atoms import Tag
from molflt.data.structures import open_dataset
from molflt.data.structures.base import ANY_TAGS, Reading
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.tags import Tagged, guess_tags, heights_agree

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"


def guessed(atoms: Atoms, share=None):
    plain = atoms.copy()
    plain.set_tags(0)
    return guess_tags(StructuresInMemory(plain)[0], share)


def found(atoms: Atoms) -> list[int]:
    """Indices of the adsorbate."""
    return np.flatnonzero(guessed(atoms).tags == Tag.ADSORBATE).tolist()


def put(slab: Atoms, gas: Atoms, place: np.ndarray) -> tuple[Atoms, list[int]]:
    """A slab with the lowest atom of a molecule at a place, and the indices of the molecule."""
    both, gas = slab.copy(), gas.copy()
    gas.positions += place - gas.positions[gas.positions[:, 2].argmin()]
    both += gas
    return both, list(range(len(slab), len(both)))


def above(slab: Atoms, gas: str, height: float = 2.0) -> tuple[Atoms, list[int]]:
    top = slab.positions[slab.positions[:, 2].argmax()]
    return put(slab, molecule(gas), top + np.array([0, 0, height]))


def agreement(records, share=None) -> float:
    pairs = [(guess_tags(one, share).tags, one.tags.numpy()) for one in records]
    return float(np.mean(np.concatenate([guess == given for guess, given in pairs])))


@pytest.mark.parametrize("free", [False, True])
def test_the_sample_agrees(free: bool) -> None:
    """A quarter of each of its slabs is surface; half is fixed."""
    dataset = open_dataset(ROOT / "datasets" / "chgnet-sample" / "val_ood_both.safetensors")
    records = [dataset[i] for i in range(0, 250, 5)]
    for one in records:
        one.fixed &= not free
    assert agreement(records, (0.25, 0.25)) >= 0.99


def test_oc20_agrees() -> None:
    path = SHARED / "oc20" / "oc20_is2re_val20.lmdb"
    if not path.exists():
        pytest.skip(f"no OC20 records in {path}")
    assert agreement(open_dataset(path)) >= 0.99


SLAB = fcc111("Cu", (3, 3, 4), vacuum=8.0, periodic=True)


def turned(atoms: Atoms) -> Atoms:
    atoms.rotate(37, (1, 2, 3), rotate_cell=True)
    return atoms


def sheared(atoms: Atoms) -> Atoms:
    cell = atoms.cell.array
    atoms.set_cell(cell + np.outer([0, 0, 1], 0.7 * cell[0] + 0.3 * cell[1]))
    return atoms


def moved(atoms: Atoms, by: float = 9.0) -> Atoms:
    atoms.positions[:, 2] += by
    atoms.wrap()
    return atoms


def first_axis(atoms: Atoms) -> Atoms:
    order = [2, 0, 1]
    cell = atoms.cell.array[order][:, order]
    return Atoms(atoms.numbers, atoms.positions[:, order], cell=cell, pbc=True)


def open_axis(atoms: Atoms) -> Atoms:
    atoms.pbc = (True, True, False)
    atoms.cell[2] = 0
    return atoms


def mirrored(atoms: Atoms) -> Atoms:
    atoms.positions[:, 2] *= -1
    return atoms


@pytest.mark.parametrize("change", [turned, sheared, moved, first_axis, open_axis, mirrored])
def test_cell_and_place_do_not_matter(change) -> None:
    atoms, gas = above(SLAB, "CH3OH")
    guess = guessed(change(atoms))
    assert np.flatnonzero(guess.tags == Tag.ADSORBATE).tolist() == gas
    assert guess.text == "1 adsorbate CH4O, 9 surface, 27 subsurface atoms"


@pytest.mark.parametrize("gas", ["BF3", "CH3SiH3", "LiF"])
def test_molecules_of_light_elements_stay_whole(gas) -> None:
    atoms, own = above(SLAB, gas)
    assert found(atoms) == own
    film = SLAB.copy()
    top = film.positions[:, 2].max() + 2.2
    film += Atoms("B9N9", np.concatenate([film.positions[-9:], film.positions[-9:]]))
    film.positions[-18:, 2] = top
    film.positions[-9:] += (film.cell[0] + film.cell[1]) / 9
    assert not set(found(film)) & set(range(36, 45))  # boron nitride is not a molecule


def test_metals() -> None:
    for gas in ("O", "CO", "H2O", "C6H6", "SO2"):
        atoms, own = above(SLAB, gas)
        assert found(atoms) == own
    hollow = fcc100("Cu", (3, 3, 4), vacuum=8.0, periodic=True)
    add_adsorbate(hollow, "N", 0.2, "hollow")
    assert found(hollow) == [36]
    parts = fcc111("Ni", (3, 3, 3), vacuum=8.0, periodic=True)
    add_adsorbate(parts, "O", 1.1, "fcc")
    add_adsorbate(parts, "H", 1.0, "hcp", offset=(1, 1))
    assert guessed(parts).text == "2 adsorbates O, H, 9 surface, 18 subsurface atoms"
    adatom = SLAB.copy()
    add_adsorbate(adatom, "Pt", 2.1, "fcc")  # belongs to the surface
    add_adsorbate(adatom, molecule("CO"), 4.0, "fcc")
    assert found(adatom) == [37, 38]
    both = above(SLAB, "CO")[0]
    low = both.positions[:, 2].min()
    both += Atoms("O", [[2.0, 2.0, low - 1.5]])
    tags = guessed(both).tags
    assert found(both) == [36, 37, 38] and (tags == Tag.SURFACE).sum() == 18


@pytest.mark.parametrize(
    ("crystal", "face"),
    [
        (bulk("MgO", "rocksalt", 4.21, cubic=True), (1, 0, 0)),
        (bulk("PdH", "rocksalt", 4.09, cubic=True), (1, 0, 0)),
        (bulk("CeO2", "fluorite", 5.41, cubic=True), (1, 1, 1)),
    ],
    ids=["MgO", "PdH", "CeO2"],
)
def test_elements_of_the_adsorbate_in_the_slab(crystal: Atoms, face: tuple[int, int, int]) -> None:
    slab = surface(crystal, face, 2, vacuum=8.0).repeat((2, 2, 1))
    slab.pbc = True
    assert "no adsorbate" in guessed(slab).text
    for gas in ("H2O", "CO2", "N"):
        atoms, own = above(slab, gas)
        assert found(atoms) == own, gas


def test_sheets() -> None:
    carbon = graphene("C2", size=(4, 4, 1), vacuum=8.0)
    carbon.pbc = True
    for gas, height in (("H2O", 3.0), ("O", 1.3)):
        atoms, own = put(carbon, molecule(gas), carbon.positions[5] + [0, 0, height])
        assert found(atoms) == own
    sulfide = mx2("MoS2", size=(3, 3, 1), vacuum=8.0)
    sulfide.pbc = True
    atoms, own = above(sulfide, "H2O", 3.0)
    assert found(atoms) == own


def test_free_atoms_of_a_slab_are_its_surface() -> None:
    atoms = above(SLAB, "CO")[0]
    atoms.set_constraint(FixAtoms(indices=range(18)))
    assert np.bincount(guessed(atoms).tags).tolist() == [18, 18, 2]
    assert np.bincount(guessed(atoms, (0.25, 0.25)).tags).tolist() == [27, 9, 2]


@pytest.mark.parametrize(
    ("atoms", "why"),
    [
        (bulk("Cu", cubic=True), "no vacuum"),
        (molecule("CH3OH"), "no slab"),
        (Atoms("CO", [[4, 4, 4], [4, 4, 5.1]], cell=[12, 12, 12], pbc=True), "no slab"),
        (SLAB, "no adsorbate"),
    ],
)
def test_tags_are_not_guessed_without_slab_vacuum_or_adsorbate(atoms: Atoms, why: str) -> None:
    guess = guessed(atoms)
    assert why in guess.text and not guess.tags.any()


def test_guessed_tags_are_reported(tmp_path, capsys) -> None:
    from ase.io import write

    frames = [above(SLAB, "CO")[0], above(SLAB, "CO")[0], SLAB]
    write(tmp_path / "a.extxyz", frames)
    dataset = open_dataset(tmp_path / "a.extxyz", reading=Reading(tags="guess"))
    assert [np.bincount(one.tags).tolist() for one in dataset] == [[27, 9, 2]] * 2 + [[36]]
    assert (dataset.to_atoms(0).get_tags() == dataset[0].tags.numpy()).all()
    told = capsys.readouterr().err.splitlines()
    assert "2 of 3" in told[0] and "1 adsorbate CO, 9 surface, 27 subsurface" in told[0]
    assert "1 of 3" in told[1] and "no adsorbate" in told[1]
    assert len(Tagged(dataset)) == 3


def test_tags_upside_down_are_noticed() -> None:
    record = Tagged(StructuresInMemory(above(SLAB, "CO")[0], ANY_TAGS))[0]
    assert heights_agree(record)
    record.tags = torch.where(record.tags == 2, 2, 1 - record.tags)
    assert not heights_agree(record)
