"""Fields of a file that change what a structure means are read, named or refused."""

from __future__ import annotations

import gzip

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator

from molflt.data.structures import open_dataset
from molflt.data.structures.in_memory import StructuresInMemory

CIF = """data_x
_cell_length_a 9
_cell_length_b 9
_cell_length_c 9
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 1'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
"""
OCCUPIED = f"{CIF}_atom_site_occupancy\n"
LABELS = CIF.replace("_atom_site_type_symbol\n", "")
ATOM = (
    "ATOM      1 {name:>4}{place}LIG A   1       {x:.3f}   0.000   0.000  {share}  0.00{symbol}\n"
)


def pdb(name="CU", place=" ", share="1.00", symbol="          CU", x=0.0):
    return ATOM.format(name=name, place=place, share=share, symbol=symbol, x=x)


def xyz(comment, *rows):
    return "\n".join([str(len(rows)), comment, *rows, ""])


SPECIES = "Properties=species:S:1:pos:R:3"
CELL = "9 0 0 0 9 0 0 0 9"
REFUSED = {
    "two_species.cif": (f"{OCCUPIED}A1 Cu 0 0 0 0.6\nA2 Zn 0 0 0 0.4\n", "Cu 0.6, Zn 0.4"),
    "one_species.cif": (f"{OCCUPIED}A1 Cu 0 0 0 1\nA2 O .5 0 0 0.5(1)\n", "site 1 .*O 0.5"),
    "capitals.cif": (f"{CIF}A1 CL 0 0 0\n", "'CL'.* reads as C"),
    "capital_labels.cif": (f"{LABELS}CU1 0 0 0\n", "'CU1'.* reads as C"),
    "vacancy.cif": (f"{CIF}A1 Va 0 0 0\n", "site 0|atom 0 is 'Va'"),
    "part.pdb": (pdb(share="0.50") + pdb(x=2), "atom 0 .*occupancy 0.5"),
    "places.pdb": (pdb(place="A") + pdb(place="B", x=2), "line 2: .*'B'"),
    "calpha.pdb": (pdb(name="CA", symbol=""), "'CA' is C or Ca"),
    "species_and_Z.xyz": (
        xyz(f'Lattice="{CELL}" Properties=species:S:1:Z:I:1:pos:R:3', "Cu 8 0 0 0"),
        "atom 0 is Cu .* and 8",
    ),
    "two_species.xyz": (xyz("Properties=species:S:1:symbols:S:1:pos:R:3", "Cu O 0 0 0"), "Cu .*O"),
    "small_letters.xyz": (xyz(f'lattice="{CELL}" {SPECIES}', "Cu 0 0 0"), "'lattice'.*Lattice="),
    "cell.xyz": (xyz(f'cell="{CELL}" {SPECIES}', "Cu 0 0 0"), "'cell'.*Lattice="),
    "PBC.xyz": (xyz(f'Lattice="{CELL}" PBC="F F F" {SPECIES}', "Cu 0 0 0"), "'PBC'.*pbc="),
    "properties.xyz": (xyz("properties=Z:I:1:pos:R:3", "29 0 0 0"), "'properties'.*Properties="),
    "no_lattice.xyz": (xyz(f'pbc="T T T" {SPECIES}', "Cu 0 0 0"), "lattice vectors"),
    "fractions.xyz": (xyz("Properties=species:S:1:frac_pos:R:3", "Cu 0 0 0.5"), "pos:R:3.*frac"),
    "two_places.xyz": (
        xyz("Properties=species:S:1:pos:R:3:positions:R:3", "Cu 0 0 0 1 1 1"),
        "one column pos",
    ),
    "element.xyz": (xyz("Properties=element:S:1:pos:R:3", "Cu 0 0 0"), "species:S:1.*element"),
    "more.xyz": (xyz(SPECIES, "Cu 0 0 0 0.1 0.2 0.3"), "7 columns; expected 4"),
    "deuterium.xyz": (xyz("", "O 0 0 0", "D 0 0.8 0.6", "D 0 -0.8 0.6"), "atom 1 is 'D'.*write H"),
    "dummy.xyz": (xyz("", "Cu 0 0 0", "X 0 0 2"), "atom 1 is 'X'"),
    "label.xyz": (xyz("", "Cu1 0 0 0"), "atom 0 is 'Cu1'"),
    "deuterium.vasp": ("x\n1\n9 0 0\n0 9 0\n0 0 9\nO D\n1 1\nDirect\n0 0 0\n.1 0 0\n", "'D'.*H"),
    "axes.xyz": (xyz(f'Lattice="{CELL}" pbc="p p f" {SPECIES}', "Cu 0 0 0"), "'p p f'.*T T F"),
    "periodic.xyz": (xyz(f'Lattice="{CELL}" periodic="T T F" {SPECIES}', "Cu 0 0 0"), "pbc="),
    "bohr.xyz": (xyz("coordinates in bohr", "Cu 0 0 0"), "'bohr'.*Å"),
    "fractional.xyz": (xyz(f'Lattice="{CELL}" coordinates=fractional {SPECIES}', "Cu 0 0 0"), "Å"),
    "ipi.xyz": (xyz("# CELL(abcABC): 4 4 4 90 90 90", "Cu 0 0 0"), "'CELL.'.*Lattice="),
    "vectors.xyz": (xyz(f'Lattice_vectors="{CELL}" {SPECIES}', "Cu 0 0 0"), "Lattice="),
    "Occupancy.xyz": (xyz(f"{SPECIES}:Occupancy:R:1", "Cu 0 0 0 0.5"), "Occupancy 0.5"),
    "comment.xyz": (xyz(f"occupancy=0.5 {SPECIES}", "Cu 0 0 0"), "occupancy 0.5"),
    "unknown_place.cif": (f"{CIF}A1 Cu 0 0 ?\n", "_atom_site_fract_z"),
    "unknown_cell.cif": (f"{CIF}A1 Cu 0 0 0\n".replace("_c 9", "_c ?"), "_cell_length_c"),
    **{f"empty.{ending}": ("", "is empty") for ending in ("traj", "db", "xyz")},
    "conv.xsf": (
        "CRYSTAL\nCONVVEC\n4 0 0\n0 4 0\n0 0 4\nPRIMCOORD\n1 1\n29 0 0 0\n",
        "PRIMVEC, then CONVVEC",
    ),
    "one_place.cif": (f"{CIF}A1 Cu 0 0 0\nA2 Au 0 0 0\n", "'Au' and 'Cu'"),
    "counts.vasp": ("x\n1\n9 0 0\n0 9 0\n0 0 9\nO H N\n1 1\nDirect\n0 0 0\n.1 0 0\n", "2 counts"),
    "models.pdb": (
        f"CRYST1    9.000    9.000    9.000  90.00  90.00  90.00 P 1\nMODEL 1\n{pdb()}ENDMDL\n"
        f"MODEL 2\n{pdb()}ENDMDL\n",
        "CRYST1",
    ),
    "small.xyz": (
        xyz(f'Lattice="1 0 0 0 1 0 0 0 1" {SPECIES}', "Cu 0 0 0", "Cu 0 0 .5"),
        "per atom",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_of_ambiguous_structures_are_refused(tmp_path, name):
    content, words = REFUSED[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: frame 0: .*({words})") as caught:
        open_dataset(tmp_path / name)
    assert "KeyError" not in str(caught.value) and "\n" not in str(caught.value)


def test_fields_that_change_nothing_are_taken(tmp_path):
    for name, content, numbers in (
        ("whole.cif", f"{OCCUPIED}A1 Cu 0 0 0 1.0\nA2 O .5 0 0 ?\n", [29, 8]),
        ("deuterium.cif", f"{CIF}A1 D 0 0 0\nA2 O2- .5 0 0\n", [1, 8]),
        ("labels.cif", f"{LABELS}Cu1 0 0 0\nO1A .5 0 0\n", [29, 8]),
        ("whole.pdb", pdb() + pdb(x=2), [29, 29]),
        ("not_given.pdb", pdb(share="0.00") + pdb(share="0.00", x=2), [29, 29]),
        ("agree.xyz", xyz("Properties=species:S:1:Z:I:1:pos:R:3", "cu 29 0 0 0"), [29]),
        ("unit.xyz", xyz(f"force_unit=Hartree/Bohr {SPECIES}", "Cu 0 0 0"), [29]),
        ("axes.xyz", xyz(f'Lattice="{CELL}" pbc="1 1 0" {SPECIES}', "Cu 0 0 0"), [29]),
        ("numbers.xyz", xyz("Properties=Z:I:1:positions:R:3", "29 0 0 0"), [29]),
        ("cell.xyz", xyz("the unit cell of copper", "Cu 0 0 0"), [29]),
    ):
        (tmp_path / name).write_text(content)
        assert open_dataset(tmp_path / name)[0].atomic_numbers.tolist() == numbers


def test_structures_in_memory_are_checked_as_files_are():
    mixed = bulk("Cu")
    mixed.info["occupancy"] = {"0": {"Cu": 0.5, "Au": 0.5}}
    for atoms, words in (
        (mixed, "Cu 0.5, Au 0.5"),
        (Atoms("CuX", [[0, 0, 0], [0, 0, 2]]), "atom 1 is 'X'"),
        (Atoms("Cu2", [[0, 0, 0], [0, 0, 0.5]], cell=[1, 1, 1], pbc=True), "per atom"),
    ):
        with pytest.raises(ValueError, match=f"structure 0: .*{words}"):
            StructuresInMemory(atoms)


@pytest.mark.parametrize("blank", ["", "\n", "\n\n  \n"])
def test_frames_behind_a_blank_line_are_not_lost(tmp_path, blank):
    (tmp_path / "a.xyz").write_text(xyz("", "Cu 0 0 0") + blank + xyz("", "O 0 0 0"))
    assert [int(x.atomic_numbers) for x in open_dataset(tmp_path / "a.xyz")] == [29, 8]


@pytest.mark.parametrize("name", ["a.xyz", "a.extxyz.gz", "a.traj"])
def test_a_cut_file_names_the_frame(tmp_path, name):
    frames = [bulk("Cu", cubic=True) for _ in range(8)]
    whole = tmp_path / ("whole" + "".join((tmp_path / name).suffixes))
    ase.io.write(whole, frames, format="traj" if name.endswith("traj") else "extxyz")
    content = gzip.decompress(whole.read_bytes()) if name.endswith("gz") else whole.read_bytes()
    content = content[: len(content) * 7 // 8 - 30]
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ValueError, match=rf"{name}: frame \d: cannot be read"):
        open_dataset(tmp_path / name)


def test_only_bad_frames_are_left_out(tmp_path):
    good = xyz("", "Cu 0 0 0")
    path = tmp_path / "a.xyz"
    path.write_text(good + xyz("", "D 0 0 0") + good + xyz("", "Cu 0 0") + good + "2\n\nCu 0 0 0")
    dataset = open_dataset(path, skip_bad=True)
    assert len(dataset) == 3 and [dataset.place(i) for i in range(3)] == [0, 2, 4]
    assert [name for name, _ in dataset.bad] == [f"{path}: frame {i}" for i in (1, 3, 5)]


def test_names_as_sids_are_kept(tmp_path):
    frames = [bulk("Cu", cubic=True) for _ in range(3)]
    for atoms, sid in zip(frames, ["ag-12", "7", "cu_x"], strict=True):
        atoms.info["sid"] = sid
        atoms.calc = SinglePointCalculator(atoms, energy=-1.0)
    ase.io.write(tmp_path / "a.extxyz", frames)
    dataset = open_dataset(tmp_path / "a.extxyz")
    assert [record.sid for record in dataset] == [0, 7, 2]
    names = [dataset.name(i, record.sid) for i, record in enumerate(dataset)]
    assert names == ["ag-12", 7, "cu_x"]
    assert np.isfinite(dataset.y_relaxed).all()
