import importlib
import sys

import numpy as np
import pytest
import torch
from ase.build import add_adsorbate, fcc111, molecule
from tiny_run import random_potential

from molflt.graph import Potential
from molflt.pretrained.calculator import Calculator


def test_an_error_without_torch_sim_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_sim", None)
    monkeypatch.delitem(sys.modules, "molflt.pretrained.torch_sim", raising=False)
    with pytest.raises(ImportError, match=r"pip install molflt\[torch-sim\]"):
        importlib.import_module("molflt.pretrained.torch_sim")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_outputs_are_valid(dtype):
    pytest.importorskip("torch_sim")
    from torch_sim.models.interface import validate_model_outputs

    from molflt.pretrained.torch_sim import TorchSimModel

    model = TorchSimModel(random_potential(), device="cpu", dtype=dtype)
    validate_model_outputs(model, torch.device("cpu"), getattr(torch, dtype))


def slabs() -> list:
    found = []
    for k in range(8):
        atoms = fcc111("Cu", (1, 1 + k % 2, 3), vacuum=5.0)
        add_adsorbate(atoms, "O", 1.2 + 0.05 * k, "fcc")
        found.append(atoms)
    return found


def test_relaxations_in_a_batch_are_independent():
    ts = pytest.importorskip("torch_sim")
    constraints = pytest.importorskip("torch_sim.constraints", reason="torch-sim below 0.5")
    from molflt.pretrained.torch_sim import TorchSimModel

    model = TorchSimModel(random_potential(), device="cpu")

    def relaxed(structures: list) -> list:
        state = ts.initialize_state(structures, model.device, model.dtype)
        tags = np.concatenate([atoms.get_tags() for atoms in structures])
        state.constraints = constraints.FixAtoms(atom_mask=torch.as_tensor(tags > 1))
        done = ts.generate_force_convergence_fn(1e-9, include_cell_forces=False)
        options = {"optimizer": ts.Optimizer.fire, "convergence_fn": done, "max_steps": 10}
        return ts.optimize(system=state, model=model, **options).to_atoms()

    structures, calculator = slabs(), Calculator(model.model, device="cpu")
    for before, after in zip(structures, relaxed(structures), strict=True):
        (alone,) = relaxed([before])
        assert np.abs(after.positions - alone.positions).max() < 1e-10
        moved = np.abs(after.positions - before.positions).max(axis=1)
        assert moved[before.get_tags() == 0].min() > 1e-4 and not moved[before.get_tags() > 1].any()
        assert after.pbc.tolist() == [True, True, False]
        assert calculator.get_potential_energy(after) < calculator.get_potential_energy(before)


def test_results_are_those_of_the_calculator():
    ts = pytest.importorskip("torch_sim")
    from molflt.pretrained.torch_sim import TorchSimModel

    model, atoms = TorchSimModel(random_potential(), device="cpu"), molecule("C6H6")
    state = ts.initialize_state([atoms, atoms], torch.device("cpu"), torch.float64)
    found, calculator = model(state), Calculator(model.model, device="cpu")
    energy, forces = calculator.get_potential_energy(atoms), calculator.get_forces(atoms)
    assert np.abs(found["energy"].numpy() - energy).max() < 1e-10
    assert np.abs(found["forces"].numpy() - np.tile(forces, (2, 1))).max() < 1e-10


def test_charges_and_elements_are_those_of_training(capsys):
    ts = pytest.importorskip("torch_sim", reason="torch-sim is not installed")
    pytest.importorskip("torch_sim.constraints", reason="torch-sim below 0.5")
    from molflt.pretrained.torch_sim import TorchSimModel

    options = {"long_range": [1], "total_charge": True, "far_field": False}
    potential = Potential(16, 2, layers=1, num_features=8, **options)
    torch.nn.init.normal_(potential.charge_vector)
    potential.trained_elements[1] = True
    model, atoms = TorchSimModel(potential, device="cpu"), molecule("CH3OH")
    atoms.info["charge"] = 1.0
    state = ts.initialize_state([atoms], torch.device("cpu"), torch.float64)
    given = {name: getattr(state, name) for name in ("positions", "cell", "pbc", "atomic_numbers")}
    with pytest.raises(ValueError, match=r"charge of each system.* system_extras_map"):
        model(given)
    found = model(given | {"charge": torch.ones(1)})["energy"]
    assert "C, O did not occur in training" in capsys.readouterr().err
    expected = Calculator(model.model, device="cpu").get_potential_energy(atoms)
    assert float(found) == pytest.approx(expected, abs=1e-10)
