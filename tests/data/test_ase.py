import gzip
import re
import zlib
from pathlib import Path

import ase
import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian, FixedPlane, FixScaled
from ase.db.row import AtomsRow
from ase.io.formats import ioformats
from ase.io.jsonio import encode
from oc20_files import write_lmdb
from tiny_run import on_slab, structures, write_frames
from torch_geometric.data import Batch, Data

from molflt.data.structures import Reading, open_dataset
from molflt.data.structures.ase_fields import (
    Converter,
    drop_labels_,
    total_charge,
    unused_fields,
)
from molflt.data.structures.ase_files import ENDINGS, AseStructures, ase_format
from molflt.data.structures.base import to_atoms
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.labels import unit_fault
from molflt.data.structures.records import make_record


def slab(number=0):
    """Returns O on Cu(111) with OC20 tags, a fixed layer, and energies."""
    atoms = on_slab()
    atoms.pbc = (True, True, False)
    atoms.info = {"sid": 100 + number, "y_init": 0.5 + number, "charge": -1}
    forces = np.arange(39.0).reshape(13, 3) % 7 - 3 + number
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0 - number, forces=forces)
    return atoms


def packed(thing):
    return zlib.compress(encode(thing).encode())


def row(number):
    """Returns a row as ase-db-backends writes it."""
    own = AtomsRow(slab(number))
    fields = {
        name: own[name]
        for name in own.__dict__
        if name[0] != "_" and name not in (*own._keys, "id")
    }
    fields |= {"cell": np.asarray(own.cell), "mtime": 1.0, "ctime": 1.0, "user": "me"}
    fields["data"] = {"extra": [1.0, 2.0], "pos_relaxed": (own.positions + 0.125).tolist()}
    fields["key_value_pairs"] = slab(number).info
    fields["constraints"] = [each.todict() for each in own.constraints]
    return packed(fields)


def write_rows(path):
    content = {"nextid": packed(12), "deleted_ids": packed([2, *range(4, 10), 11])}
    rows = zip(("1", "3", "10"), map(row, range(3)), strict=True)
    return write_lmdb(path, content | dict(rows))


@pytest.mark.parametrize("name", ["a.extxyz", "a.db", "a.json", "run@300K.traj", "a.aselmdb"])
def test_everything_is_taken_and_nothing_is_written(tmp_path, name):
    path, lmdb = tmp_path / Path(name).with_stem("written"), name.endswith("lmdb")
    path = write_rows(path) if lmdb else write_frames(path, [slab(i) for i in range(3)])
    path = path.rename(tmp_path / name)  # an at sign in a path is part of the name
    dataset = open_dataset(path)
    assert isinstance(dataset, AseStructures)
    assert len(dataset) == 3 and dataset.path == path and dataset.natoms.tolist() == [13] * 3
    for number, record in enumerate(dataset):
        atoms = slab(number)
        torch.testing.assert_close(record.pos, torch.tensor(atoms.positions).float())
        torch.testing.assert_close(record.cell[0], torch.tensor(atoms.cell.array).float())
        torch.testing.assert_close(
            record.forces, torch.tensor(atoms.calc.results["forces"]).float()
        )
        assert record.atomic_numbers.tolist() == atoms.numbers.tolist()
        assert record.tags.tolist() == [0] * 4 + [1] * 8 + [2]
        assert record.fixed.tolist() == [True] * 4 + [False] * 9
        assert record.pbc.tolist() == [[True, True, False]]
        assert (record.sid, float(record.y_init)) == (100 + number, 0.5 + number)
        assert (float(record.y_relaxed), float(record.charge)) == (-1.0 - number, -1)
        relaxed = record.pos + (0.125 if lmdb else torch.nan)
        torch.testing.assert_close(record.pos_relaxed, relaxed, equal_nan=True)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_precedence_of_energies_and_that_nothing_is_computed():
    atoms = slab()
    atoms.info["energy"] = 7.0
    assert float(Converter().record(atoms).y_relaxed) == -1.0
    atoms.info["y_relaxed"] = 3.0
    assert float(Converter().record(atoms).y_relaxed) == 3.0
    atoms.calc = None
    del atoms.info["y_relaxed"]
    assert float(Converter().record(atoms).y_relaxed) == 7.0
    atoms.info["energy"] = float("nan")  # the message has the name in the file
    with pytest.raises(ValueError, match=": energy must be finite, in eV; got nan"):
        Converter().record(atoms)
    del atoms.info["energy"]
    atoms.calc = EMT()
    assert Converter().record(atoms).y_relaxed.isnan().all()


