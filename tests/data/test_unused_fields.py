"""The total charge is read; spin, moments and fields are named where no model reads them."""

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from molflt.data.structures.ase_fields import total_charge, unused_fields
from molflt.data.structures.force_units import unit_fault
from molflt.data.structures.records import make_record


@pytest.mark.parametrize(
    "name",
    [
        "charges", "partial_charge", "Spin_Multiplicity", "TOTAL_MAGMOM", "External_Field",
        "magnetic-moment", "REF_charges", "unpaired_electrons", "moments", "field",
    ],
)  # fmt: skip
def test_info_is_named_with_its_value(name: str) -> None:
    assert unused_fields(Atoms("H", info={name: -2.5})) == {name: "-2.5"}
    assert unused_fields(Atoms("H", info={"data": {name: [0, 3]}})) == {name: "0 to 3"}
    assert unused_fields(Atoms("H", info={name: 0})) == {}


def test_arrays_and_results_are_named() -> None:
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 1]], magmoms=[1, -1], charges=[0.5, 0])
    assert unused_fields(atoms) == {"initial_magmoms": "-1 to 1", "initial_charges": "0 to 0.5"}
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 1]], magmoms=[[0, 0, 1], [0, 0, 0]])
    assert unused_fields(atoms) == {"initial_magmoms": "0 to 1"}
    atoms = Atoms("H2")
    atoms.calc = SinglePointCalculator(atoms, energy=1.0, magmom=2.0, magmoms=[1.0, 1.0])
    assert unused_fields(atoms) == {"magmom": "2", "magmoms": "1 to 1"}


@pytest.mark.parametrize(
    "info",
    [
        {"charge": 0, "spin": 1, "multiplicity": 1},
        {"charge": "0", "spin": np.array(0.0), "magmoms": [0, 0], "electric_field": [0.0, 0, 0]},
        {"charge": None, "magmom": float("nan"), "electric_field": np.zeros(3)},
        {"nuclear_charges": [1, 1], "force_field": 3, "discharge": 1, "energy": -1.0, "spindle": 2},
        {"born_effective_charges": [1.0, -1.0], "dipole_moment": 2.0},
    ],
)
def test_neutral_values_give_no_warning(info: dict[str, object]) -> None:
    assert unused_fields(Atoms("H2", info=info)) == {}


@pytest.mark.parametrize("name", ["charge", "CHARGE", "total_charge", "totalCharge", "net charge"])
def test_total_charge(name: str) -> None:
    for value in (-1, "-1", np.array([-1.0])):
        atoms = Atoms("H", info={"data": {name: value}, "multiplicity": 1})
        assert total_charge(atoms) == -1 and unused_fields(atoms) == {}
    assert total_charge(Atoms("H", info={name: None, "nuclear_charge": 1})) is None
    per_atom = Atoms("H2", info={name: [1, 0]})
    assert total_charge(per_atom) is None and name in unused_fields(per_atom)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"charge": "high"}, "charge.*high"),
        ({"charge": 1, "total_charge": 2}, "charge.*1.*2"),
        ({"multiplicity": 3}, "multiplicity.* 1.*3"),
        ({"Spin_Multiplicity": 2, "charge": 1}, "Spin_Multiplicity.*2"),
    ],
)
def test_total_charges_that_cannot_be_right(info: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        total_charge(Atoms("H", info=info))


def test_energies_of_two_charges_are_not_compared() -> None:
    """An ionization energy is no fault of the units."""
    frames = []
    for number in range(60):
        charge = number % 2  # the nearest frame of the other charge is longer by 0.001 Å
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
