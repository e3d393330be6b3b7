import copy
import re
import shutil
from functools import cache

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.optimize import BFGS
from data.oc20_files import old_record, write_lmdb
from tiny_run import printed, write_frames

from molflt.commands.cli import main
from molflt.data.structures import Reading, open_dataset
from molflt.data.structures.labels import (
    energy_unit_fault,
    force_unit_fault,
    stress_unit_fault,
    unit_fault,
)
from molflt.data.structures.potential_data import PotentialData, SinglePoints
from molflt.data.structures.records import make_record
from molflt.data.structures.sources import DataSet
from molflt.graph import Potential
from molflt.tasks.potential import PotentialTask


def kept(make):
    """Computes labels once, and returns copies of the structures."""
    once = cache(make)
    return lambda *arguments, **options: copy.deepcopy(once(*arguments, **options))


@kept
def copper(count=12, seed=0):
    """Returns rattled crystals of 4 atoms with EMT labels."""
    draw = np.random.default_rng(seed)
    frames = [bulk("Cu", cubic=True) for _ in range(count)]
    for atoms in frames:
        atoms.positions += draw.normal(scale=0.05, size=(4, 3))
    return [labeled(atoms) for atoms in frames]


def bare(atoms: Atoms, **labels) -> Atoms:
    """Returns the structure with labels in arrays and info instead of a calculator."""
    out = atoms.copy()
    for name, value in labels.items():
        store = out.arrays if np.shape(value) == (len(atoms), 3) else out.info
        store[name] = value
    return out


def test_other_names(tmp_path):
    atoms = copper(1)[0]
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    stress = atoms.get_stress(voigt=False)
    mace = bare(atoms, REF_energy=energy, REF_forces=forces, REF_stress=stress)
    own = bare(atoms, energy=energy, dft=forces, virials=-atoms.get_volume() * stress)
    for count, frame in enumerate((mace, own)):
        ase.io.write(tmp_path / f"{count}.extxyz", frame)
    record = open_dataset(tmp_path / "0.extxyz")[0]
    assert float(record.energy) == pytest.approx(energy, abs=1e-6)
    np.testing.assert_allclose(record.forces, forces, atol=1e-6)
    np.testing.assert_allclose(record.stress[0], stress, atol=1e-6)
    assert bool(open_dataset(tmp_path / "1.extxyz")[0].forces.isnan().all())
    alone = bare(Atoms("Cu"), energy=0.0, dft=np.zeros((1, 3)), virials=np.zeros((3, 3)))
    ase.io.write(tmp_path / "train.extxyz", [own, alone])
    named = PotentialData(tmp_path, "dft", "virials", val_split="train")
    named.setup()
    assert "forces in all, stress in 1" in named.describe()[0]
    with pytest.raises(ValueError, match=r"data\.baseline_key=dft is for is2re.* remove"):
        PotentialData(tmp_path, val_split="train", baseline_key="dft").setup()
    words = [str(tmp_path / "train.extxyz"), "--forces_key=dft", "--stress_key=virials"]
    assert main(["data", "convert", words[0], str(tmp_path / "a.safetensors"), *words[1:]]) == 0
    record = open_dataset(tmp_path / "a.safetensors")[0]
    np.testing.assert_allclose(record.forces, forces, atol=1e-6)
    np.testing.assert_allclose(record.stress[0], stress, atol=1e-6)


def test_stress_of_another_method_is_told(tmp_path, capsys):
    frames = copper(2)
    for atoms in frames:
        atoms.info["dft_energy"], atoms.arrays["dft_forces"] = -1.0, np.ones((4, 3))
    file = write_frames(tmp_path / "a.extxyz", frames)
    told = "stress belongs to energy and forces, which are not used"
    for keys, expected in (({}, False), ({"forces_key": "dft_forces"}, True)):
        open_dataset(file, reading=Reading("dft_energy", "any", **keys))
        assert (told in capsys.readouterr().err) == expected


@pytest.mark.parametrize("names", [("y", "force"), ("energy", "forces")])  # ocp, fairchem 1
def test_s2ef_files(tmp_path, names):
    forces = torch.arange(21.0).reshape(7, 3) / 10
    y = dict.fromkeys(("y_relaxed", "y_init", "pos_relaxed"))
    y |= dict(zip(names, (-3.5, forces), strict=True))
    path = write_lmdb(tmp_path / "train.lmdb", {str(i): old_record(i, **y) for i in range(2)})
    record = open_dataset(path)[0]
    assert float(record.energy) == -3.5 and torch.equal(record.forces, forces)
    data = PotentialData(tmp_path, val_split="train", check_units=False)
    data.setup()
    assert data.force_scale() == pytest.approx(float(forces.square().mean().sqrt()))
    # some IS2RE files contain forces without the energy of the same structure
    alone = write_lmdb(tmp_path / "b.lmdb", {"0": old_record(0, force=forces)})
    assert bool(open_dataset(alone)[0].forces.isnan().all())


