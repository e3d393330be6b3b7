import json
import shutil
from typing import Any
from unittest.mock import DEFAULT, Mock

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.emt import EMT
from ase.calculators.fd import calculate_numerical_stress
from ase.calculators.lj import LennardJones
from ase.constraints import FixAtoms, FixBondLength, FixBondLengths, FixCartesian, FixScaled
from ase.units import GPa
from tiny_run import (
    argon,
    error_of,
    logged,
    page_of,
    printed,
    random_potential,
    results_of,
    table,
    train_potential,
)
from torch_geometric.data import Batch

import molflt
from molflt import Calculator
from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.ase_fields import Converter
from molflt.data.structures.base import ANY_TAGS
from molflt.data.structures.geometry import adsorbates
from molflt.data.structures.potential_data import SinglePoints
from molflt.evaluation.potentials import infer_points
from molflt.evaluation.relaxation import adwt, position_error, relax_atoms
from molflt.graph import Potential
from molflt.tasks.potential import PotentialTask


def test_training_and_evaluation(potential_run, tmp_path):
    """Forces are compared with the calculator, one structure at a time."""
    run = shutil.copytree(potential_run, tmp_path / "run")
    errors = logged(run, "val_force_mae_meV_per_A")
    assert errors[-1] < errors[0]
    found = results_of(run, "--device=cpu")["val_id"]
    assert found["n"] == 8 and found["stress_mae_meV_per_A3"] > 0
    assert found["force_mae_meV_per_A"] == pytest.approx(min(errors), rel=1e-4)
    assert found["force_mae_meV_per_A"] < found["baseline_force_mae_meV_per_A"]
    rows = table(run / "predictions.csv")
    assert len(rows) == 8 and rows[1]["force_mae_eV_per_A"] == ""  # without forces
    assert json.loads((run / "references.json").read_text()).keys() == {"Ar"}
    errors, calculator = [], molflt.Calculator(run, device="cpu")
    for atoms in ase.io.read(potential_run.parent / "val_id.traj", ":"):
        if "forces" in atoms.calc.results:
            errors.append(1e3 * np.abs(calculator.get_forces(atoms) - atoms.get_forces()).mean())
    rows = table(run / "errors_by_group.csv")
    assert [(row["kind"], row["group"], row["n"]) for row in rows] == [
        ("element", "Ar", str(4 * len(errors))),
        ("natoms", "4", str(len(errors))),
    ]
    for row in rows:  # all have 4 atoms
        assert float(row["mae_meV_per_A"]) == pytest.approx(np.mean(errors), rel=1e-4)
    assert page_of(run).count("<img") == 3  # curve, parity, forces


@pytest.mark.usefixtures("undrawn")
def test_initial_weights_keep_their_forces(potential_run, tmp_path):
    """Forces do not depend on the weights of the loss or the size of the new forces."""
    for seed, split in enumerate(("train", "val_id"), start=5):
        frames = argon(6, seed)
        for atoms in frames:
            if "forces" in atoms.calc.results:
                atoms.calc.results["forces"] *= 0.3
        ase.io.write(tmp_path / f"{split}.traj", frames)
    words = ["--recipe=potential", f"--init={potential_run}", f"--data.root={tmp_path}"]
    words += ["--data.check_units=false", "--trainer.max_steps=1", "--task.lr=1e-30"]
    words += ["--trainer.accelerator=cpu", "--task.energy_weight=9", "--task.force_weight=0.1"]
    assert main(["train", *words, f"--run={tmp_path / 'run'}"]) == 0
    words = (f"--data={tmp_path}", "--device=cpu")
    found = results_of(potential_run, *words, out=tmp_path)["val_id"]
    (error,) = logged(tmp_path / "run", "val_force_mae_meV_per_A")
    assert error == pytest.approx(found["force_mae_meV_per_A"], rel=1e-5)


def test_initial_weights_from_energies_keep_their_unit():
    """Without forces in training, this unit is 1 eV/Å."""
    data = Mock(datasets={}, force_scale=Mock(return_value=3.0))
    for model, unit in ((random_potential(), 1.0), (Potential(16, 2, layers=1), 3.0)):
        PotentialTask(model, references="none").prepare(data)
        assert float(model.energy_std) == unit


