"""Structures through ASE: what is taken, and that nothing that can carry code is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import ase.db
import ase.io
import numpy as np
import pytest
import torch
from ase.build import add_adsorbate, fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian, FixedPlane, FixScaled

from molflt.data.structures import open_dataset
from molflt.data.structures.ase_files import AseStructures, _record_from_atoms


def slab(number=0):
    """CO on Cu(111) with OC20 tags, a fixed lower part, a stored energy, relaxed positions."""
    atoms = fcc111("Cu", (2, 2, 3), vacuum=6)
    atoms.set_tags(np.where(atoms.get_tags() == 1, 1, 0))
    surface = len(atoms)
    add_adsorbate(atoms, molecule("CO"), 2.0, "ontop")
    tags = atoms.get_tags()
    tags[surface:] = 2
    atoms.set_tags(tags)
    atoms.info = {"sid": 100 + number, "y_init": 0.5 + number}
    atoms.set_constraint(FixAtoms(np.flatnonzero(tags == 0)))
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0 - number)
    return atoms


def write(path, frames):
    if path.suffix in (".db", ".json"):
        with ase.db.connect(path) as database:
            for atoms in frames:
                database.write(atoms, **atoms.info)
    else:
        ase.io.write(path, frames, format=path.suffix[1:])
    return path


@pytest.mark.parametrize("name", ["a.traj", "a.extxyz", "a.db", "a.json", "run@300K.traj"])
def test_everything_is_taken(tmp_path, name):
    path = write(tmp_path / Path(name).with_stem("written"), [slab(i) for i in range(3)])
    path = path.rename(tmp_path / name)  # an at sign in a path is part of the name
    dataset = open_dataset(path)
    assert isinstance(dataset, AseStructures)
    assert len(dataset) == 3 and dataset.path == path and dataset.natoms.tolist() == [14] * 3
    for number, record in enumerate(dataset):
        atoms = slab(number)
        torch.testing.assert_close(record.pos, torch.tensor(atoms.positions).float())
        torch.testing.assert_close(record.cell[0], torch.tensor(atoms.cell.array).float())
        assert record.atomic_numbers.tolist() == atoms.numbers.tolist()
        assert record.tags.tolist() == [0] * 8 + [1] * 4 + [2] * 2
        assert record.fixed.tolist() == [True] * 8 + [False] * 6
        assert record.pbc.tolist() == [[True, True, False]]
        assert (record.sid, float(record.y_init)) == (100 + number, 0.5 + number)
        assert float(record.y_relaxed) == -1.0 - number
        assert record.pos_relaxed.isnan().all()


@pytest.mark.parametrize("suffix", ["cif", "vasp", "xsf", "xyz"])
def test_formats_without_labels(tmp_path, suffix):
    path = write(tmp_path / f"some.{suffix}", slab())
    record = open_dataset(path)[0]
    assert sorted(record.atomic_numbers.tolist()) == sorted(slab().numbers.tolist())
    assert record.y_relaxed.isnan().all() and record.y_init.isnan().all()
    assert not record.tags.any() and record.sid == 0


@pytest.mark.parametrize("name", ["a.traj", "a.extxyz", "a.db"])
def test_total_charges_are_taken(tmp_path, name):
    frames = [slab(i) for i in range(3)]
    for atoms, charge in zip(frames, (0, -1, 2), strict=True):
        atoms.info["total_charge"] = charge
    dataset = open_dataset(write(tmp_path / name, frames))
    assert [float(record.charge) for record in dataset] == [0, -1, 2]
    assert dataset.to_atoms(1).info["charge"] == -1
    frames[1].info["multiplicity"] = 2
    with pytest.raises(ValueError, match="frame 1.*multiplicity.*2"):
        open_dataset(write(tmp_path / f"b{name}", frames))


def test_relaxed_positions_come_from_an_array_and_are_unwrapped(tmp_path):
    atoms = slab()
    moved = atoms.positions + np.array([0.1, 0.0, 0.05])
    atoms.set_array("pos_relaxed", moved + atoms.cell[0] - 2 * atoms.cell[1])
    record = open_dataset(write(tmp_path / "a.extxyz", [atoms]))[0]
    torch.testing.assert_close(record.pos_relaxed, torch.tensor(moved).float(), atol=1e-5, rtol=0)


def test_precedence_of_energies_and_that_nothing_is_computed():
    atoms = slab()
    atoms.info["energy"] = 7.0
    assert float(_record_from_atoms(atoms).y_relaxed) == -1.0
    atoms.info["y_relaxed"] = 3.0
    assert float(_record_from_atoms(atoms).y_relaxed) == 3.0
    atoms.calc = None
    del atoms.info["y_relaxed"]
    assert float(_record_from_atoms(atoms).y_relaxed) == 7.0
    del atoms.info["energy"]
    atoms.calc = EMT()
    assert _record_from_atoms(atoms).y_relaxed.isnan().all()


def test_only_atoms_held_in_all_directions_are_fixed():
    atoms = slab()
    planes = [FixCartesian(1, [True, True, False]), FixedPlane(2, [0, 0, 1])]
    parts = [FixCartesian(5, [True, True, False]), FixCartesian(5, [False, False, True])]
    scaled = [FixScaled([3]), FixScaled([4], [True, False, True])]
    atoms.set_constraint([FixCartesian(0), *planes, *scaled, *parts])
    assert _record_from_atoms(atoms).fixed.nonzero().flatten().tolist() == [0, 3, 5]


def test_constraints_that_are_left_out_are_named_once(tmp_path, capsys):
    plane, both = slab(), slab(1)
    plane.set_constraint([FixAtoms([0]), FixedPlane([2, 3], [0, 0, 1])])
    both.set_constraint([FixedPlane([2], [0, 0, 1]), FixCartesian([1], [True, False, False])])
    path = write(tmp_path / "a.traj", [slab(), plane, both])
    assert open_dataset(path)[1].fixed.nonzero().flatten().tolist() == [0]
    assert capsys.readouterr().err == (
        f"molflt: warning: {path}: constraints other than fixed atoms are left out: FixCartesian "
        "in 1, FixedPlane in 2 structures; atoms that they hold count as free\n"
    )
    for one in (write(tmp_path / "b.extxyz", [slab()]), write(tmp_path / "b.traj", [slab()])):
        open_dataset(one)
    assert capsys.readouterr().err == ""
    lines = ["x", "1.0", "8 0 0", "0 8 0", "0 0 9", "Cu", "2", "Selective dynamics", "Direct"]
    lines += ["0 0 0 F F F", "0.5 0 0 T T F", ""]
    (tmp_path / "POSCAR").write_text("\n".join(lines))
    assert open_dataset(tmp_path / "POSCAR")[0].fixed.tolist() == [True, False]
    assert "are left out: FixScaled in 1 structures" in capsys.readouterr().err


def test_bad_frames_are_named_or_left_out(tmp_path):
    bad = slab()
    bad.positions[3, 1] = np.nan
    path = write(tmp_path / "some.traj", [slab(0), bad, slab(2)])
    with pytest.raises(ValueError, match=r"some\.traj: frame 1: sid 100: pos must be finite"):
        open_dataset(path)
    dataset = open_dataset(path, skip_bad=True)
    assert [record.sid for record in dataset] == [100, 102]
    assert dataset.bad[0][0] == f"{path}: frame 1" and "pos must be finite" in dataset.bad[0][1]
    bad = slab()
    bad.calc.results["energy"] = float("nan")
    with pytest.raises(ValueError, match="sid 100: energy must be .*nan"):
        open_dataset(write(tmp_path / "a.traj", [bad]))


@pytest.mark.parametrize("name", ["a.pkl", "a.py", "a.pickle", "a.npz", "a", "a.bundle"])
def test_formats_that_can_carry_code_are_refused(tmp_path, name):
    sentinel = tmp_path / "it-ran"
    path = tmp_path / name
    path.write_text(f"open({str(sentinel)!r}, 'w')\n")
    with pytest.raises(ValueError, match=r"unknown ending .* can carry code"):
        open_dataset(path)
    assert not sentinel.exists()


@pytest.mark.parametrize("content", [b"", b"tables"])
def test_database_without_structures_is_not_written_to(tmp_path, content):
    path = tmp_path / "a.db"
    if content:
        with sqlite3.connect(path) as tables:
            tables.execute("CREATE TABLE other (x)")
    else:
        path.touch()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="a.db: .*(systems|is empty)"):
        AseStructures(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
