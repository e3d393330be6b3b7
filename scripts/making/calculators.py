"""ASE calculators by name, relaxation, and references for adsorption energies.

As in OC20, the adsorption energy is E(slab with adsorbate) - E(relaxed slab) - sum of E_element
over the atoms of the adsorbate (Chanussot et al., ACS Catal. 11, 6059, 2021). The references
E_element are combinations of the energies of gas-phase H2, H2O, CO and N2: E_H = E(H2) / 2,
E_O = E(H2O) - E(H2), E_C = E(CO) - E_O, E_N = E(N2) / 2. A model can learn these references from
the composition.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.optimize import BFGS

VACUUM = 8.0  # Å of vacuum on each side of slabs and molecules; the cutoff of CHGNet is 6 Å


class Potential(NamedTuple):
    """An entry of `CALCULATORS`.

    Attributes:
        build: function that returns an ASE calculator with energies, forces and stress.
        label: description of the energies, without versions.
        packages: packages whose versions affect the energies.
        metals: supported metals; None for all metals.
        max_step: maximum displacement in a BFGS step, in Å. With steps above 0.1 Å, many EMT
            relaxations do not converge. With 0.1 Å, CHGNet needs 1.8 times as many steps as with
            0.2 Å.
        intact: True if molecules remain intact on most surfaces. With EMT, three out of four
            molecules dissociate while they settle, and the fragments are then relaxed.
    """

    build: Callable[[], Calculator]
    label: str
    packages: tuple[str, ...]
    metals: frozenset[str] | None = None
    max_step: float = 0.2
    intact: bool = True

    def describe(self) -> str:
        """Formats the label and the package versions."""
        return f"{self.label} ({', '.join(f'{name} {version(name)}' for name in self.packages)})"


class Relaxation(NamedTuple):
    """Energies before and after a relaxation in eV, and its frames if they were stored."""

    before: float
    after: float
    converged: bool
    frames: list[Atoms]


@cache  # loading the weights takes a second
def _chgnet() -> Calculator:
    """Returns CHGNet; it computes the stress, which doubles the time, only on request."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the device
        module = import_module("chgnet.model.dynamics")
        calculator = module.CHGNetCalculator(use_device="cpu", on_isolated_atoms="ignore")
    calculator.model.requires_grad_(False)  # saves 10 % of the time
    compute = calculator.calculate

    def calculate(
        atoms: Atoms | None = None,
        properties: Sequence[str] = (),
        system_changes: Sequence[str] = (),
    ) -> None:
        task = "efs" if "stress" in properties else "ef"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about slow tensor conversions
            compute(atoms, list(properties), list(system_changes), task=task)

    calculator.calculate = calculate
    return calculator


CALCULATORS: dict[str, Potential] = {
    "emt": Potential(
        EMT,
        "ASE's effective-medium potential, not DFT",
        ("ase",),
        frozenset({"Ag", "Al", "Au", "Cu", "Ni", "Pd", "Pt"}),
        max_step=0.1,
        intact=False,
    ),
    "chgnet": Potential(_chgnet, "CHGNet, a learned potential, not DFT", ("chgnet", "ase")),
}


def relax(
    atoms: Atoms, potential: str, tolerance: float, steps: int = 300, frames: bool = False
) -> Relaxation:
    """Relaxes atoms in place with BFGS.

    Stops when all forces are below `tolerance`, in eV/Å, or after `steps` steps. With `frames`, the
    structures of all steps are stored with their energies and forces.
    """
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
    atoms.calc = None  # a calculator may serve many structures
    return Relaxation(before, after, converged, kept)


def molecule_energies(
    potential: str, names: Sequence[str] = ("H2", "H2O", "CO", "N2"), tolerance: float = 0.01
) -> dict[str, float]:
    """Returns the energies of relaxed gas-phase molecules in eV; the tolerance is in eV/Å."""
    energies = {}
    for name in names:
        atoms = molecule(name, vacuum=VACUUM, pbc=True)  # learned potentials need a cell
        relaxed = relax(atoms, potential, tolerance)
        if not relaxed.converged:
            raise ValueError(
                f"calculator {potential}: gas-phase {name} did not relax; expected forces below "
                f"{tolerance} eV/Å; use a different calculator"
            )
        energies[name] = relaxed.after
    return energies


def linear_references(molecules: Mapping[str, float]) -> dict[str, float]:
    """Computes the references of the elements in eV from the energies of H2, H2O, CO and N2."""
    oxygen = molecules["H2O"] - molecules["H2"]
    return {
        "H": molecules["H2"] / 2,
        "C": molecules["CO"] - oxygen,
        "N": molecules["N2"] / 2,
        "O": oxygen,
    }


def adsorption_energy(
    total: float, slab: float, adsorbate: Iterable[str], references: Mapping[str, float]
) -> float:
    """Computes E(slab with adsorbate) - E(slab) - the sum of the references, in eV."""
    return total - slab - sum(references[element] for element in adsorbate)