@pytest.mark.usefixtures("undrawn")
def test_energies_worse_than_references_give_a_warning(potential_run, tmp_path, capsys):
    """One large step leads to such energies."""
    words = ("--trainer.max_steps=1", "--task.lr=0.5", "--model.radial_basis=8")
    train_potential(potential_run.parent, tmp_path / "run", *words)
    for run, worse in ((tmp_path / "run", True), (potential_run, False)):
        said = printed(capsys, "evaluate", run, "--device=cpu", "--out", tmp_path / "out")
        assert ("task.energy_weight" in said.err) is worse and "missing splits" not in said.out


def test_targets_are_the_energies_of_the_loss(tmp_path):
    """A file may contain other energies, which are not labels of a potential."""
    frames = argon(3, 0)
    for number, atoms in enumerate(frames):
        atoms.calc, atoms.info = None, {"REF_energy": -5.0 - number, "y_relaxed": 1.0}
    ase.io.write(tmp_path / "a.extxyz", frames)
    points = SinglePoints(open_dataset(tmp_path / "a.extxyz", reading=ANY_TAGS))
    energies = infer_points(random_potential().eval(), points, 2, "frames", None).energies
    assert energies.target.tolist() == [-5, -6, -7]


@pytest.mark.usefixtures("undrawn")
def test_evaluation_names_structures_outside_of_training(potential_run, tmp_path, capsys):
    (atoms,) = argon(1, 3)
    atoms.numbers[0] = 36
    del atoms.calc.results["forces"]
    ase.io.write(tmp_path / "in.extxyz", [atoms])
    words = ("evaluate", potential_run, "--data", tmp_path / "in.extxyz", "--out", tmp_path)
    said = printed(capsys, *words, "--device=cpu")
    assert "1 of 1 structures are outside the training data" in said.err
    assert "Kr not in training (1 structure)" in said.err and "tags" not in said.err
    assert "nan" not in said.out


def test_calculator(potential_run, tmp_path):
    atoms = bulk("Ar", "fcc", 5.2)
    atoms.rattle(0.1)
    atoms.calc = molflt.Calculator(potential_run, device="cpu")
    loaded, out = molflt.load(potential_run), tmp_path / "my model"
    loaded.save_pretrained(out)
    assert "relax structures.extxyz --run 'my model' --out" in (out / "README.md").read_text()
    for source in (out, str(out / "model.safetensors"), loaded):
        same = molflt.Calculator(source, device="cpu")
        assert np.array_equal(same.get_forces(atoms), atoms.get_forces())
    energy = atoms.get_potential_energy()
    assert energy == atoms.get_potential_energy(force_consistent=True)
    model = atoms.calc.model
    same = molflt.Calculator(model, dtype="float32")
    assert same.model is not model and next(model.parameters()).dtype == torch.float64
    assert same.get_potential_energy(atoms) == pytest.approx(energy, abs=1e-3)
    alone = Atoms("Ar2", [[0, 0, 0], [3.8, 0, 0]])
    alone.calc = same
    assert alone.get_forces().shape == (2, 3)


def test_export_of_a_potential_with_machine_code_is_refused(potential_run, tmp_path, capsys):
    words = ("export", potential_run, tmp_path / "out", "--about=argon", "--compiled=true")
    assert "potentials" in (said := error_of(capsys, *words)) and "without --compiled" in said
    assert not (tmp_path / "out").exists()


def test_settings_of_torch_do_not_change_a_loaded_model(potential_run):
    def forces():
        atoms = bulk("Ar", "fcc", 5.2, cubic=True)
        atoms.rattle(0.1)
        atoms.calc = molflt.Calculator(potential_run, device="cpu")
        return atoms.get_forces()

    expected = forces()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [forces()]
    finally:
        torch.set_default_dtype(torch.float32)
    for mode in (torch.inference_mode(), torch.device("meta")):
        with mode:
            found.append(forces())
    assert all(np.array_equal(expected, one) for one in found)


