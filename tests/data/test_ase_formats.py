"""Formats of ASE: known by name or beginning, read with all frames and labels, never with code."""

from __future__ import annotations

import gzip
from pathlib import Path

import ase
import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.io.formats import ioformats

from molflt.data.structures import Reading, open_dataset
from molflt.data.structures.ase_formats import ENDINGS

EXAMPLES = Path(ase.__file__).parent / "test" / "testdata"


def example(name: str) -> Path:
    if not (EXAMPLES / name).is_file():
        pytest.skip(f"ASE's example {name} is not at {EXAMPLES}")
    return EXAMPLES / name


@pytest.mark.parametrize("name", ["OUTCAR", "OUTCAR.3", "Cu_outcar", "run.out", "log", "OUTCAR.gz"])
def test_outcar(tmp_path, name):
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


@pytest.mark.parametrize("name", ["vasprun.xml", "vasp_2.xml", "md.xml", "vasprun.xml.relaxed"])
def test_vasprun(tmp_path, name, capsys):
    content = example("vasp/vasprun_pstress.xml").read_text()
    (tmp_path / name).write_text(content)
    record = open_dataset(tmp_path / name)[0]
    expected = ase.io.read(example("vasp/vasprun_pstress.xml"), format="vasp-xml")
    assert float(record.energy) == expected.get_potential_energy()
    np.testing.assert_allclose(record.stress[0], expected.get_stress(voigt=False), atol=1e-6)
    assert "cut" not in capsys.readouterr().err
    (tmp_path / name).write_text(content[: content.rindex("</modeling>")])
    open_dataset(tmp_path / name)
    assert "the file is cut" in capsys.readouterr().err


def test_all_frames_of_an_xdatcar(tmp_path):
    frames = [bulk("Cu", cubic=True) for _ in range(4)]
    for number, atoms in enumerate(frames):
        atoms.positions[0, 0] += 0.1 * number
    ase.io.write(tmp_path / "XDATCAR_300K", frames, format="vasp-xdatcar")
    dataset = open_dataset(tmp_path / "XDATCAR_300K")
    assert [record.sid for record in dataset] == [0, 1, 2, 3]
    assert dataset[3].pos[0, 0] == pytest.approx(0.3, abs=1e-5)


CRYSTAL, MOLECULE = bulk("NaCl", "rocksalt", a=5.64, cubic=True), molecule("CH3OH")
WRITTEN = {
    "POSCAR_01": ("vasp", CRYSTAL),
    "CONTCAR.relaxed": ("vasp", CRYSTAL),
    "NaCl.CONTCAR": ("vasp", CRYSTAL),
    "geometry.in": ("aims", CRYSTAL),
    "geometry.in.next_step": ("aims", CRYSTAL),
    "a.pwi": ("espresso-in", CRYSTAL),
    "scf.in": ("espresso-in", CRYSTAL),
    "a.cube": ("cube", CRYSTAL),
    "a.res": ("res", CRYSTAL),
    "a.gen": ("gen", CRYSTAL),
    "a.XSF": ("xsf", CRYSTAL),
    "a.xsd": ("xsd", CRYSTAL),
    "a.con": ("eon", CRYSTAL),
    "a.cif.xz": ("cif", CRYSTAL),
    "a.com": ("gaussian-in", MOLECULE),
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
    if atoms.pbc.all():
        assert record.cell[0].det() == pytest.approx(atoms.cell.volume, rel=1e-3)
    found = Atoms(record.atomic_numbers, record.pos, cell=record.cell[0], pbc=record.pbc[0])
    distances = [np.sort(one.get_all_distances(mic=True), axis=None) for one in (found, atoms)]
    np.testing.assert_allclose(*distances, atol=1e-3)


def test_known_formats_are_those_that_ase_reads():
    for kind in set(ENDINGS.values()) - {"aselmdb"}:
        assert kind in ioformats and "pickle" not in ioformats[kind].module_name
