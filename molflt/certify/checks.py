"""Test structures; checks of energies, forces and stress, also of changed structures."""

import contextlib
import copy
import io
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self
from unittest.mock import Mock

import numpy as np
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.data import covalent_radii
from ase.md.verlet import VelocityVerlet

Change = Callable[[Atoms], Iterable[Atoms]]
_TURN = np.linalg.qr(np.array([[1.0, 2, 3], [0, 1, 4], [5, 6, 0]]))[0]  # orthogonal
_TRIED = ["Cu", "O", "C", "H"]
_NONMETALS = {"H", "C", "N", "O", "F", "P", "S", "Cl", "Se", "Br", "I"}
_MOLECULES = ["CH3OH", "H2O", "NH3", "CH4", "H2CO", "CO2", "SiH4", "NaCl"]
IDENTITY, X, Y, Z = np.eye(3), *np.eye(3)
BOX = 20 * IDENTITY


class Results(dict[str, Any]):
    """Energy and, if implemented, forces and (for structures periodic along all axes) stress."""

    def __init__(self, calculator: Any, atoms: Atoms) -> None:
        if hasattr(calculator, "reset"):
            calculator.reset()
        atoms = atoms.copy()
        atoms.calc = calculator
        self["energy"] = np.array(atoms.get_potential_energy(), dtype=float)
        with contextlib.suppress(PropertyNotImplementedError):
            self["forces"] = np.array(atoms.get_forces(), dtype=float)
        if atoms.pbc.all():
            with contextlib.suppress(PropertyNotImplementedError):
                self["stress"] = np.array(atoms.get_stress(voigt=False), dtype=float)

    def __missing__(self, name: str) -> Any:
        raise PropertyNotImplementedError(name)

    def finite(self) -> bool:
        return max(map(largest, self.values())) < math.inf

    def difference(self, other: Self) -> float:
        if self.keys() != other.keys():  # such as a stress of one cell only
            return math.inf
        return max(largest(self[name] - other[name]) for name in self)


class Case:
    """Function that makes the calculator, and the test structures that the calculator supports."""

    def __init__(self, make: Callable[[], Any], elements: list[str], float32: bool) -> None:
        self.make, self.elements = make, elements or _supported(make())
        self.bound_factor = 1000 if float32 else 1
        self.step = 2e-2 if float32 else 1e-3  # step of finite differences
        samples = _samples(self.elements)
        self.refused = {name: _refusal(make(), atoms) for name, atoms in samples.items()}
        accepted = ("", "not finite")  # which fails the checks
        self.samples = {name: x for name, x in samples.items() if self.refused[name] in accepted}
        if not self.samples:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise ValueError(f"all test structures of {self.elements} are rejected ({reasons})")

    def copies(self, *names: str) -> list[Atoms]:
        """Returns copies of samples, by default all, that the calculator supports."""
        supported = [name for name in names or self.refused if name in self.samples]
        if not supported:
            raise PropertyNotImplementedError(self.refused[names[0]])
        return [self.samples[name].copy() for name in supported]

    def slope(self, atoms: Atoms, direction: Any = 0, strain: Any = 0) -> float:
        """Returns the slope of the energy along a direction and a strain by finite differences."""
        calculator, energies = self.make(), []
        for t in self.step * np.array([-2, -1, 1, 2]):
            deformation = IDENTITY + t * strain
            positions = (atoms.positions + t * direction) @ deformation
            changed = copied(atoms, positions, atoms.cell.array @ deformation)
            energies.append(float(Results(calculator, changed)["energy"]))
        return np.dot([1, -8, 8, -1], energies) / 12 / self.step


def largest(values: Any) -> float:
    """Returns the largest absolute value, or infinity if a value is not finite."""
    return float(np.nan_to_num(np.abs(values).max(), nan=np.inf))


def one_line(problem: BaseException) -> str:
    return f"{type(problem).__name__} {' '.join(str(problem).split())}".strip()