def test_relaxed_energies_are_not_those_of_the_positions(tmp_path):
    atoms = copper(1)[0]
    atoms.arrays["pos_relaxed"] = atoms.positions + 0.1
    ase.io.write(tmp_path / "train.extxyz", atoms)
    record = open_dataset(tmp_path / "train.extxyz")[0]
    assert bool(record.energy.isnan()) and bool(record.y_relaxed.isfinite())
    with pytest.raises(ValueError, match=r"1 structures.* without an energy"):
        PotentialData(tmp_path, val_split="train").setup()


def test_missing_labels_are_counted_and_left_out(tmp_path):
    frames = copper(6)
    del frames[1].calc.results["forces"]
    frames[4].calc = None
    ase.io.write(tmp_path / "train.traj", frames)
    data = PotentialData(tmp_path, val_split="train")
    data.setup()
    points = data.datasets["train"]
    assert isinstance(points, SinglePoints) and len(points) == 5
    assert "train 5 systems (20 atoms), forces in 4, stress in all" in data.describe()[0]
    assert "1 without energy skipped" in data.describe()[0]
    known = np.concatenate([frames[i].get_forces() for i in (0, 2, 3, 5)])
    assert data.force_scale() == pytest.approx(np.sqrt((known**2).mean()), rel=1e-6)
    assert [int(points[i].sid) for i in range(5)] == [0, 1, 2, 3, 5]


def test_charges_are_refused_before_training(tmp_path):
    frames = copper(6)
    frames[4].info["charge"] = 1
    ase.io.write(tmp_path / "train.extxyz", frames[:3])
    ase.io.write(tmp_path / "val_id.extxyz", frames[3:])
    charged = Potential(16, 2, layers=1, long_range=[1], total_charge=True, far_field=False)
    PotentialTask(charged).prepare(PotentialData(tmp_path))
    with pytest.raises(ValueError, match=r"val_id.*1 of 3 .* charge.*sid 1; .*total_charge"):
        PotentialTask(Potential(16, 2, layers=1)).prepare(PotentialData(tmp_path))


@pytest.mark.parametrize(
    ("label", "factor", "said"),
    [
        ("forces", 1.0, ""),
        ("forces", 23.0605, r"0\.04"),  # kcal/mol/Å
        ("forces", 1 / 51.422, r"5\d\.\d"),  # Hartree/bohr
        ("forces", -1.0, "-(1|0.9)"),  # gradients
        ("energy", 1 / 4, r"0\.2[345]"),  # per atom
    ],
)
def test_units_of_forces_are_seen_in_energies(tmp_path, label, factor, said):
    frames = copper(30)
    for atoms in frames:
        atoms.calc.results[label] *= factor
    ase.io.write(tmp_path / "train.traj", frames)
    PotentialData(tmp_path, val_split="train", check_units=False).setup()
    data = PotentialData(tmp_path, val_split="train")
    if not said:
        data.setup()
        return
    with pytest.raises(ValueError, match=rf"forces in .* change by {said}.* --data\.check_units"):
        data.setup()


def test_an_absurd_force_is_refused_or_left_out(tmp_path, capsys):
    """One force beyond the limit is an outlier; wrong units, tested above, affect all forces."""
    frames = copper(30)
    frames[7].calc.results["forces"][2, 0] = 1e5
    path, store = tmp_path / "train.traj", tmp_path / "out" / "train.safetensors"
    ase.io.write(path, frames)
    said = "sid 7: the force on atom 2 is 1e+05 eV/Å; expected at most 1000 eV/Å"
    with pytest.raises(ValueError, match=re.escape(f"{path}: {said}") + r".* \(1 of 30 struct"):
        PotentialData(tmp_path, val_split="train").setup()
    data = PotentialData(tmp_path, val_split="train", skip_bad=True)
    with pytest.warns(UserWarning, match="1 bad structure.*sid 7: the force on atom 2"):
        data.setup()
    assert len(data.datasets["train"]) == 29 and data.force_scale() < 10
    assert "train 29 systems (116 atoms, 1 bad skipped), forces in all" in data.describe()[0]

    words = ["data", "convert", str(path), str(store)]
    assert f"{path}: {said}" in printed(capsys, *words, status=2).err and not store.exists()
    assert main([*words, "--skip-bad"]) == 0 and len(open_dataset(store)) == 29


