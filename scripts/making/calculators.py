"""Potentials that adsorption systems can be made with: ASE calculators by name, and relaxation.

A potential that another package brings is imported when it is asked for, and never otherwise.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ase import Atoms
    from ase.calculators.calculator import Calculator

__all__ = ["CALCULATORS", "Potential", "Relaxation", "relax"]


class Potential(NamedTuple):
    """An entry of `CALCULATORS`.

    Attributes:
        build: makes its ASE calculator, of energies, forces and stress.
        label: what the energies are, without versions, for cards and tables.
        packages: distributions whose versions energies depend on; the first one brings it.
        install: what to install where that is missing.
        metals: those that it has parameters of; None for any.
        max_step: how far BFGS moves an atom at once, Å; beyond 0.1 many EMT relaxations do not end,
            and CHGNet's take 1.8 times the steps at 0.1 as at 0.2.
        intact: whether molecules stay whole on most surfaces. With EMT three of four come apart
            while they settle, and what they become is then what is relaxed.
    """

    build: Callable[[], Calculator]
    label: str
    packages: tuple[str, ...]
    install: str
    metals: frozenset[str] | None = None
    max_step: float = 0.2
    intact: bool = True

    def describe(self) -> str:
        """Label and versions: another version is another potential."""
        module = self.packages[0]
        if find_spec(module) is None:
            raise ModuleNotFoundError(
                f"calculator {module}: needs the package {module}; got none; run: {self.install}, "
                "or take --calculator emt"
            )
        return f"{self.label} ({', '.join(f'{name} {version(name)}' for name in self.packages)})"


class Relaxation(NamedTuple):
    """Result of a relaxation: energies in eV, and frames on request."""

    before: float
    after: float
    converged: bool
    frames: list[Atoms]


def _emt() -> Calculator:
    from ase.calculators.emt import EMT

    return EMT()


@cache  # its weights take a second to load
def _chgnet() -> Calculator:
    """CHGNet on one CPU core; stress, nearly half of the time, only where it is asked for."""
    with contextlib.redirect_stdout(io.StringIO()):  # it tells where it runs
        module = import_module("chgnet.model.dynamics")
        calculator = module.CHGNetCalculator(use_device="cpu", on_isolated_atoms="ignore")
    calculator.model.requires_grad_(False)  # or weights are in the graph of forces: a tenth slower
    compute: Callable[..., None] = calculator.calculate

    def calculate(
        atoms: Atoms | None = None,
        properties: Sequence[str] = (),
        system_changes: Sequence[str] = (),
    ) -> None:
        task = "efs" if "stress" in properties else "ef"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of how it builds its own tensors
            compute(atoms, list(properties), list(system_changes), task=task)

    calculator.calculate = calculate
    return calculator


CALCULATORS: dict[str, Potential] = {
    "emt": Potential(
        _emt,
        "ASE's effective-medium potential, not DFT",
        ("ase",),
        "pip install ase",
        frozenset({"Ag", "Al", "Au", "Cu", "Ni", "Pd", "Pt"}),
        max_step=0.1,
        intact=False,
    ),
    "chgnet": Potential(
        _chgnet,
        "CHGNet, a learned potential, not DFT",
        ("chgnet", "ase"),
        "pip install molflt[chgnet]",
    ),
}


def relax(
    atoms: Atoms, potential: str, tolerance: float, steps: int = 300, frames: bool = False
) -> Relaxation:
    """Relax in place with BFGS.

    Args:
        atoms: the structure; constraints hold.
        potential: a key of `CALCULATORS`.
        tolerance: largest force on a free atom at the end, eV/Å.
        steps: after which it has not converged.
        frames: keep each structure on the way, with energy and forces.
    """
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.optimize import BFGS

    entry = CALCULATORS[potential]
    atoms.calc = entry.build()
    before = float(atoms.get_potential_energy())
    kept: list[Atoms] = []

    def keep() -> None:
        frame = atoms.copy()
        energy = float(atoms.get_potential_energy())
        forces = atoms.get_forces(apply_constraint=False).copy()
        frame.calc = SinglePointCalculator(frame, energy=energy, forces=forces)
        kept.append(frame)

    optimizer = BFGS(atoms, logfile=None, maxstep=entry.max_step)
    if frames:
        optimizer.attach(keep)
    converged = bool(optimizer.run(fmax=tolerance, steps=steps))
    after = float(atoms.get_potential_energy())
    atoms.calc = None  # one calculator may serve many structures
    return Relaxation(before, after, converged, kept)