def test_predictions_have_forces(potential_run, tmp_path):
    structures = [bulk("Ar", "fcc", 5.2, cubic=True), bulk("Ar", "fcc", 5.4)]
    structures.append(Atoms("Ar2", [[0, 0, 0], [0, 0, 3.8]]))
    for atoms in structures:
        atoms.rattle(0.1)
        atoms.set_tags(range(len(atoms), 0, -1))
    ase.io.write(tmp_path / "in.extxyz", structures)
    out = tmp_path / "out.extxyz"
    words = ["predict", str(potential_run), str(tmp_path / "in.extxyz"), "--device=cpu", "--out"]
    assert main([*words, str(out)]) == 0
    model = molflt.load(potential_run)
    found = model.predict(structures, embedding="pooled")
    each = model.predict(structures, embedding="atoms")
    for option, value in (("tags", "ase"), ("force", True)):
        with pytest.raises(ValueError, match=f"{option}.*no effect"):
            model.predict(structures, **{option: value})
    calculator = molflt.Calculator(potential_run, device="cpu")
    for written, one, two, atoms in zip(
        ase.io.read(out, ":"), found, each, structures, strict=True
    ):
        assert not any("tags" in why or "adsorbate" in why for why in one.outside)
        np.testing.assert_array_equal(written.get_tags(), atoms.get_tags())
        np.testing.assert_allclose(one.embedding, two.embedding.mean(axis=0), atol=1e-6)
        expected = calculator.get_forces(atoms)
        assert np.abs(written.get_forces() - expected).max() < 1e-4
        assert np.abs(one.forces - expected).max() < 1e-4
        assert ("stress" in written.calc.results) == bool(atoms.pbc.all())
        if atoms.pbc.all():
            np.testing.assert_allclose(
                written.get_stress(), calculator.get_stress(atoms), atol=1e-6
            )
        assert one.energy == pytest.approx(calculator.get_potential_energy(atoms), abs=1e-4)


@pytest.mark.usefixtures("undrawn")
def test_runs_of_relaxed_energies(copied_run, tmp_path, capsys):
    """Such runs predict relaxed structures, evaluated by OC20's metric, not forces."""
    run = copied_run
    with pytest.raises(ValueError, match="requires a potential; got EnergyRegressor"):
        molflt.Calculator(run)
    ase.io.write(tmp_path / "a.xyz", molecule("H2O"))
    said = error_of(capsys, "relax", str(tmp_path / "a.xyz"), "--run", str(run))
    assert "--recipe potential" in said
    words = ["--splits", "val_id", "--relaxed", str(tmp_path / "moved"), "--device", "cpu"]
    assert "ADwT / %" in printed(capsys, "evaluate", run, *words).out
    found = json.loads((run / "results.json").read_text())["val_id"]
    frames = ase.io.read(tmp_path / "moved" / "val_id.extxyz", ":")
    assert len(frames) == found["n"] == 13 and frames[0].info["sid"] == 1000
    assert 0 <= found["adwt_percent"] <= 100 and found["position_error_A"] > 0


def test_relaxations(potential_run, tmp_path, capsys):
    atoms = bulk("Ar", "fcc", 5.2, cubic=True)
    atoms.rattle(0.1, seed=3)
    atoms.set_constraint(FixAtoms([0]))
    atoms.set_tags([4, 3, 2, 1])
    pair = Atoms("Ar2", [[0, 0, 0], [3.5, 0, 0]], info={"file": "of the user"})
    ase.io.write(tmp_path / "a.traj", [atoms, pair])
    out, steps = tmp_path / "b.extxyz", tmp_path / "steps"
    words = ["relax", str(tmp_path / "a.traj"), "--run", str(potential_run), "--device", "cpu"]
    words += ["--out", str(out), "--trajectories", str(steps)]
    assert "2 of 2 relaxations converged" in printed(capsys, *words, "--fmax", "0.1").out
    frames = ase.io.read(out, ":")
    for frame in frames:
        assert frame.info["converged"] and np.abs(frame.get_forces()).max() < 0.1
    assert list(frames[0].get_tags()) == [4, 3, 2, 1]
    np.testing.assert_allclose(frames[0].positions[0], atoms.positions[0], atol=1e-5)
    row, other = table(out.with_suffix(".csv"))
    assert row.keys() == other.keys() and other["sid"] == "1"
    assert float(row["energy_eV"]) <= float(row["energy_before_eV"])
    assert len(list(steps.glob("*.traj"))) == 2
    said = printed(capsys, *words, "--fmax", "1e-9", "--steps", "2", status=3)
    assert "0 of 2 relaxations converged" in said.out
    assert "structure 1, sid 1, Ar2: not converged" in said.err


