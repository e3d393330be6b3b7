"""The certificate: a correct calculator passes all checks, and each check finds a fault."""

import contextlib
import copy
import random
import warnings
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.neighborlist import neighbor_list
from ase.stress import full_3x3_to_voigt_6_stress
from tiny_run import random_potential

import molflt
from molflt.certify import CHECKS, Row, certify
from molflt.certify.__main__ import main


class Law:
    """Pair energy (1 - r² / 16)⁴ for r < 4 Å, and its force / distance vector."""

    def forward(self, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rest = 1 - squares / 16
        return rest**4, 4 * rest**3 / 8


class Pairs(Calculator):
    """A correct calculator; faulty calculators replace its methods."""

    implemented_properties = ["energy", "forces", "stress"]  # noqa: RUF012

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale, self.model = scale, Law()

    def calculate(self, atoms=None, properties=None, system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        self.expect(self.atoms)
        self.results = self.changed(self.found(self.prepared(self.atoms.copy())), self.atoms)
        if "stress" in self.results:
            self.results["stress"] = full_3x3_to_voigt_6_stress(self.results["stress"])
        elif "stress" in (properties or ()):
            raise PropertyNotImplementedError("stress needs three periodic axes")

    def found(self, atoms: Atoms) -> dict[str, np.ndarray]:
        first, second, vectors = neighbor_list("ijD", atoms, 4.0)
        energies, slopes = self.model.forward((vectors**2).sum(axis=1))
        weights = self.scale * np.sqrt(atoms.numbers[first] * atoms.numbers[second]) / 20
        pulls = 2 * (weights * slopes)[:, None] * vectors
        forces = np.zeros((len(atoms), 3))
        np.add.at(forces, first, -pulls)
        found = {"energy": (weights * energies).sum(), "forces": forces}
        if self.has_stress(atoms):
            found["stress"] = -vectors.T @ pulls / 2 / atoms.get_volume()
        return found

    def expect(self, atoms: Atoms) -> None:
        for number in {*atoms.numbers} & {0, 119}:
            raise ValueError(f"element {number} does not exist")
        for name in {"charge", "spin"} & atoms.info.keys() | {"initial_magmoms"} & {*atoms.arrays}:
            warnings.warn(f"{name} (magnetic moments) is not used", stacklevel=1)

    def has_stress(self, atoms: Atoms) -> bool:
        return atoms.pbc.all()

    def prepared(self, atoms: Atoms) -> Atoms:
        return atoms

    def changed(self, found: dict, atoms: Atoms) -> dict:
        return found


def fault(name: str, **methods: object) -> type[Pairs]:
    made = type("Faulty", (Pairs,), methods)
    globals()[made.__name__ + name] = made  # pickle imports it
    made.__qualname__ = made.__name__ = made.__name__ + name
    return made


def energy_with(extra) -> dict[str, object]:
    """Returns methods that add to the energy."""

    def changed(self, found, atoms):
        return found | {"energy": found["energy"] + extra(atoms)}

    return {"changed": changed}


def result_with(name: str, change) -> dict[str, object]:
    def changed(self, found, atoms):
        return found | ({name: change(found[name], atoms)} if name in found else {})

    return {"changed": changed}


def first_and_second(a: Atoms) -> np.ndarray:
    return a.positions[1] - a.positions[0] if len(a) > 1 else np.zeros(3)


def chirality(a: Atoms) -> float:
    return np.linalg.det(a.positions[1:4] - a.positions[0]) if len(a) > 3 else 0


def twisted(forces: np.ndarray, atoms: Atoms) -> np.ndarray:
    """Adds opposite forces that are not along the line between two atoms."""
    forces = forces.copy()
    if len(atoms) > 1:
        forces[:2] += np.outer([1, -1], np.cross(first_and_second(atoms), [0, 0, 0.1]))
    return forces


def rounded(self, atoms):
    atoms.positions[:] = atoms.positions.astype(np.float32)
    return atoms


def periodic_in_a_box(self, atoms):
    atoms.pbc = atoms.pbc | (atoms.cell.rank == 3)
    return atoms


class Cut(Law):
    def forward(self, squares):
        return tuple(x * (squares < 9) for x in super().forward(squares))


def with_cut(self, scale=1.0):
    Pairs.__init__(self, scale)
    self.model = Cut()


def forgetful(self, atoms, tol=1e-15):
    return [] if self.atoms is not None and len(atoms) == len(self.atoms) else all_changes


def marking(self, atoms=None, properties=None, system_changes=all_changes):
    atoms.info["seen"] = True
    Pairs.calculate(self, atoms, properties, system_changes)


def swallowing(self, atoms):
    with contextlib.suppress(ArithmeticError):
        self.last = Pairs.found(self, atoms)
    return self.last


def nan_at_one_place(energy: float, atoms: Atoms) -> float:
    return np.nan if (neighbor_list("d", atoms, 4.0) < 1e-8).any() else energy


OUTSIDE = energy_with(
    lambda a: (
        1e-3 * (a.pbc & (np.abs(a.get_scaled_positions(False)) > 3)).sum() if a.pbc.any() else 0
    )
)
PER_CELL = energy_with(lambda a: 1e-3)
SQUARE = energy_with(lambda a: 1e-3 * len(a) ** 2)
PUSH = result_with("forces", lambda f, a: f + 1e-3)
FAULTS: dict[str, dict[str, object]] = {
    "translation": energy_with(lambda a: 1e-3 * np.sin(a.positions).sum()),
    "translation by 10,000 Å": {"prepared": rounded},
    "rotation": energy_with(lambda a: 1e-3 * first_and_second(a)[0] ** 2),
    "mirror image": energy_with(lambda a: 1e-3 * chirality(a)),
    "order of atoms": energy_with(lambda a: 1e-3 * np.linalg.norm(first_and_second(a))),
    "unwrapped atoms": OUTSIDE,
    "left-handed cell": {
        "has_stress": lambda self, a: a.pbc.all() and np.linalg.det(a.cell) > 0,
    },
    "skewed cell": energy_with(lambda a: 1e-3 * a.cell.lengths()[0]),
    "supercell along a": PER_CELL,
    "supercell along b": PER_CELL,
    "third cell vector of a slab": energy_with(lambda a: 1e-3 * a.cell[2, 2]),
    "box around a molecule": {"prepared": periodic_in_a_box},
    "ten runs": energy_with(lambda a: 1e-3 * random.random()),
    "deepcopy": {"__deepcopy__": lambda self, memo: type(self)()},
    "pickle": {"__reduce__": lambda self: (type(self), ())},
    "two molecules, 200 Å apart": SQUARE,
    "two slabs, 100 Å apart": SQUARE,
    "force on a single atom": PUSH,
    "force on an atom in a 100 Å cell": PUSH,
    "forces are -dE/dr": result_with("forces", lambda f, a: 1.01 * f),
    "stress is dE/dε / V": result_with("stress", lambda s, a: s[[1, 0, 2]][:, [1, 0, 2]]),
    "stress of a slab: correct or refused": {
        "has_stress": lambda self, a: a.pbc.any(),
        **result_with("stress", lambda s, a: 18 * s),
    },
    "no stress of a molecule in a box": {"has_stress": lambda self, a: a.cell.rank == 3},
    "sum of forces": PUSH,
    "torque on a molecule": result_with("forces", twisted),
    "energy jump: two atoms pulled apart": {"__init__": with_cut},
    "energy jump: sliding layers": {"__init__": with_cut},
    "changes in place": {"check_state": forgetful},
    "charge used or named": {"expect": lambda self, a: None},
    "spin used or named": {"expect": lambda self, a: None},
    "moments used or named": {"expect": lambda self, a: None},
    "structure unchanged": {"calculate": marking},
    "coincident atoms: finite or refused": result_with("energy", nan_at_one_place),
    "element 0 refused by name": {"expect": lambda self, a: None},
    "element 119 refused by name": {"expect": lambda self, a: [][a.numbers.max() // 119 - 1 :]},
    "error in the model stops dynamics": {"found": swallowing},
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_finds_a_fault(check):
    name = "".join(filter(str.isalnum, check))
    (row,) = certify(partial(fault(name, **FAULTS[check]), 2.0), names=[check])
    assert row.result.startswith("FAILED")


def failed(rows: Iterable[Row]) -> set[str]:
    return {row.check for row in rows if row.result.startswith("FAILED")}


def test_moments_of_iron_do_not_hide_that_a_charge_is_ignored():
    """ASE gives bulk iron magnetic moments, on which this calculator depends."""

    def expect(self, atoms):
        if not atoms.pbc.any():
            raise ValueError("only crystals")

    magnetic = energy_with(lambda a: np.abs(a.get_initial_magnetic_moments()).sum())
    names = {"charge used or named", "spin used or named"}
    made = partial(fault("Magnetic", expect=expect, **magnetic), 2.0)
    assert failed(certify(made, ["Fe"], names=names)) == names


def test_energies_and_stress_that_are_not_finite_are_failures():
    names = ("stress is dE/dε / V", "rotation", "torque on a molecule")
    for faults in (
        energy_with(lambda a: np.nan if a.pbc.all() else 0),
        result_with("stress", lambda s, a: np.nan * s),
    ):
        made = partial(fault("NotFinite", **faults), 2.0)
        assert failed(certify(made, ["Cu"], names=names)) == {*names[:2]}


SQUARE = {"feature_map": "polynomial", "num_features": None, "degree": 2}
FAR = {"two slabs, 100 Å apart"}  # attention among all atoms


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({"messages": 1, "radial_basis": 0, "far_field": False}, set()),
        ({"near_exact": True}, FAR),
        (SQUARE, FAR),
        ({"long_range": [1, 6], "far_field": False}, set()),
    ],
    ids=["messages", "exact", "polynomial", "long range"],
)
def test_potentials(options, known):
    names = [*CHECKS]
    if "messages" not in options:  # other checks do not depend on these options
        names = names[: names.index("energy jump: two atoms pulled apart")]
        names = [name for name in names if name not in ("ten runs", "deepcopy", "pickle")]
    made = molflt.Calculator(random_potential(**options), device="cpu")
    rows = list(certify(partial(copy.copy, made), names=names))  # copies share the model
    assert failed(rows) == known
    errors = {row.check: row.error for row in rows}
    exact = ("left-handed cell", "supercell along a", "supercell along b")
    assert max(errors[name] for name in exact) < 1e-10
    assert max(errors[name] for name in ("forces are -dE/dr", "stress is dE/dε / V")) < 1e-8


def test_the_command_prints_a_table_and_fails_if_a_check_fails(capsys):
    words = ["--args", '{"asap_cutoff": true}', "--elements", "Cu", "Au"]
    assert main(["ase.calculators.emt:EMT", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    count = sum("FAILED" in line for line in lines)
    assert len(lines) == len(CHECKS) + 2 and lines[-1].startswith(f"{count} of 36")
    assert any(line.startswith("energy jump: sliding") and "FAILED" in line for line in lines)
    assert main([f"{__name__}:Pairs", "--args", '{"scale": 2.0}']) == 0
    passed = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" passed")]
    assert [line[:40].strip() for line in passed] == [*CHECKS]


@pytest.mark.parametrize(
    "words",
    [
        ["ase.calculators.emt:EMX"],
        ["no_module:EMT"],
        ["ase.calculators.emt:EMT", "--args", "[1]"],
        ["ase.calculators.emt:EMT", "--elements", "Xx"],
        ["ase.calculators.emt:EMT", "--elements", "U"],
        ["molflt:Calculator", "--args", '{"source": "missing"}'],
    ],
)
def test_wrong_arguments_are_one_line(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    printed = capsys.readouterr()
    assert not printed.out and f"error: {words[0]}: " in printed.err.splitlines()[-1]


def test_missing_properties_are_not_failures():
    class Energies(Pairs):
        implemented_properties = ["energy"]  # noqa: RUF012

    rows = {row.check: row.result for row in certify(Energies, ["Cu"])}
    assert rows["forces are -dE/dr"] == "not supported: forces" and rows["rotation"] == "passed"
    with pytest.raises(ValueError, match="test structures of"):
        list(certify(EMT, ["U"]))


def test_slabs_of_bcc_metals_are_pulled_apart() -> None:
    """The surface of a slab from the primitive cell contains the z axis."""
    make = partial(LennardJones, sigma=3.3, rc=8.0)
    (row,) = certify(make, ["Na"], names=["two slabs, 100 Å apart"])
    assert row.error < 1e-10
