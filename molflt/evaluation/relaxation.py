"""Relaxations of structures with a potential, by optimizers of ASE."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from molflt.data.structures import Structures
from molflt.data.structures.base import ANY_TAGS
from molflt.data.structures.overlaps import atoms_coincide, overlaps_of
from molflt.data.structures.sources import Paths, named
from molflt.evaluation.predictions import open_structures
from molflt.evaluation.report import _warn

if TYPE_CHECKING:
    from ase import Atoms
    from ase.calculators.calculator import Calculator
    from ase.filters import Filter

__all__ = ["OptimizerName", "Relaxed", "readable_structures", "relax_atoms"]

OptimizerName = Literal["lbfgs", "bfgs", "fire"]
_CLASSES = {"lbfgs": "LBFGS", "bfgs": "BFGS", "fire": "FIRE"}
_UNMET = "Did not converge"  # what FixBondLengths says
_LARGEST_STEP = 0.1  # Å of an atom; ASE's 0.2 may leave the region that a potential has learned


class Relaxed(NamedTuple):
    """How a relaxation ended."""

    atoms: Atoms
    """the last structure with finite energy and forces, which it holds"""
    converged: bool
    steps: int
    before: float
    """energy of the structure as given, eV; NaN if there is none"""
    after: float
    """of the last one"""
    largest_force: float
    """on a free atom in the last one, eV/Å"""
    moved: float
    """largest displacement of an atom, Å"""
    seconds: float
    why: str
    """why it has not converged"""


def readable_structures(paths: Paths, skip_bad: bool, cell: bool) -> tuple[Structures, bool]:
    """Structures to relax; warns of atoms at one place.

    Returns:
        The structures, and whether it has warned.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: as for predictions; or if a cell shall be relaxed that is not there.
    """
    dataset = open_structures(paths, skip_bad, ANY_TAGS._replace(keep_atoms=True))
    sids = []
    for index, record in enumerate(dataset):
        if cell and not bool(record.pbc.all()):
            raise ValueError(
                f"{dataset.where(index)}: --cell relaxes crystals, periodic along all axes; "
                f"got pbc {record.pbc[0].tolist()}; leave it out"
            )
        sids += [int(record.sid)] * atoms_coincide(record)
    if sids:
        _warn(overlaps_of(named(paths).name, sids, len(dataset)))
    return dataset, bool(sids)


def relax_atoms(
    atoms: Atoms,
    calculator: Calculator,
    *,
    optimizer: OptimizerName = "lbfgs",
    fmax: float = 0.05,
    steps: int = 500,
    cell: bool = False,
    trajectory: Path | None = None,
    told: Callable[[int], object] = lambda step: None,
) -> Relaxed:
    """Relaxes a copy of a structure; constraints hold.

    Args:
        atoms: the structure.
        calculator: of energies and forces; with `cell` also of stress.
        optimizer: of ASE.
        fmax: largest force on a free atom at the end, eV/Å; with `cell` of the virial too, eV per
            atom.
        steps: after which it has not converged.
        cell: relax the cell as well, with `ase.filters.FrechetCellFilter`.
        trajectory: file of ASE's .traj, to write each structure to.
        told: called with the number of each step.
    """
    import ase.optimize
    from ase.filters import FrechetCellFilter

    began, moving = time.perf_counter(), atoms.copy()
    moving.calc = calculator
    subject = FrechetCellFilter(moving) if cell else moving
    last: Atoms = atoms.copy()
    seen: list[_Seen] = []
    options: dict[str, Any] = {"logfile": None, "trajectory": trajectory and str(trajectory)}
    converged, count, why = False, 0, ""
    made = getattr(ase.optimize, _CLASSES[optimizer])(subject, maxstep=_LARGEST_STEP, **options)
    try:
        for at_rest in made.irun(fmax=fmax, steps=steps):
            converged = bool(at_rest)
            last = _frame(moving, calculator)
            seen.append(_Seen.of(subject, moving))
            count = made.nsteps
            told(count)
    except ValueError as error:  # numbers that are not finite: the last sound structure stays
        converged, why = False, " ".join(str(error).split())
    except RuntimeError as error:
        if str(error) != _UNMET:
            raise
        converged, why = False, "constraints on the lengths of bonds cannot be met"
    before, (energy, largest, virial) = (seen[0].energy, seen[-1]) if seen else (nan, _Seen())
    if not converged and not why:
        of_cell = f" and virial {virial:.3g} eV per atom" if cell else ""
        why = f"largest force {largest:.3g} eV/Å{of_cell} after {count} steps"
    moved = float(np.linalg.norm(last.positions - atoms.positions, axis=1).max())
    seconds = time.perf_counter() - began
    return Relaxed(last, converged, count, before, energy, largest, moved, seconds, why)


class _Seen(NamedTuple):
    """Of one step; NaN of none."""

    energy: float = nan
    force: float = nan
    """the largest, eV/Å"""
    virial: float = nan
    """with which the cell counts as three more atoms, eV per atom; 0 without a cell to relax"""

    @classmethod
    def of(cls, subject: Atoms | Filter, moving: Atoms) -> _Seen:
        forces = np.linalg.norm(moving.get_forces(), axis=1)
        of_cell = np.linalg.norm(subject.get_forces()[len(moving) :], axis=1)
        energy = moving.calc.results["energy"]
        return cls(float(energy), float(forces.max()), float(of_cell.max(initial=0.0)))


def _frame(moving: Atoms, calculator: Calculator) -> Atoms:
    """A copy of a structure that holds the last results."""
    from ase.calculators.singlepoint import SinglePointCalculator

    frame, names = moving.copy(), ("energy", "forces", "stress")
    results = {name: calculator.results[name] for name in names if name in calculator.results}
    frame.calc = SinglePointCalculator(frame, **results)
    return frame