def constrained() -> list[Atoms]:
    frames = []
    for number, constraint in enumerate(
        [FixCartesian([0], mask=(True, True, False)), FixBondLength(0, 1), FixScaled([0])]
    ):
        atoms = bulk("Ar", "fcc", 5.2, cubic=True)
        atoms.rattle(0.1, seed=number)
        atoms.set_constraint(constraint)
        atoms.info |= {"name": f"number {number}", "energy": 5.0, "REF_energy": 5.0}
        atoms.info |= {"virial": 1.0, "REF_virials": 1.0}
        frames.append(atoms)
    return frames


def test_relaxations_respect_and_keep_constraints(potential_run, tmp_path, capsys):
    frames = constrained()
    ase.io.write(tmp_path / "a.traj", frames)
    words = ["relax", str(tmp_path / "a.traj"), "--run", str(potential_run), "--device", "cpu"]
    more = ("--fmax=1e-9", "--steps=3", "--out", tmp_path / "b.traj")
    assert "constraints" not in printed(capsys, *words, *more, status=3).err
    found = ase.io.read(tmp_path / "b.traj", ":")
    for one, atoms in zip(found, frames, strict=True):
        assert one.constraints[0].todict() == atoms.constraints[0].todict()
        assert one.info["name"] == atoms.info["name"]
        of_initial = {"energy", "REF_energy", "virial", "REF_virials"}
        assert not of_initial & one.info.keys()
        assert np.abs(one.positions - atoms.positions)[1:].max() > 1e-3
    line, _, fixed = (
        np.abs(b.positions[0] - a.positions[0]) for a, b in zip(frames, found, strict=True)
    )
    assert line[:2].max() < 1e-12 < line[2] and fixed.max() < 1e-12
    bonds = [atoms.get_distance(0, 1, mic=True) for atoms in (found[1], frames[1])]
    assert bonds[0] == pytest.approx(bonds[1], abs=1e-10)
    calculator = molflt.Calculator(potential_run, device="cpu")
    for row, atoms in zip(table(tmp_path / "b.csv"), frames, strict=True):
        expected = calculator.get_potential_energy(atoms)  # with positions in float64
        assert float(row["energy_before_eV"]) == pytest.approx(expected, abs=1e-12)
    main([*words, "--steps=1", "--out", str(tmp_path / "b.extxyz")])
    assert capsys.readouterr().err.count(".extxyz cannot store") == 2


def test_an_interruption_keeps_finished_relaxations(potential_run, tmp_path, monkeypatch, capsys):
    frames = constrained()
    ase.io.write(tmp_path / "a.traj", frames)
    out = tmp_path / "b.extxyz"
    out.write_text("older")

    def interrupted(atoms, *args, **options):
        if atoms.info["sid"] == 2:
            raise KeyboardInterrupt
        return relax_atoms(atoms, LennardJones(sigma=3.4, epsilon=0.01), steps=1)

    monkeypatch.setattr("molflt.commands.relax.relax_atoms", interrupted)
    words = ["relax", str(tmp_path / "a.traj"), "--run", str(potential_run), "--device", "cpu"]
    assert f"{out} contains 2 of 3" in printed(capsys, *words, "--out", out, status=130).err
    assert [one.info["name"] for one in ase.io.read(out, ":")] == ["number 0", "number 1"]
    rows = table(out.with_suffix(".csv"))
    assert [row["index"] for row in rows] == ["0", "1"]
    assert all(float(row["energy_eV"]) < 0 for row in rows)