def test_only_atoms_held_in_all_directions_are_fixed():
    atoms = slab()
    planes = [FixCartesian(1, [True, True, False]), FixedPlane(2, [0, 0, 1])]
    parts = [FixCartesian(5, [True, True, False]), FixCartesian(5, [False, False, True])]
    scaled = [FixScaled([3]), FixScaled([4], [True, False, True])]
    atoms.set_constraint([FixCartesian(0), *planes, *scaled, *parts])
    assert Converter().record(atoms).fixed.nonzero().flatten().tolist() == [0, 3, 5]
    atoms.set_constraint(FixAtoms([0, len(atoms)]))
    with pytest.raises(ValueError, match="constraint .*13.* expected atoms 0 to 12"):
        Converter().record(atoms)


@pytest.mark.parametrize("name", ["a.pkl", "a"])
def test_formats_that_can_carry_code_are_refused(tmp_path, name):
    sentinel = tmp_path / "it-ran"
    path = tmp_path / name
    path.write_text(f"open({str(sentinel)!r}, 'w')\n")
    with pytest.raises(ValueError, match=r"unknown ending .* as H and He.* can carry code"):
        open_dataset(path)
    assert not sentinel.exists()


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
FORMULA = CIF.replace("loop_", "_chemical_formula_sum 'Cu H2'\nloop_")
LABELS = CIF.replace("_atom_site_type_symbol\n", "")
PDB = "ATOM      1   CU LIG A   1       0.000   0.000   0.000  0.50  0.00          CU\n"


def xyz(comment, *rows):
    return "\n".join([str(len(rows)), comment, *rows, ""])


SPECIES = "Properties=species:S:1:pos:R:3"
CELL = "9 0 0 0 9 0 0 0 9"
MODEL = f"MODEL\n{PDB}ENDMDL\n"
BOX = f"CRYST1{3 * '    9.000'}{3 * '  90.00'}"
POSCAR = "x\n1\n9 0 0\n0 9 0\n0 0 9\nC O Cu\n1 1 1\nCart\n0 0 1 F\n0 0 2 F\n0 0 4 F\n"
NWI = "charge -1\n\ngeometry\n  O 0.0 0.0 0.0\nend\n\ntask dft energy\n"
JOB = "#P HF\n\nhydroxide\n\n-1 1\nO 0.0 0.0 0.0\nH 0.0 0.0 0.96\n\n"
GRID = "1 0.5 0 0\n 1 0 0.5 0\n 1 0 0 0.5\n 8 0 0 0 0\n 0.1\n"
HEADER = "Northwest Computational Chemistry Package\n"
GEOMETRY = """
                    Geometry "geometry" -> ""
                    -------------------------

 Output coordinates in angstroms (scale by  1.889725989 to convert to a.u.)

  No.       Tag          Charge          X              Y              Z
 ---- ---------------- ---------- -------------- -------------- --------------
    1 He                   2.0000     0.00000000     0.00000000     0.00000000

                                 NWChem DFT Module
                                 -----------------

         Total DFT energy =    -2.8

"""
RES = "TITL x\nCELL 1 5 5 5 90 90 90\nLATT -1\nSFAC H\nH 1 .1 .2 .3 1\nEND\n"
SDF = """
  made by hand

  2  1  0  0  0  0  0  0  0  0999 V2000
    0.0000    0.0000    0.0000 O   0  5  0  0  0
    0.0000    0.0000    0.9600 H   0  0  0  0  0
  1  2  1  0
M  CHG  1   1  -1
M  END
"""
PWI = """&system
 ibrav=0, nat=1, ntyp=1, tot_charge=-1.d0
/
ATOMIC_SPECIES
O 16 O.upf
CELL_PARAMETERS angstrom
9 0 0
0 9 0
0 0 9
ATOMIC_POSITIONS angstrom
O 0 0 0
"""
GAUSSIAN = """ Entering Gaussian System, Link 0=g16
 Charge = -1 Multiplicity = 1
                          Input orientation:
 ------
 Center
 Number
 ------
      1          8           0        0.000000    0.000000    0.000000
 ------
 SCF Done:  E(RHF) =  -74.0     A.U. after    9 cycles
"""
ORCA = """                                 * O   R   C   A *
 Total Charge           Charge          ....   -1
 Multiplicity           Mult            ....    1
Number of atoms                             ...      1
---------------------------------
CARTESIAN COORDINATES (ANGSTROEM)
---------------------------------
  O      0.000000    0.000000    0.000000

FINAL SINGLE POINT ENERGY       -74.0
                             ****ORCA TERMINATED NORMALLY****
"""


