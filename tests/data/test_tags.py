import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100, fcc111, graphene, molecule, surface
from ase.constraints import FixAtoms
from ase.io import write
from shared_files import shared

from molflt.atoms import Tag
from molflt.data.structures import open_dataset
from molflt.data.structures.base import ANY_TAGS, Reading
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.domain import DOMAIN, Domain
from molflt.data.structures.geometry import in_one_piece, touches_image
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.tags import Tagged, guess_tags, heights_agree

ROOT = Path(__file__).resolve().parents[2]


def guessed(atoms: Atoms, share=None):
    plain = atoms.copy()
    plain.set_tags(0)
    return guess_tags(StructuresInMemory(plain)[0], share)


def found(atoms: Atoms) -> list[int]:
    return np.flatnonzero(guessed(atoms).tags == Tag.ADSORBATE).tolist()


def above(slab: Atoms, gas: str, height: float = 2.0) -> tuple[Atoms, list[int]]:
    """Returns a slab with a molecule above its highest atom, and the indices of the molecule."""
    both, own = slab.copy(), molecule(gas)
    top = slab.positions[slab.positions[:, 2].argmax()]
    own.positions += top + np.array([0, 0, height]) - own.positions[own.positions[:, 2].argmin()]
    both += own
    return both, list(range(len(slab), len(both)))


def agreement(records, share=None) -> float:
    pairs = [(guess_tags(one, share).tags, one.tags.numpy()) for one in records]
    return float(np.mean(np.concatenate([guess == given for guess, given in pairs])))


@pytest.mark.parametrize("free", [False, True])
def test_the_sample_agrees(free: bool) -> None:
    """In each slab of the sample, a quarter of the atoms is surface and half is fixed."""
    dataset = open_dataset(ROOT / "datasets" / "chgnet-sample" / "val_ood_both.safetensors")
    records = [dataset[i] for i in range(0, 250, 5)]
    for one in records:
        one.fixed &= not free
    assert agreement(records, (0.25, 0.25)) >= 0.99


def test_oc20_agrees() -> None:
    assert agreement(open_dataset(shared("oc20", "oc20_is2re_val20.lmdb"))) >= 0.99


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


def open_axis(atoms: Atoms) -> Atoms:
    atoms.pbc = (True, True, False)
    atoms.cell[2] = 0
    return atoms


@pytest.mark.parametrize("change", [turned, sheared, moved, open_axis])
def test_cell_and_place_do_not_matter(change) -> None:
    atoms, gas = above(SLAB, "CH3OH")
    guess = guessed(change(atoms))
    assert np.flatnonzero(guess.tags == Tag.ADSORBATE).tolist() == gas
    assert guess.text == "1 adsorbate CH4O, 9 surface, 27 subsurface atoms"


@pytest.mark.parametrize("gas", ["BF3", "CH3SiH3"])
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
    for gas in ("O", "H2O", "SO2"):
        atoms, own = above(SLAB, gas)
        assert found(atoms) == own
    hollow = fcc100("Cu", (3, 3, 4), vacuum=8.0, periodic=True)
    add_adsorbate(hollow, "N", 0.2, "hollow")
    assert found(hollow) == [36]
    adatom = SLAB.copy()
    add_adsorbate(adatom, "Pt", 2.1, "fcc")  # belongs to the surface
    add_adsorbate(adatom, molecule("CO"), 4.0, "fcc")
    assert found(adatom) == [37, 38]


@pytest.mark.parametrize(
    "slab",
    [
        surface(bulk("PdH", "rocksalt", 4.09, cubic=True), (1, 0, 0), 2, vacuum=8.0),
        surface(bulk("CeO2", "fluorite", 5.41, cubic=True), (1, 1, 1), 2, vacuum=8.0),
        graphene("C2", size=(2, 2, 1), vacuum=8.0),
    ],
    ids=["PdH", "CeO2", "graphene"],
)
def test_elements_of_the_adsorbate_in_the_slab(slab: Atoms) -> None:
    slab = slab.repeat((2, 2, 1))
    slab.pbc = True
    assert "no adsorbate" in guessed(slab).text
    for gas in ("H2O", "N"):
        atoms, own = above(slab, gas)
        assert found(atoms) == own, gas