UNITS = {  # factor relative to ASE's stress; None for a virial
    "kbar": -1602.1766,
    "GPa": 160.21766,
    "sign": -1.0,
    "virial": None,
    "bohr": 1 / 183.6315,
}


@kept
def strained(count=12, deform=0.02, rattle=0.03):
    """Returns crystals of 4 atoms in different cells, with EMT labels."""
    draw, frames = np.random.default_rng(0), []
    for seed in range(count):
        atoms = bulk("Cu", cubic=True)
        matrix = np.eye(3) + draw.normal(scale=deform, size=(3, 3))
        atoms.set_cell(atoms.cell.array @ matrix, scale_atoms=True)
        atoms.rattle(rattle, seed=seed)
        frames.append(atoms)
    return [labeled(atoms) for atoms in frames]


def labeled(atoms):
    atoms.calc = EMT()
    labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    atoms.calc = SinglePointCalculator(atoms, **labels, stress=atoms.get_stress())
    return atoms


@pytest.mark.parametrize(
    ("frames", "unit"),
    [(strained, unit) for unit in (None, *UNITS)] + [(copper, u) for u in (None, "kbar", "GPa")],
)
def test_unit_and_sign_of_stress_are_seen_in_energies(tmp_path, capsys, frames, unit):
    own, factor = frames(), UNITS.get(unit, 1.0)
    for atoms in own:
        atoms.calc.results["stress"] *= -atoms.get_volume() if factor is None else factor
    ase.io.write(tmp_path / "train.traj", own)
    found = stress_unit_fault(list(open_dataset(tmp_path / "train.traj")))
    if unit is None:
        assert not found
        return
    if frames is copper:  # in one cell, the sign is unknown
        assert "stress is in the wrong unit: in one cell" in found
    else:
        change = float(found.split("change by ")[1].split(" times")[0])
        assert change == pytest.approx(1 / (factor or -own[0].get_volume()), rel=0.2)
    data = PotentialData(tmp_path, val_split="train")
    with pytest.raises(ValueError, match=r"stress.*--data\.check_units"):
        data.setup()
    if unit == "sign" and frames is strained:
        told = printed(capsys, "data", "inspect", tmp_path / "train.traj").out
        assert "wrong units: stress" in told
        words = ["data", "convert", tmp_path / "train.traj", tmp_path / "a.safetensors"]
        assert "stress in the wrong unit" in printed(capsys, *words).err


def test_energies_beyond_those_of_all_electrons_are_named():
    for energy, said in ((-4209.5, False), (-97080.0, True)):
        ethanol = make_record(pos=np.eye(9, 3), atomic_numbers=[6, 6, 8, *6 * [1]], energy=energy)
        assert ("times the all-electron energies" in energy_unit_fault([ethanol])) == said
    ethanol.energy *= np.nan  # of relaxed positions
    assert energy_unit_fault([ethanol]) == ""


def test_forces_of_frames_in_other_cells_are_not_judged_by_their_strain(tmp_path) -> None:
    """Strain also does work, so correct forces of small crystals are accepted."""
    ase.io.write(tmp_path / "train.traj", strained(60, deform=0.05, rattle=0.02))
    assert force_unit_fault(open_dataset(tmp_path / "train.traj")) == ""
    atoms, steps = bulk("Cu", cubic=True).repeat(2), []
    atoms.rattle(0.25, seed=0)
    atoms.calc = EMT()
    for _ in BFGS(atoms, logfile=None).irun(fmax=0.02, steps=12):
        steps.append(labeled(atoms.copy()))
    ase.io.write(tmp_path / "steps.traj", steps)
    assert not unit_fault(list(open_dataset(tmp_path / "steps.traj")))


def test_names_and_hints_of_records_that_are_read_later_are_known(tmp_path) -> None:
    """Parts and joined files also report labels of LMDB records, which are read on demand."""
    y = {"y_init": None, "pos_relaxed": None, "y_relaxed": None, "y": -3.5, "energy": -9.0}
    y["force"] = torch.zeros(7, 3)
    write_lmdb(tmp_path / "a.lmdb", {str(i): old_record(i, **y) for i in range(4)})
    (part,) = DataSet(tmp_path / "a.lmdb").open(["train"]).values()
    shutil.copy(tmp_path / "a.lmdb", tmp_path / "b.lmdb")
    joined = open_dataset([tmp_path / "a.lmdb", tmp_path / "b.lmdb"])
    for dataset in (part, joined):
        assert np.isnan(dataset.y_relaxed).any()
        assert "--recipe potential" in dataset.hint and dataset.unused == ["energy"]