REFUSED = {
    "two_species.cif": (f"{OCCUPIED}A1 Cu 0 0 0 0.6\nA2 Zn 0 0 0 0.4\n", "Cu 0.6, Zn 0.4"),
    "no_occupancy.cif": (f"{CIF}A1 Cu 0 0 0\nA2 Au 0 0 0\n", "site 1: Au and Cu"),
    "image.cif": (f"{CIF}A1 Cu 0 0 0\nA2 Zn 1 0 0\n", "site 1: Zn and Cu"),
    "rounded.cif": (f"{CIF}A1 Cu .3333 0 0\nA2 Zn .33333 0 0\n", "site 1: Zn and Cu"),
    "unknown.cif": (f"{CIF}A1 Cu 0 0 0\nA2 O 0 0 ?\n", "site 1 .* no coordinates"),
    "one_species.cif": (f"{OCCUPIED}A1 Cu 0 0 0 1\nA2 O .5 0 0 0.5(1)\n", "site 1 .*O 0.5"),
    "formula.cif": (f"{FORMULA}A1 Cu 0 0 0\n", "sites of H"),
    "angles.cif": (f"{CIF}A1 Cu 0 0 0\n".replace("_cell_angle_beta 90\n", ""), "three angles"),
    "magnetic.cif": (
        CIF.replace("loop_", "_space_group_symop_magn_operation.xyz x,y,z,+1\nloop_"),
        "ignores _space_group_symop_magn",
    ),
    "capitals.cif": (f"{CIF}A1 CL 0 0 0\n", "'CL'.* reads as C"),
    "part.pdb": (PDB, "atom 0 .*occupancy 0.5"),
    "names.pdb": (PDB.replace(" CU LIG", "CA  LIG").rstrip()[:-2], "CA .*77 and 78.* read as Ca"),
    "small_letters.xyz": (xyz(f'lattice="{CELL}" {SPECIES}', "Cu 0 0 0"), "'lattice'.*Lattice="),
    "periodic.xyz": (xyz(f'Lattice="{CELL}" periodic="T T F" {SPECIES}', "Cu 0 0 0"), "pbc="),
    "no_lattice.xyz": (xyz(f'pbc="T T T" {SPECIES}', "Cu 0 0 0"), "lattice vectors"),
    "jobs.gjf": (f"{JOB}--Link1--\n{JOB}", "Link1"),
    "jobs.nwi": (f"{NWI}charge 0\ntask dft energy\n", "different charges"),
    "jobs.out": ("* O   R   C   A *\n|  1> $new_job\n", "new_job"),
    "bohr.gjf": (JOB.replace("HF", "HF units=au"), "ignores 'units=au'"),
    "list.gjf": (JOB.replace("HF", "HF units=(rad,au)"), "ignores 'units=.rad,au'"),
    "layers.log": (f"{GAUSSIAN} ONIOM: extrapolated energy = -9\n", "ignores 'ONIOM"),
    "bohr.nwi": (NWI.replace("geometry", "geometry units bohr"), "ignores 'geometry units bohr'"),
    "symmetry.nwi": (NWI.replace("  O", "  symmetry d2h\n  O"), "ignores 'symmetry d2h'"),
    "label.nwi": (NWI.replace("end", "  H1 0.0 0.0 0.7\nend"), "ignores 'H1 0.0"),
    "group.pdb": (f"{BOX} P 21 21 21    4\n{PDB}", "P 21 21 21"),
    "models.pdb": (f"{BOX} P 1           1\n{2 * MODEL}", "ignores 'CRYST1.*P 1  *1'"),
    "location.pdb": (PDB.replace(" LIG", "BLIG").replace("0.50", "1.00"), "ignores 'ATOM"),
    "ion.pdb": (f"{PDB.rstrip()}2+\n", "ignores '2.'"),
    "occupied.res": (RES.replace(".3 1", ".3 0.5"), "ignores 'H 1 .1 .2 .3 0.5'"),
    "symmetry.res": (f"{RES}SYMM -x,-y,z\n", "ignores 'SYMM -x,-y,z'"),
    "coord": ("$coord angs\n 0 0 0 h\n 0 0 0.74 h\n$end\n", "ignores '.coord angs'"),
    "bohr.nwo": (HEADER + GEOMETRY.replace("angstroms", "a.u."), "ignores 'Output coord"),
    "two.nwo": (HEADER + 2 * GEOMETRY, "ignores 'Total DFT energy"),
    "geometry.in": (
        "lattice_vector 9 0 0\n constrain_relaxation .true.\natom 0 0 0 Cu\n",
        "ignores 'lattice_vector",
    ),
    "bohr.abo": (".Version 9.6.2 of ABINIT\n acell 5.0 5.0 5.0 Bohr\n", "ignores 'acell 5.0"),
    "dispersion.castep": ("Dispersion corrected final energy*, Ecor = -3 eV\n", "ignores 'Disp"),
    "molecule.cube": (f"x\nx\n 1 -5.0 0.0 0.0\n {GRID}", "ignores '1 -5.0 0.0 0.0'"),
    "hybrid.pwo": ("!    total energy = -1 Ry\n!!   total energy = -2 Ry\n", "ignores '!!"),
    "comment.pwi": (PWI.replace("IONS angstrom", "IONS angstrom ! not crystal"), "crystal"),
    "images.xsd": ('<Atom3d ImageOf="3"/>', "ignores 'ImageOf"),
    "aenet.xsf": ("# total energy = -3.0 eV\nATOMS\nCu 0 0 0 0.1 0 0\n", "ignores '# total"),
    "POSCAR_free": (POSCAR.replace("Cart", "Selective\nCart").replace(" F", " f f f"), "1 f f f"),
    "POSCAR_4": (POSCAR.replace("C O Cu\n", "").replace("x\n", "CO on Cu\n"), "3 elem.*POTCAR"),
    "field/geometry.in": ("atom 0 0 0 Cu\nhomogeneous_field 0 0 1\n", "ignores 'homogeneous"),
    "drawing.mol": (SDF.replace("  made by hand", "  RDKit             2D"), "2D"),
    "cut.mol": (SDF.replace("M  END", ""), "M  END.*truncated"),
    "radical.mol": (SDF.replace("O   0  5", "O   0  4").replace("M  CHG", "#"), "must be 1.*2"),
    "triplet.mol": (SDF.replace("CHG  1   1  -1", "RAD  1   1   3"), "must be 1.*3"),
    "triplet.gjf": (JOB.replace("-1 1", "0 3"), "multiplicity must be 1.*3"),
    "more.xyz": (xyz(SPECIES, "Cu 0 0 0 0.1 0.2 0.3"), "7 columns; expected 4"),
    "two_columns.xyz": (xyz("Properties=species:S:1:pos:R:3:Z:I:1", "Cu 0 0 0 8"), "0 .*O"),
    "symbols.xyz": (xyz("Properties=species:S:1:pos:R:3:element:S:1", "Cu 0 0 0 O"), "0 .*Cu"),
    "share.xyz": (xyz("Properties=species:S:1:pos:R:3:occ:R:1", "Cu 0 0 0 0.5"), "occupancy 0.5"),
    "fractions.xyz": (xyz("Properties=species:S:1:frac_pos:R:3", "Cu 0 0 0.5"), "pos:R:3.*frac"),
    "deuterium.xyz": (xyz("", "O 0 0 0", "D 0 0.8 0.6", "D 0 -0.8 0.6"), "'D'.*with H"),
    "axes.xyz": (xyz(f'Lattice="{CELL}" pbc="p p f" {SPECIES}', "Cu 0 0 0"), "'p p f'.*T T F"),
    "bohr.xyz": (xyz("coordinates in bohr", "Cu 0 0 0"), "'bohr'.*Å"),
    "empty.xyz": ("", "is empty"),
    "OUTCAR": (f"{2 * ' POTCAR: PAW_PBE Cu '}\n ions per type = 1\n Iteration 1( 1)", "no struct"),
    "small.xyz": (
        xyz(f'Lattice="1 0 0 0 1 0 0 0 1" {SPECIES}', "Cu 0 0 0", "Cu 0 0 .5"),
        "per atom",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_of_ambiguous_structures_are_refused(tmp_path, name):
    content, words = REFUSED[name]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: frame 0: .*({words})"):
        open_dataset(tmp_path / name)


def test_fields_that_change_nothing_are_taken(tmp_path):
    for name, content, numbers in (
        ("whole.cif", f"{OCCUPIED}A1 Cu 0 0 0 1.0\nA2 O .5 0 0 ?\n", [29, 8]),
        ("labels.cif", f"{LABELS}Cu1 0 0 0\nO1A .5 0 0\n", [29, 8]),
        ("formula.cif", f"{FORMULA}A1 Cu 0 0 0\nA2 H .5 0 0\n", [29, 1]),
        ("twice.cif", f"{CIF}A1 Cu 0 0 0\nA2 Cu 0 0 0\n", [29]),
        ("axes.xyz", xyz(f'Lattice="{CELL}" pbc="1 1 0" {SPECIES}', "Cu 0 0 0"), [29]),
        ("spaces.res", RES.replace("LATT -1", "LATT  -1"), [1]),
        ("title.res", RES.replace("TITL x", "TITL 1 0.02 45.1 -9.3 0.00 0.00 1"), [1]),
        ("fixed.res", RES.replace(".3 1", ".3 11.000 .05"), [1]),
        ("POSCAR_comment", POSCAR.replace("1 F", "1 site f").replace("2 F", "2 f"), [6, 8, 29]),
        ("cells.pdb", 2 * f"{BOX} P 1           1\n{MODEL}".replace("0.50", "1.00"), [29]),
        ("end.pdb", 2 * MODEL.replace("0.50", "1.00") + "END\n", [29]),
    ):
        (tmp_path / name).write_text(content)
        assert open_dataset(tmp_path / name)[0].atomic_numbers.tolist() == numbers


def test_the_search_for_a_geometry_ends_at_the_next_energy(tmp_path):
    """A search through the rest of the file for each energy would take minutes."""
    energies = [f"         Total DFT energy =    {energy}\n" for energy in (-2.8, -2.9)]
    (tmp_path / "scan.nwo").write_text("".join([HEADER, GEOMETRY, *energies]))
    assert len(open_dataset(tmp_path / "scan.nwo")) == 1
    (tmp_path / "scan.nwo").write_text("".join([HEADER, GEOMETRY, *energies, GEOMETRY]))
    with pytest.raises(ValueError, match=r"energy = +-2\.9"):
        open_dataset(tmp_path / "scan.nwo")


GPAW = """  ___ ___ ___ _ _ _
Total Charge: -1.000000

Positions:
   0 O      4.500000    4.500000    4.500000    ( 0.0000,  0.0000,  0.0000)

Unit cell:
           periodic     x           y           z      points  spacing
  1. axis:    no     9.000000    0.000000    0.000000    36     0.2500
  2. axis:    no     0.000000    9.000000    0.000000    36     0.2500
  3. axis:    no     0.000000    0.000000    9.000000    36     0.2500
"""
STATED = {
    "a.gjf": JOB,
    "title.gjf": JOB.replace("hydroxide", "Charge 2, multiplicity 3"),
    "transfer.gjf": JOB.replace("hydroxide", "Charge-transfer state"),
    "numbers.gjf": JOB.replace("hydroxide", "2 1"),
    "layers.gjf": JOB.replace("-1 1", "-1 1 0 1 0 1"),
    "a.nwi": NWI,
    "a.pwi": PWI,
    "prefix.pwi": f"&control\n prefix='tot_charge 3'\n/\n{PWI}",
    "a.mol": SDF,
    "comment.mol": f"{SDF}> <comment>\nM  CHG  1   1   5\n",
    "old.mol": SDF.replace("M  CHG  1   1  -1\n", ""),
    "a.log": GAUSSIAN,
    "title.log": GAUSSIAN.replace(" Charge", " Charge 2 and multiplicity 3\n Charge"),
    "parts.log": GAUSSIAN.replace(
        "ity = 1\n", "ity = 1 in supermolecule\n Charge = 0 Multiplicity = 1 in fragment 1.\n"
    ),
    "orca.out": ORCA,
    "coord": "$coord\n 0 0 0 h\n$chrg -1\n$end\n",
    "gpaw.out": GPAW,
}


@pytest.mark.parametrize("name", STATED)
def test_charges_are_read_from_files_of_other_programs(tmp_path, name):
    (tmp_path / name).write_text(STATED[name])
    assert float(open_dataset(tmp_path / name)[0].charge) == -1


@pytest.mark.parametrize(
    ("path", "place", "line"),
    [
        ("castep/md.castep", " number of bands", " net charge of system : -1.000\n"),
        (
            "aims/issue_3345_spin_md_light.out",
            "          Preparing all fixed parts",
            "  Charge =  -1.000000E+00: Charged system requested explicitly.\n",
        ),
    ],
)
def test_charges_are_read_from_outputs_of_dynamics(tmp_path, path, place, line):
    content = example(path).read_text()
    assert content.count(place) == 1
    content = content.replace(" net charge of system                           :  0.000    \n", "")
    (tmp_path / Path(path).name).write_text(content.replace(place, line + place))
    assert float(open_dataset(tmp_path / Path(path).name)[0].charge) == -1


@pytest.mark.parametrize(("name", "text"), [("a.res", RES), ("a.pdb", f"{PDB}END\n")])
def test_a_text_without_its_last_line_gives_a_warning(tmp_path, capsys, name, text):
    for content, words in ((text, ""), (text.replace("END\n", ""), "may be truncated")):
        (tmp_path / name).write_text(content.replace("0.50", "1.00"))
        open_dataset(tmp_path / name)
        err = capsys.readouterr().err
        assert words in err and bool(words) == bool(err)


def test_all_molecules_of_an_sdf_file_are_read(tmp_path):
    (tmp_path / "a.sdf").write_text(f"{SDF}$$$$\n{SDF.replace('-1', ' 1').replace('O', 'N')}$$$$\n")
    found = [(int(x.atomic_numbers[0]), float(x.charge)) for x in open_dataset(tmp_path / "a.sdf")]
    assert found == [(8, -1), (7, 1)]


def test_radicals_replace_the_codes_of_charges(tmp_path):
    (tmp_path / "a.mol").write_text(SDF.replace("M  CHG  1   1  -1", "M  RAD  1   1   1"))
    assert float(open_dataset(tmp_path / "a.mol")[0].charge) == 0


def test_frames_behind_a_blank_line_are_not_lost(tmp_path):
    (tmp_path / "a.xyz").write_text(xyz("", "Cu 0 0 0") + "\n\n  \n" + xyz("", "O 0 0 0"))
    assert [int(x.atomic_numbers) for x in open_dataset(tmp_path / "a.xyz")] == [29, 8]


@pytest.mark.parametrize("name", ["a.extxyz.gz", "a.traj"])
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
    path.write_text(xyz("", "D 0 0 0"))
    ((_, reason),) = open_dataset(path, True, Reading(energy_key="dft")).bad
    assert "'D' is" in reason  # not that the key is missing


def test_other_files_of_a_folder_may_be_damaged(tmp_path, capsys):
    (tmp_path / "a.xyz").write_text(xyz("", "Cu 0 0 0"))
    (tmp_path / "log.gz").write_bytes(gzip.compress(b"", mtime=0)[:10] + b"\xff" * 99)
    ase.io.write(tmp_path / "b.json", Atoms("Cu"))  # may also be settings
    assert len(open_dataset(tmp_path)) == 1
    assert capsys.readouterr().err == f"molflt: {tmp_path}: 1 sources; not read: b.json, log.gz\n"


EXAMPLES = Path(ase.__file__).parent / "test" / "testdata"


def example(name: str) -> Path:
    if not (EXAMPLES / name).is_file():
        pytest.skip(f"ASE's example {name} is not at {EXAMPLES}")
    return EXAMPLES / name


@pytest.mark.parametrize("name", ["OUTCAR.3", "log", "OUTCAR.gz"])
def test_outcar(tmp_path, name, capsys):
    content = example("vasp/OUTCAR_example_1").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    dataset = open_dataset(tmp_path / name)
    expected = ase.io.read(example("vasp/OUTCAR_example_1"), format="vasp-out")
    record = dataset[0]
    assert record.atomic_numbers.tolist() == expected.numbers.tolist()
    assert float(record.energy) == expected.get_potential_energy()
    np.testing.assert_allclose(record.forces, expected.get_forces(), atol=1e-6)
    assert "free_energy" in dataset.unused
    free = open_dataset(tmp_path / name, reading=Reading("free_energy"))[0]
    assert float(free.energy) == expected.get_potential_energy(force_consistent=True)
    assert float(free.energy) != float(record.energy)
    text = re.sub(r"(NELM +=) *120", r"\1 63", content.decode())
    (tmp_path / "OUTCAR").write_text(text)
    capsys.readouterr()
    open_dataset(tmp_path / "OUTCAR")
    assert "used all 63" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vasp_2.xml", "md.xml"])
def test_vasprun(tmp_path, name, capsys):
    content = example("vasp/vasprun_pstress.xml").read_text()
    (tmp_path / name).write_text(content)
    record = open_dataset(tmp_path / name)[0]
    expected = ase.io.read(example("vasp/vasprun_pstress.xml"), format="vasp-xml")
    assert float(record.energy) == expected.get_potential_energy()
    np.testing.assert_allclose(record.stress[0], expected.get_stress(voigt=False), atol=1e-6)
    assert not capsys.readouterr().err
    (tmp_path / name).write_text(re.sub('("NELM">) *60', r"\1 9", content))
    open_dataset(tmp_path / name)
    assert "steps, such as step 1, used all 9" in capsys.readouterr().err
    (tmp_path / name).write_text(content[: content.rindex("</modeling>")])
    open_dataset(tmp_path / name)
    assert "the file is truncated" in capsys.readouterr().err


CRYSTAL, MOLECULE = bulk("NaCl", "rocksalt", a=5.64, cubic=True), molecule("CH3OH")


WRITTEN = {
    "POSCAR_01": ("vasp", CRYSTAL),
    "geometry.in": ("aims", CRYSTAL),
    "a.pwi": ("espresso-in", CRYSTAL),
    "a.cube": ("cube", CRYSTAL),
    "a.cif.xz": ("cif", CRYSTAL),
    "a.con": ("eon", CRYSTAL),
    "a.nwi": ("nwchem-in", MOLECULE),
    "coord": ("turbomole", MOLECULE),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_inputs_of_other_programs(tmp_path, name):
    kind, atoms = WRITTEN[name]
    options = {"espresso-in": {"pseudopotentials": {"Na": "Na.upf", "Cl": "Cl.upf"}}}
    ase.io.write(tmp_path / name, atoms, format=kind, **options.get(kind, {}))
    record = open_dataset(tmp_path / name)[0]
    assert sorted(record.atomic_numbers.tolist()) == sorted(atoms.numbers.tolist())
    assert record.pbc.tolist() == [atoms.pbc.tolist()]
    if atoms.pbc.all():
        assert record.cell[0].det() == pytest.approx(atoms.cell.volume, rel=1e-3)
    found = Atoms(record.atomic_numbers, record.pos, cell=record.cell[0], pbc=record.pbc[0])
    distances = [np.sort(one.get_all_distances(mic=True), axis=None) for one in (found, atoms)]
    np.testing.assert_allclose(*distances, atol=1e-3)


def test_a_changed_file_has_a_new_format(tmp_path):
    path = tmp_path / "relaxation"
    for text, kind in ((" vasp.6.4.2 \n", "vasp-out"), ("<modeling>", "vasp-xml"), ("no", None)):
        path.write_text(text)
        assert ase_format(path) == kind


def test_known_formats_are_those_that_ase_reads():
    for kind in set(ENDINGS.values()) - {"aselmdb"}:
        assert kind in ioformats and "pickle" not in ioformats[kind].module_name


def hydrogen(**info: object) -> Atoms:
    return Atoms("H2", [[0, 0, 0], [0, 0, 1]], info=info)


def test_outputs_of_databases_have_the_charge_and_no_old_labels(tmp_path: Path) -> None:
    data = {"charge": -2, "REF_forces": np.ones((2, 3)), "grid": np.ones(3)}
    with ase.db.connect(tmp_path / "a.db") as database:
        database.write(hydrogen(), data=data, REF_energy=-5.0, kind="x")
    dataset = open_dataset(tmp_path / "a.db", reading=Reading(keep_atoms=True))
    atoms = dataset.to_atoms(0)
    drop_labels_(atoms, moved=True)
    assert atoms.info["key_value_pairs"] == {"kind": "x"}
    assert atoms.info["data"].keys() == {"charge", "grid"}
    assert "REF_energy" in dataset.to_atoms(0).info["key_value_pairs"]  # a copy was changed
    with pytest.warns(UserWarning, match="data"):  # not stored, because it contains an array
        ase.io.write(tmp_path / "b.extxyz", atoms)
    assert total_charge(ase.io.read(tmp_path / "b.extxyz")) == -2


def test_fields_that_are_not_used_are_named() -> None:
    for name in ("charges", "Spin_Multiplicity", "External_Field", "magnetic-moment"):
        assert unused_fields(hydrogen(**{name: -2.5})) == [name]
        assert unused_fields(hydrogen(data={name: [0, 3]})) == [name]
    assert unused_fields(hydrogen(settings={"charge": 1, "spin": 1})) == ["settings.charge"]
    for neutral in (
        {"charge": "0", "spin": np.array(0.0), "multiplicity": 1, "electric_field": np.zeros(3)},
        {"nuclear_charges": [1, 1], "force_field": 3, "energy": -1.0, "magmom": float("nan")},
    ):
        assert unused_fields(hydrogen(**neutral)) == []
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 1]], magmoms=[1, -1], charges=[0.5, 0])
    assert unused_fields(atoms) == ["initial_magmoms", "initial_charges"]
    atoms = hydrogen()
    atoms.calc = SinglePointCalculator(atoms, energy=1.0, magmom=2.0, magmoms=[1.0, 1.0])
    assert unused_fields(atoms) == ["magmom", "magmoms"]