def test_guesses_follow_the_initial_weights(tmp_path: Path) -> None:
    """The weights were trained on slabs whose surface is two of four layers."""
    frames = [above(SLAB, gas)[0] for gas in ("CO", "H2O")]
    for atoms in frames:
        atoms.set_tags(0)
        atoms.info["y_relaxed"] = -1.0
    write(tmp_path / "mine.extxyz", frames)
    data = IS2REData(tmp_path / "mine.extxyz", tags="guess")
    domain = Domain.of(open_dataset(tmp_path / "mine.extxyz", reading=Reading(tags="guess")))
    data.initial = replace(domain, surface=(0.5, 0.6))
    data.setup()
    assert Domain.from_json(json.loads(data.files()[DOMAIN]), "").surface == (0.5, 0.6)
    assert np.bincount(data.datasets["train"][0].tags).tolist()[:2] == [18, 18]
    with pytest.raises(ValueError, match=r"task.repeat=0.1; add --data.tags guess"):
        IS2REData(tmp_path / "mine.extxyz").expect_slabs("task.repeat=0.1")


def test_free_atoms_of_a_slab_are_its_surface() -> None:
    atoms = above(SLAB, "CO")[0]
    atoms.set_constraint(FixAtoms(indices=range(18)))
    assert np.bincount(guessed(atoms).tags).tolist() == [18, 18, 2]
    assert np.bincount(guessed(atoms, (0.25, 0.25)).tags).tolist() == [27, 9, 2]
    thick = above(fcc111("Cu", (3, 3, 5), vacuum=8.0, periodic=True), "CO")[0]
    rounded = float(np.float32(0.2))  # above 0.2, in the domain.json of a run
    assert np.bincount(guessed(thick, (rounded, 0.4)).tags).tolist() == [36, 9, 2]


@pytest.mark.parametrize(
    ("atoms", "why"),
    [
        (bulk("Cu", cubic=True), "no vacuum"),
        (molecule("CH3OH"), "no slab (not periodic"),
        (Atoms("CO", [[4, 4, 4], [4, 4, 5.1]], cell=[12, 12, 12], pbc=True), "no slab (vacuum"),
        (SLAB, "no adsorbate"),
    ],
)
def test_tags_are_not_guessed_without_slab_vacuum_or_adsorbate(atoms: Atoms, why: str) -> None:
    guess = guessed(atoms)
    assert why in guess.text and not guess.tags.any()


def test_tags_upside_down_are_noticed() -> None:
    record = Tagged(StructuresInMemory(above(SLAB, "CO")[0], ANY_TAGS))[0]
    assert heights_agree(record)
    record.tags = torch.where(record.tags == 2, 2, 1 - record.tags)
    assert not heights_agree(record)


def both_sides(shift: float) -> Atoms:
    """Returns a slab with CO on both sides and a fixed lower half."""
    atoms = above(SLAB, "CO")[0]
    below = atoms[len(SLAB) :]
    below.positions[:, 2] = 2 * SLAB.positions[:, 2].mean() - below.positions[:, 2]
    atoms += below
    atoms.set_constraint(FixAtoms(indices=range(18)))
    atoms.positions[:, 2] += shift
    return atoms


def test_molecules_on_both_sides_have_surface_atoms_there() -> None:
    for shift in (0.0, 0.1, 0.5, 2.3):
        record = guessed(both_sides(shift))
        assert np.bincount(record.tags).tolist() == [18, 18, 4], shift
    record = Tagged(StructuresInMemory(both_sides(0.0), ANY_TAGS))[0]
    domain = replace(Domain.of(StructuresInMemory([record.clone()])), zero=(True, True))
    assert domain.refusal(record) == ""
    record.tags[(record.tags == 1) & (record.pos[:, 2] < record.pos[:, 2].mean())] = 0
    # otherwise the energy of one molecule would be 0
    assert "without surface atoms" in domain.refusal(record)
    # desorbed molecules are on no side
    atoms = above(SLAB, "CO", height=9.0)[0]
    record = Tagged(StructuresInMemory(atoms, ANY_TAGS))[0]
    record.tags[-2:] = 2
    assert replace(Domain.of(StructuresInMemory([record])), zero=(True, True)).refusal(record) == ""


def test_molecules_bonded_to_their_images() -> None:
    for n, touches in ((1, True), (3, False)):
        slab = fcc111("Cu", (n, n, 3), vacuum=8, periodic=True)
        flat = molecule("C6H6")
        flat.translate([0.5, 0.5, 15])
        atoms = slab + flat
        atoms.set_tags(len(slab) * [1] + 12 * [2])
        atoms.wrap()
        record = StructuresInMemory(atoms)[0]
        assert touches_image(record) is touches
        found = in_one_piece(atoms.numbers[-12:], atoms.positions[-12:], atoms.cell, atoms.pbc)
        if found is None:
            assert touches
            continue
        lengths = Atoms("C6H6", found).get_all_distances()
        np.testing.assert_allclose(lengths, molecule("C6H6").get_all_distances(), atol=1e-6)