def _refusal(calculator: Any, atoms: Atoms) -> str:
    try:
        return "" if Results(calculator, atoms).finite() else "not finite"
    except Exception as problem:
        return one_line(problem)


def _supported(calculator: Any) -> list[str]:
    boxes: list[dict[str, Any]] = [{}, {"cell": [2.5] * 3, "pbc": True}]
    refused = {s: [_refusal(calculator, Atoms([s], **box)) for box in boxes] for s in _TRIED}
    return [symbol for symbol in _TRIED if not all(refused[symbol])] or _TRIED


def _samples(elements: list[str]) -> dict[str, Atoms]:
    """Returns a molecule, a crystal and a slab, all without symmetry."""
    known = [name for name in _MOLECULES if {*molecule(name).symbols} <= {*elements}]
    metals = [symbol for symbol in elements if symbol not in _NONMETALS]
    if known:
        small = molecule(known[0])
    else:
        side = 2 * covalent_radii[Atoms(elements).numbers].max()
        places = np.array([[0, 0, 0], [1, 0, 0], [0.4, 0.9, 0], [0.5, 0.3, 0.9]])
        small = Atoms([elements[k % len(elements)] for k in range(4)], side * places)
    small.rattle(0.05, seed=0)
    if metals:
        one = bulk(metals[0])
        crystal = one.repeat((2, 2, 1) if len(one) == 1 else (2, 1, 1))
        crystal.symbols[0] = metals[-1]
    else:
        crystal = small.copy()
        crystal.set_cell(np.ptp(small.positions, axis=0) + np.array([3.0, 3.3, 3.6]))
        crystal.pbc = True
    skew = np.array([[1.03, 0.02, 0.01], [-0.02, 0.99, 0.03], [0.01, 0, 1.02]])
    crystal.set_cell(crystal.cell.array @ skew, scale_atoms=bool(metals))
    crystal.rattle(0.05, seed=1)
    slab = crystal.repeat((1, 1, 2))
    slab.center(vacuum=6.0, axis=2)
    slab.pbc = (True, True, False)
    return {"molecule": small, "crystal": crystal, "slab": slab}


def copied(atoms: Atoms, positions: Any = None, cell: Any = None) -> Atoms:
    """Returns a copy with other positions or another cell; None keeps those of `atoms`."""
    return Atoms(atoms, positions=positions, cell=cell)


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Yields a buffer that collects the output and the warnings of the block."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        with warnings.catch_warnings(record=True, action="always") as caught:
            yield text
        text.write(" ".join(str(warning.message) for warning in caught))


def error_after(
    case: Case,
    change: Change = lambda atoms: [atoms],
    on: Sequence[str] = (),
    through: Callable[[Any], Any] = lambda calculator: calculator,
    **functions: Callable[[Any], Any],
) -> float:
    """Returns the largest error after a change; `functions` map original to expected results."""
    errors = []
    for atoms in case.copies(*on):
        calculator = case.make()
        expected = Results(calculator, atoms)
        for name in functions.keys() & expected.keys():
            expected[name] = functions[name](expected[name])
        calculator = through(calculator)
        errors += [Results(calculator, changed).difference(expected) for changed in change(atoms)]
    return max(errors)


def _moved(*shifts: Any) -> Change:
    return lambda atoms: [copied(atoms, atoms.positions + shift) for shift in shifts]


def _cells(*factors: Any) -> Change:
    return lambda atoms: [copied(atoms, cell=factor @ atoms.cell.array) for factor in factors]


def _boxed(atoms: Atoms) -> list[Atoms]:
    return [copied(atoms, cell=box) for box in (IDENTITY, BOX, -BOX, np.diag([5.0, 5, 0]))]


def _unwrapped(atoms: Atoms) -> list[Atoms]:
    steps = np.random.default_rng(0).integers(-9, 10, (len(atoms), 3)) * atoms.pbc
    return [copied(atoms, atoms.positions + k * steps @ atoms.cell.array) for k in (1, -1)]


