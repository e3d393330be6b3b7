"""Structures through ASE: what is taken, and that nothing that can carry code is opened."""

from __future__ import annotations

import re
import sqlite3
import tracemalloc
import warnings
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


def test_layer_tags_of_ase_are_refused_not_misread(tmp_path):
    atoms = fcc111("Cu", (1, 1, 4), vacuum=6)
    path = write(tmp_path / "layers.traj", [slab(), atoms])
    message = r"layers\.traj: frame 1: sid 1: tags must .* got 4.*set_t"
    with pytest.raises(ValueError, match=message):
        open_dataset(path)


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


@pytest.mark.parametrize("suffix", ["traj", "extxyz", "db", "json", "cif", "vasp"])
def test_damaged_files(tmp_path, suffix):
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(b"certainly not a structure\n" * 3)
    with pytest.raises(ValueError, match=rf"broken\.{suffix}: ") as caught:
        open_dataset(path)
    assert "\n" not in str(caught.value)


def test_empty_and_absent_files(tmp_path):
    (tmp_path / "empty.extxyz").write_text("")
    with pytest.raises(ValueError, match=r"empty\.extxyz: "):
        open_dataset(tmp_path / "empty.extxyz")
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_dataset(tmp_path / "absent.traj")


def json_with(path, old, new):
    write(path, [slab()])
    path.write_text(re.sub(old, new, path.read_text(), count=1, flags=re.S))


XYZ = "Properties=species:S:1:pos:R:3"
# A small file that claims to be large, and what is said of it.
CLAIMS = {
    "a.extxyz": (lambda p: p.write_text("999999999999\nx\nCu 0 0 0\n"), "999999999999 atoms"),
    "b.extxyz": (
        lambda p: p.write_text(f"1\n{XYZ}:x:R:999999999\nCu 0 0 0\n"),
        "1000000003 columns",
    ),
    "c.extxyz": (lambda p: p.write_text(f"0\n{XYZ}:x:R:999999999\n"), "1000000003 columns"),
    "d.extxyz": (lambda p: p.write_text(f"1\n{'a=1 ' * 30_000}\nCu 0 0 0\n"), "120001 characters"),
    "e.extxyz": (
        lambda p: p.write_text("1\nx\nCu 0 0 0\n" * 2 + "77777777\n"),
        "frame 2: .*77777777 atoms",
    ),
    "f.extxyz": (lambda p: p.write_text("9" * 5000 + "\nx\nCu 0 0 0\n"), "frame 0: .*atoms"),
    "a.vasp": (
        lambda p: p.write_text("Cu\n1\n4 0 0\n0 4 0\n0 0 4\nCu\n999999999\nDirect\n0 0 0\n"),
        "line 7 has 999999999 atoms",
    ),
    "b.vasp": (
        lambda p: p.write_text("Cu\n1\n4 0 0\n0 4 0\n0 0 4\n1 999999999\nDirect\n0 0 0\n"),
        "line 6 has 1000000000 atoms",
    ),
    "b.json": (
        lambda p: json_with(p, r'"ids": \[1\]', f'"ids": [{"1, " * 999}1]'),
        "row 1 comes",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_small_files_that_claim_to_be_large(tmp_path, name):
    make, message = CLAIMS[name]
    make(tmp_path / name)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"{name}: .*{message}") as caught:
            open_dataset(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(tmp_path)) + 400


def test_an_atom_far_away_is_named_or_left_out(tmp_path):
    path = tmp_path / "far.extxyz"
    near = '2\npbc="F F F"\nCu 0 0 0\nCu 2 0 0\n'
    path.write_text(near + near.replace("Cu 2", "Cu 1e6"))
    with pytest.raises(ValueError, match=r"frame 1: sid 1: pos .* within 100000 Å.* for atom 1"):
        open_dataset(path)
    assert len(open_dataset(path, skip_bad=True)) == 1


@pytest.mark.parametrize("index", [7, 2**40, -8])
def test_constraint_of_an_atom_that_is_not_there(tmp_path, index):
    path = tmp_path / "a.json"
    write(path, [slab()[:7]])
    text = path.read_text()
    held = re.search(r'"indices": \[[^]]*\]', text)[0]
    path.write_text(text.replace(held, f'"indices": [{index}]'))
    with pytest.raises(ValueError, match=r"a.json: frame 0: a constraint holds atom .* 0\.\.6"):
        AseStructures(path)


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


def test_warnings_name_the_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.traj"
    write(path, [slab(), slab(1)])
    read = ase.io.formats.iread

    def warning(*words, **options):
        for atoms in read(*words, **options):
            warnings.warn("planted\nin two lines", stacklevel=1)
            yield atoms

    monkeypatch.setattr(ase.io.formats, "iread", warning)
    assert len(AseStructures(path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"molflt: warning: {path}: ASE: 'planted in two lines'"
