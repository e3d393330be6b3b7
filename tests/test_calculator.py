"""The ASE calculator: stress, charges, unused fields, refused input and errors in dynamics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, fcc111, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_stress
from ase.md.verlet import VelocityVerlet

from molflt import Calculator
from molflt.graph import Potential


def calculator(model: dict[str, Any] | None = None, **options: Any) -> Calculator:
    torch.manual_seed(0)
    sizes = {"layers": 1, "ffn_dim": 16, "num_features": 16, "messages": 1, "radial_basis": 0}
    made = Potential(16, 2, **sizes, **(model or {}))
    made.trained_elements[:] = True
    return Calculator(made, **options)


def boxed(pbc: bool | list[bool]) -> Atoms:
    atoms = molecule("CH3OH", vacuum=8.0)
    atoms.pbc = pbc
    return atoms


@pytest.mark.parametrize("pbc", [False, [True, True, False]])
def test_stress_needs_three_periodic_axes(pbc):
    atoms = boxed(pbc)
    atoms.calc = calculator()
    with pytest.raises(PropertyNotImplementedError, match="slab_stress"):
        atoms.get_stress()
    atoms.get_potential_energy()
    assert "stress" not in atoms.calc.results
    atoms.pbc = True
    assert np.isfinite(atoms.get_stress()).all()


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


@pytest.mark.parametrize("number", [0, 119])
def test_unknown_elements_are_refused(number):
    atoms = Atoms(numbers=[1, number], positions=[[0, 0, 0], [0, 0, 1]])
    atoms.calc = calculator()
    with pytest.raises(ValueError, match=f"1 to 118.*{number}"):
        atoms.get_potential_energy()


def test_unused_fields_are_named_once(capsys):
    atoms, calc = boxed(False), calculator()
    atoms.calc = calc
    atoms.info |= {"charge": 0, "spin": 1}
    atoms.set_initial_magnetic_moments(np.zeros(len(atoms)))
    atoms.get_potential_energy()
    assert capsys.readouterr().err == ""  # neutral fields
    atoms.info["oxidation_state"] = -1
    atoms.set_initial_magnetic_moments([0, 0, 0, 0, 0, 2])
    for shift in (0.0, 0.1):
        atoms.positions[0, 0] += shift
        atoms.get_potential_energy()
    err = capsys.readouterr().err
    assert err.count("oxidation_state") == 1 and "-1" in err and "initial_magmoms" in err
    atoms.info["spin"] = 3  # the last results are still valid
    atoms.get_potential_energy()
    assert "spin" in capsys.readouterr().err
    atoms.info["electric_field"] = [0, 0, 0.1]
    atoms.rattle(0.01)
    atoms.get_potential_energy()
    assert "electric_field" in capsys.readouterr().err


def test_total_charge():
    """A charge of the structure is an input, or refused."""
    atoms, options = molecule("H2O"), {"long_range": [1], "total_charge": True}
    atoms.calc = calculator(options)
    neutral = atoms.get_potential_energy()
    atoms.info["charge"] = 1  # atoms have not moved
    assert abs(atoms.get_potential_energy() - neutral) > 1e-3
    assert atoms.get_charges().sum() == pytest.approx(1.0)
    center = atoms.positions - atoms.positions.mean(axis=0)
    np.testing.assert_allclose(atoms.get_dipole_moment(), atoms.get_charges() @ center)
    atoms.pbc, atoms.cell = True, [9.0] * 3
    with pytest.raises(PropertyNotImplementedError, match="dipole"):
        atoms.get_dipole_moment()
    atoms.calc = calculator()
    with pytest.raises(ValueError, match=r"charge.* 1 "):
        atoms.get_potential_energy()
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_charges()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), RuntimeError("other")])
def test_dynamics_stop_if_the_model_fails(error, monkeypatch):
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=0)
    atoms.calc = calculator()
    dynamics, steps = VelocityVerlet(atoms, 1 * units.fs), []
    dynamics.attach(lambda: steps.append(dynamics.nsteps))
    dynamics.run(2)
    monkeypatch.setattr(atoms.calc.model, "forward", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises((RuntimeError, ValueError), match="memory|other"):
        dynamics.run(5)
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("pbc", [True, False])
def test_energies_do_not_depend_on_the_origin(dtype, pbc):
    calc, energies = calculator(dtype=dtype), []
    for move in ((0, 0, 0), (1e4, 0, 0), (9e4, -9e4, 12345.678)):
        atoms = boxed(pbc)
        atoms.positions += move
        atoms.calc = calc
        energies.append(atoms.get_potential_energy())
        assert np.allclose(atoms.positions[0], boxed(pbc).positions[0] + move)
    assert np.ptp(energies) < 1e-6


def test_the_default_device_does_not_matter():
    atoms, calc = bulk("Cu", cubic=True), calculator()
    atoms.calc = calc
    expected = atoms.get_potential_energy()
    calc.reset()
    with torch.device("meta"):
        assert atoms.get_potential_energy() == expected