def _turned(turn: Any) -> dict[str, Any]:
    return {
        "change": lambda a: [copied(a, a.positions @ turn.T, a.cell @ turn.T)],
        "forces": lambda f: f @ turn.T,
        "stress": lambda s: turn @ s @ turn.T,
    }


def _fragments(case: Case, on: str, distance: float) -> float:
    """Returns the interaction energy of two different fragments."""
    atoms, calculator = case.copies(on)[0], case.make()
    other = atoms[: max(1, len(atoms) // 2)]
    normal = np.cross(*atoms.cell[:2]) if atoms.pbc.any() else Z
    shift = distance * normal / np.linalg.norm(normal)
    other.positions += shift
    cell = atoms.cell.array + atoms.pbc.any() * np.outer(Z, shift)
    systems = [copied(part, cell=cell) for part in (atoms + other, atoms, other)]
    both, first, second = (Results(calculator, system)["energy"] for system in systems)
    return largest(both - first - second)


def _isolated(case: Case, side: float = 0.0) -> float:
    case.copies("crystal" if side else "molecule")  # skips the check if not supported
    systems = [Atoms([s], [[1.0, 2, 3]], cell=[side] * 3, pbc=side > 0) for s in case.elements]
    results = [Results(case.make(), atoms) for atoms in systems]
    return max(largest(x["forces"]) if x.finite() else math.inf for x in results)


def _forces(case: Case) -> float:
    errors = []
    for atoms in case.copies():
        forces = Results(case.make(), atoms)["forces"]
        for direction in np.random.default_rng(0).normal(size=(3, len(atoms), 3)):
            direction /= np.linalg.norm(direction)
            errors.append(largest(case.slope(atoms, direction) + (forces * direction).sum()))
    return max(errors)


def _stress(case: Case, on: str, **box: Any) -> float:
    """Checks each component of the stress; for a molecule in a box, any stress is an error."""
    atoms = copied(case.copies(on)[0], **box)
    atoms.calc = case.make()
    try:
        stress = atoms.get_stress()
    except PropertyNotImplementedError:
        if on == "crystal":
            raise
        return 0.0
    if box:
        return math.inf
    pairs = (X, X), (Y, Y), (Z, Z), (Y, Z), (X, Z), (X, Y)
    slopes = [case.slope(atoms, strain=(np.outer(a, b) + np.outer(b, a)) / 2) for a, b in pairs]
    return largest(np.array(slopes) / atoms.get_volume() - stress)


def _net_force(case: Case) -> float:
    return max(largest(Results(case.make(), a)["forces"].sum(axis=0)) for a in case.copies())


def _torque(case: Case) -> float:
    (atoms,) = case.copies("molecule")
    return largest(np.cross(atoms.positions, Results(case.make(), atoms)["forces"]).sum(axis=0))


def _jump(case: Case, path: Callable[[float], tuple[Atoms, Any]], end: float) -> float:
    """Returns the first difference between energy and work of the forces along a path, or 0."""
    calculator = case.make()

    def at(t: float) -> tuple[float, float, float]:
        atoms, direction = path(t)
        results = Results(calculator, atoms)
        return t, float(results["energy"]), float((results["forces"] * direction).sum())

    def between(first: tuple[float, ...], last: tuple[float, ...]) -> float:
        (start, energy, force), (stop, last_energy, last_force) = first, last
        width = stop - start
        middle = at(start + width / 2)
        work = width / 6 * (force + 4 * middle[2] + last_force)  # Simpson's rule
        error = last_energy - energy + work
        if width < 1e-5 or math.isnan(error):
            return largest(error)
        if abs(error) < 1e-6 * case.bound_factor:
            return 0.0
        return between(first, middle) or between(middle, last)

    steps = itertools.pairwise(map(at, np.arange(0, end, 0.2)))
    return next(filter(None, itertools.starmap(between, steps)), 0.0)


def _pulled_apart(case: Case) -> float:
    case.copies("molecule")  # skips the check if not supported
    pair = [case.elements[0], case.elements[-1]]
    start = covalent_radii[Atoms(pair).numbers].sum()
    return _jump(case, lambda t: (Atoms(pair, [0 * Z, (start + t) * Z]), [0 * Z, Z]), 14.0)


def _sliding_layers(case: Case) -> float:
    atoms = case.copies("crystal")[0].repeat((1, 1, 2))
    side = float(np.linalg.norm(atoms.cell[0]))
    direction = np.outer(np.arange(len(atoms)) >= len(atoms) // 2, atoms.cell[0] / side)
    return _jump(case, lambda t: (copied(atoms, atoms.positions + t * direction), direction), side)


def _changed_in_place(case: Case) -> float:
    """Checks the results after in-place changes, with one calculator for all structures."""
    calculator, errors = case.make(), []
    for atoms in case.copies():
        atoms.calc = calculator
        for change in ("nothing", "positions", "elements", "cell"):
            if change == "positions":
                atoms.positions[0] += 0.1
            elif change == "elements":
                atoms.numbers[:] = np.roll(atoms.numbers, 1)
            elif change == "cell":
                atoms.cell[0] *= 1.05
            expected = Results(case.make(), atoms)
            errors.append(largest(atoms.get_potential_energy() - expected["energy"]))
            errors.append(largest(atoms.get_forces() - expected["forces"]))
    return max(errors)


def _ignored(case: Case, word: str, moment: float | None = None, **info: int) -> float:
    """Returns 0 if setting a quantity affects the energy or causes a message; otherwise 1."""
    atoms = case.copies("molecule", "crystal")[0]
    atoms.calc, used = case.make(), False
    with quiet() as text:
        try:
            before = atoms.get_potential_energy()
            atoms.info |= info
            if moment is not None:
                atoms.set_initial_magnetic_moments([moment] * len(atoms))
            new = Results(case.make(), atoms)["energy"]
            used = new != before and new == atoms.get_potential_energy()
        except Exception as problem:
            text.write(str(problem))
    return 0 if used or word in text.getvalue().lower() else 1


def _modified(case: Case) -> float:
    changed = 0
    for atoms in case.copies():
        before, atoms.calc = atoms.copy(), case.make()
        atoms.get_forces()
        same_fields = atoms.info == before.info and atoms.arrays.keys() == before.arrays.keys()
        changed += 0 if same_fields and atoms == before else 1
    return changed


def _not_finite(case: Case) -> float:
    """Returns the number of non-finite results for overlapping atoms."""
    calculator, count = case.make(), 0
    for atoms, distance in itertools.product(case.copies(), (0, 1e-9, 1e-6, 1e-3, 0.1)):
        both = atoms + copied(atoms[:1], atoms.positions[:1] + distance * X)
        with contextlib.suppress(Exception):
            count += not Results(calculator, both).finite()
    return count


def _accepted(case: Case, number: int) -> float:
    """Returns 1 if a nonexistent element is accepted, and 0 if an error mentions it."""
    atoms = case.copies("molecule", "crystal")[0]
    atoms.numbers[0] = number
    try:
        Results(case.make(), atoms)
    except Exception as problem:
        if re.search(rf"\b({number}|X)\b", str(problem)):
            return 0
        raise
    return 1


def _not_stopped(case: Case) -> float:
    """Counts dynamics steps that succeed although the torch model fails; NaN without a model."""
    atoms = case.copies("molecule", "crystal")[0]
    atoms.calc, steps = case.make(), 0
    dynamics = VelocityVerlet(atoms, units.fs).irun(5)
    next(dynamics)
    members = (x if isinstance(x, list) else [x] for x in vars(atoms.calc).values())
    models = [x for x in itertools.chain(*members) if hasattr(x, "forward")]
    for model in models:
        model.forward = Mock(side_effect=ArithmeticError)
    with contextlib.suppress(Exception):
        steps = sum(1 for _ in dynamics)
    return steps if any(model.forward.called for model in models) else math.nan


_TWICE = {"energy": lambda e: 2 * e, "forces": lambda f: np.tile(f, (2, 1))}
_SKEWS = [IDENTITY + k * np.outer(X, Y) for k in (1, -3, 10)]
_THIRDS = [np.diag([1, 1, k]) for k in (2, 0, -1.5)] + [IDENTITY + 0.4 * np.outer(Z, X + Y)]
CHANGES: dict[str, dict[str, Any]] = {
    "translation": {"change": _moved([3.1, -2.7, 1.3])},
    "translation by 10,000 Å": {"change": _moved(*1e4 * IDENTITY)},
    "rotation": _turned(_TURN * np.linalg.det(_TURN)),
    "mirror image": _turned(-_TURN * np.linalg.det(_TURN)),
    "order of atoms": {"change": lambda a: [a[::-1]], "forces": lambda f: f[::-1]},
    "unwrapped atoms": {"on": ("crystal", "slab"), "change": _unwrapped},
    "left-handed cell": {"on": ("crystal", "slab"), "change": _cells(IDENTITY[[1, 0, 2]])},
    "skewed cell": {"on": ("crystal", "slab"), "change": _cells(*_SKEWS)},
    "supercell along a": {"on": ("crystal", "slab"), "change": lambda a: [a * (2, 1, 1)], **_TWICE},
    "supercell along b": {"on": ("crystal", "slab"), "change": lambda a: [a * (1, 2, 1)], **_TWICE},
    "third cell vector of a slab": {"on": ("slab",), "change": _cells(*_THIRDS)},
    "box around a molecule": {"on": ("molecule",), "change": _boxed},
    "ten runs": {"change": lambda a: [a] * 9},
    "deepcopy": {"through": copy.deepcopy},
    "pickle": {"through": lambda c: pickle.loads(pickle.dumps(c))},
}
"""name of the check -> arguments of `error_after`"""
CHECKS: dict[str, tuple[Callable[[Case], float], float, str]] = {
    **{name: (partial(error_after, **options), 1e-7, "eV, Å") for name, options in CHANGES.items()},
    "two molecules, 200 Å apart": (partial(_fragments, on="molecule", distance=200.0), 1e-5, "eV"),
    "two slabs, 100 Å apart": (partial(_fragments, on="slab", distance=100.0), 1e-5, "eV"),
    "force on a single atom": (_isolated, 1e-7, "eV/Å"),
    "force on an atom in a 100 Å cell": (partial(_isolated, side=100.0), 1e-7, "eV/Å"),
    "forces are -dE/dr": (_forces, 1e-5, "eV/Å"),
    "stress is dE/dε / V": (partial(_stress, on="crystal"), 1e-5, "eV/Å³"),
    "stress of a slab: correct or refused": (partial(_stress, on="slab"), 1e-5, "eV/Å³"),
    "no stress of a molecule in a box": (partial(_stress, on="molecule", cell=BOX), 0, "eV/Å³"),
    "sum of forces": (_net_force, 1e-7, "eV/Å"),
    "torque on a molecule": (_torque, 1e-7, "eV"),
    "energy jump: two atoms pulled apart": (_pulled_apart, 1e-6, "eV"),
    "energy jump: sliding layers": (_sliding_layers, 1e-6, "eV"),
    "changes in place": (_changed_in_place, 1e-7, "eV, Å"),
    "charge used or named": (partial(_ignored, word="charge", charge=2), 0, "ignored"),
    "spin used or named": (partial(_ignored, word="spin", spin=3), 0, "ignored"),
    "moments used or named": (partial(_ignored, word="mag", moment=2.0), 0, "ignored"),
    "structure unchanged": (_modified, 0, "changed"),
    "coincident atoms: finite or refused": (_not_finite, 0, "wrong"),
    "element 0 refused by name": (partial(_accepted, number=0), 0, "accepted"),
    "element 119 refused by name": (partial(_accepted, number=119), 0, "accepted"),
    "error in the model stops dynamics": (_not_stopped, 0, "steps"),
}
"""name of the check -> function that computes the error, bound of the error, and unit"""