@pytest.mark.parametrize("name", ["CHARGE", "total_charge", "totalCharge", "net charge"])
def test_total_charge(name: str) -> None:
    for value in (-1, "-1", np.array([-1.0])):
        atoms = hydrogen(data={name: value}, multiplicity=1)
        assert total_charge(atoms) == -1 and unused_fields(atoms) == []
    assert total_charge(hydrogen(**{name: None, "nuclear_charge": 1})) is None
    per_atom = hydrogen(**{name: [1, 0]})
    assert total_charge(per_atom) is None and name in unused_fields(per_atom)
    with pytest.raises(ValueError, match=r"multiplicity.* 1.*3"):
        total_charge(hydrogen(**{name: 0, "multiplicity": 3}))


def test_energies_of_two_charges_are_not_compared() -> None:
    """Checks that ionization energies are not mistaken for wrong units."""
    frames = []
    for number in range(60):
        charge = number % 2  # the closest frame has the other charge and is 0.001 Å longer
        stretch = 0.05 + 0.01 * (number // 2) + 0.001 * charge
        frames.append(
            make_record(
                pos=[[0, 0, 0], [0, 0, 1.1 + stretch]],
                atomic_numbers=[6, 8],
                energy=20 * stretch**2 + charge,
                forces=[[0, 0, 40 * stretch], [0, 0, -40 * stretch]],
                charge=charge,
            )
        )
    assert unit_fault(frames) == ""
    for frame in frames:
        frame.charge[:] = 0
    assert unit_fault(frames) != ""


# --- structures in memory -------------------------------------------------------------------------


def test_pyg_data_are_taken_in_any_form() -> None:
    records = list(structures(3))
    for given in (
        records,
        tuple(records),
        Batch.from_data_list(records),
        [Batch.from_data_list(records[:2]), records[2]],
        StructuresInMemory(records),
    ):
        own = StructuresInMemory(given)
        assert own.natoms.tolist() == [one.natoms for one in records]
        for one, record in zip(own, records, strict=True):
            assert torch.equal(one.pos, record.pos) and one.sid == record.sid
            assert torch.equal(one.y_relaxed, record.y_relaxed)
    data = Data(pos=torch.rand(2, 3, dtype=torch.float64), z=torch.tensor([1, 1]))
    own = StructuresInMemory(data)[0]
    assert own.atomic_numbers.tolist() == [1, 1] and not own.pbc.any()
    assert own.pos.dtype == torch.float32 and torch.isnan(own.y_relaxed).all()
    data.sid = "mp-1"
    assert StructuresInMemory([data]).name(0, 0) == "mp-1"
    data.y_relaxed = torch.tensor([float("nan")])  # NaN counts as a missing label
    assert len(StructuresInMemory([data])) == 1
    data.total_charge = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    data.x = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)  # not read
    assert float(StructuresInMemory(data)[0].charge) == -1
    data.multiplicity = torch.tensor([3])
    with pytest.raises(ValueError, match=r"multiplicity.* 1.*3"):
        StructuresInMemory(data)


def test_total_charge_is_read_and_spin_named_once(capsys) -> None:
    first, again = StructuresInMemory(2 * [hydrogen(charge=1, spin=2)])
    assert float(first.charge) == 1 and capsys.readouterr().err.count("spin not used") == 1
    (held,) = StructuresInMemory(again)
    assert float(held.charge) == 1 and to_atoms(held).info["charge"] == 1


def test_arrays_of_fixed_atoms_are_reported_as_unused(capsys) -> None:
    for name in ("fixed", "selective_dynamics", "is_frozen", "ghost"):
        atoms = hydrogen()
        atoms.arrays[name] = np.array([1, 0])
        (record,) = StructuresInMemory(atoms)
        assert not record.fixed.any() and f"{name} not used" in capsys.readouterr().err


def test_bare_words_are_not_numbers(tmp_path) -> None:
    path = tmp_path / "words.xyz"
    path.write_text("2\nTotal energy -1.1 Hartree\nH 0 0 0\nH 0 0 0.7\n")
    assert np.isnan(open_dataset(path).y_relaxed).all()
    path.write_text("2\ncharge 0\nH 0 0 0\nH 0 0 0.7\n")
    with pytest.raises(ValueError, match="charge.*number.*without a value"):
        open_dataset(path)[0]