def test_cells_are_relaxed(potential_run, tmp_path):
    atoms = bulk("Ar", "fcc", 5.0)
    ase.io.write(tmp_path / "a.traj", atoms)
    words = ["--run", str(potential_run), "--out", str(tmp_path / "b.traj"), "--device", "cpu"]
    assert main(["relax", str(tmp_path / "a.traj"), "--cell", "true", *words]) in (0, 3)
    assert ase.io.read(tmp_path / "b.traj").get_volume() != pytest.approx(atoms.get_volume())
    found = relax_atoms(atoms, LennardJones(sigma=3.4, epsilon=0.01), fmax=1e-9, steps=0, cell=True)
    stress = found.atoms.get_stress(voigt=False)  # the force on the one atom is 0
    virial = np.linalg.norm(atoms.get_volume() * stress, axis=1).max()
    assert found.largest_force < 1e-9 < virial
    assert f"virial {virial:.3g} eV" in found.why


def test_pressure_compresses_cells_and_is_not_in_the_energy(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("molflt.commands.relax.Calculator", lambda *_: EMT())
    ase.io.write(tmp_path / "a.traj", bulk("Cu"))
    words = ["relax", str(tmp_path / "a.traj"), "--run=x", f"--out={tmp_path / 'b.traj'}"]
    assert main([*words, "--cell", "--pressure=10", "--fmax=1e-4"]) == 0
    found = ase.io.read(tmp_path / "b.traj")
    np.testing.assert_allclose(found.get_stress()[:3] / GPa, -10, rtol=1e-3)
    assert found.get_potential_energy() == pytest.approx(EMT().get_potential_energy(found))
    assert found.get_volume() < bulk("Cu").get_volume()


def test_failing_relaxations_keep_the_last_structure():
    start, breaks = Atoms("Ar2", [[0, 0, 0], [0.9, 0, 0]]), LennardJones()
    later = [DEFAULT, DEFAULT, ValueError("Ar2: energy nan eV or a force is not finite")]
    breaks.calculate = Mock(wraps=breaks.calculate, side_effect=later)
    found = relax_atoms(start, breaks, fmax=1e-6)
    assert not found.converged and found.why.startswith("Ar2: energy nan")
    assert found.steps >= 1 and np.isfinite(found.after)
    assert np.isfinite(found.atoms.positions).all()
    rigid = Atoms("Ar4", [[0, 0, 0], [3.5, 0, 0], [0, 4, 0], [1, 1, 3]])
    rigid.set_constraint(FixBondLengths([(0, 1), (1, 2), (0, 2)], tolerance=0))
    found = relax_atoms(rigid, LennardJones(sigma=3.4), fmax=1e-6)
    assert not found.converged and "bond" in found.why
    assert relax_atoms(bulk("Ru"), EMT()).why == "No EMT-potential for Ru"


def test_average_distance_within_threshold():
    """Thresholds are 0.01 to 0.499 Å; a distance counts for all thresholds above it."""
    assert adwt(np.array([0.0])) == 100 and adwt(np.array([0.5])) == 0
    assert adwt(np.array([0.0, 0.6])) == pytest.approx(50)
    assert adwt(np.array([0.2545])) == pytest.approx(50)
    atoms = argon(1, 0)[0]
    atoms.set_constraint(FixAtoms([0]))
    atoms.set_array("pos_relaxed", atoms.positions + np.array([0.3, 0, 0.4]))
    record = Converter().record(atoms)
    wrapped = record.pos.numpy() + atoms.cell.array[0]
    assert position_error(record.pos.numpy(), record) == pytest.approx(0.5, abs=1e-5)
    assert position_error(wrapped, record) == pytest.approx(0.5, abs=1e-5)


def test_a_lattice_vector_along_an_open_axis_has_no_effect():
    """The third vector may depend on the others."""
    slab = fcc111("Cu", (2, 2, 2), vacuum=5) + molecule("CO", positions=[[0, 0, 11], [0, 0, 12]])
    slab.set_tags([1] * 8 + [2, 2])
    slab.cell[2], slab.pbc = slab.cell[1], (True, True, False)
    slab.set_array("pos_relaxed", slab.positions + np.array([0, 0.3, 0.4]))
    record = Converter().record(slab)
    assert adsorbates(record).tolist() == [-1] * 8 + [0, 0]
    assert position_error(record.pos.numpy(), record) == pytest.approx(0.5, abs=1e-5)


def test_the_loss_ignores_missing_labels():
    task = PotentialTask(Potential(16, 2, layers=1, ffn_dim=16, radial_basis=8).train())
    records = [Converter().record(atoms, i) for i, atoms in enumerate(argon(4, 0))]
    total, sums = task.loss(Batch.from_data_list(records), 0.0)
    assert float(sums.structures) == 4 and float(sums.components) == 3 * 12
    assert float(sums.stresses) == 2 * 9
    total.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in task.model.parameters())
    one, _ = task.loss(Batch.from_data_list(records[1:2]), 0.0)  # no forces, no stress
    assert bool(one.isfinite())


