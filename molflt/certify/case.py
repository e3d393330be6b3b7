"""Calculators and the structures on which they are checked."""

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.data import covalent_radii

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