# --- the calculator -------------------------------------------------------------------------------


def calculator(model: dict[str, Any] | None = None, **options: Any) -> Calculator:
    sizes = {"num_features": 16, "messages": 1, "radial_basis": 0}
    return Calculator(random_potential(**sizes, **(model or {})), **options)


def test_stress_of_a_slab_with_slab_stress():
    atoms = fcc111("Cu", (1, 1, 2), vacuum=6.0)
    atoms.rattle(0.1, seed=1)
    atoms.calc = calculator(slab_stress=True)
    assert not atoms.pbc.all()
    by_differences = calculate_numerical_stress(atoms, 1e-5)
    np.testing.assert_allclose(atoms.get_stress(), by_differences, atol=1e-7)
    alone = Atoms("H")
    alone.calc = atoms.calc
    with pytest.raises(PropertyNotImplementedError):  # no volume
        alone.get_stress()


def test_results_on_another_device(capsys):
    """Structures stay on the CPU, where atoms that coincide are found."""
    found, alone = calculator(), Atoms("H2", [[0, 0, 0], [0, 0, 0.05]])
    out = found.model(Batch.from_data_list([Converter().record(alone)]))
    on_device = Mock(energy_std=torch.zeros((), device="meta"), return_value=out)
    found.model, found._warned_elements = on_device, {1}
    assert found.get_potential_energy(alone) == float(out["energy"])
    assert on_device.call_args[0][0].pos.is_meta and "closer than 0.1" in capsys.readouterr().err


def test_total_charge():
    """A charge of the structure is an input."""
    atoms, options = molecule("H2O"), {"long_range": [1], "total_charge": True}
    atoms.calc = calculator(options)
    neutral = atoms.get_potential_energy()
    atoms.info["charge"] = 1  # atoms have not moved
    assert abs(atoms.get_potential_energy() - neutral) > 1e-3
    assert atoms.get_charges().sum() == pytest.approx(1.0)
    center = atoms.positions - atoms.positions.mean(axis=0)
    dipole = atoms.get_charges() @ center
    np.testing.assert_allclose(atoms.get_dipole_moment(), dipole, atol=1e-12)
    exported = atoms.calc.export_properties()  # parts of the energy are unknown to ASE
    np.testing.assert_array_equal(exported["charges"], atoms.get_charges())
    atoms.pbc, atoms.cell = True, [9.0] * 3
    with pytest.raises(PropertyNotImplementedError, match="dipole"):
        atoms.get_dipole_moment()
    atoms.calc = calculator()
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_charges()


@pytest.mark.parametrize("pbc", [True, False])
def test_energies_in_float32_do_not_depend_on_the_origin(pbc):
    atoms, energies = molecule("CH3OH", vacuum=8.0), []
    atoms.pbc, atoms.calc = pbc, calculator(dtype="float32")
    for move in ((0, 0, 0), (1e4, 0, 0), (9e4, -9e4, 12345.678)):
        atoms.positions += move
        energies.append(atoms.get_potential_energy())
    assert np.ptp(energies) < 1e-6
