"""Relaxations of structures with a potential, by optimizers of ASE."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from molflt.data.structures import Structures
from molflt.data.structures.base import ANY_TAGS
from molflt.evaluation.predictions import open_structures

if TYPE_CHECKING:
    from ase import Atoms
    from ase.calculators.calculator import Calculator

__all__ = ["OptimizerName", "Relaxed", "readable_structures", "relax_atoms"]

OptimizerName = Literal["lbfgs", "bfgs", "fire"]
_CLASSES = {"lbfgs": "LBFGS", "bfgs": "BFGS", "fire": "FIRE"}
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


def readable_structures(path: Path, skip_bad: bool, cell: bool) -> Structures:
    """Structures to relax.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: as for predictions; or if a cell shall be relaxed that is not there.
    """
    dataset = open_structures(path, skip_bad, ANY_TAGS)
    if cell:
        for index, record in enumerate(dataset):
            if not bool(record.pbc.all()):
                raise ValueError(
                    f"{dataset.where(index)}: --cell relaxes crystals, periodic along all axes; "
                    f"got pbc {record.pbc[0].tolist()}; leave it out"
                )
    return dataset


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
        fmax: largest force on a free atom at the end, eV/Å; with `cell` likewise of the cell.
        steps: after which it has not converged.
        cell: relax the cell as well, with `ase.filters.FrechetCellFilter`.
        trajectory: file of ASE's .traj, to write each structure to.
        told: called with the number of each step.
    """
    import ase.optimize
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.filters import FrechetCellFilter

    began, moving = time.perf_counter(), atoms.copy()
    moving.calc = calculator
    sound = [atoms.copy()]
    seen: list[tuple[float, float]] = []

    def keep() -> None:
        frame = moving.copy()
        results = {
            name: calculator.results[name]
            for name in ("energy", "forces", "stress")
            if name in calculator.results
        }
        frame.calc = SinglePointCalculator(frame, **results)
        largest = float(np.linalg.norm(moving.get_forces(), axis=1).max())
        sound[0] = frame
        seen.append((float(results["energy"]), largest))

    options: dict[str, Any] = {"logfile": None, "trajectory": trajectory and str(trajectory)}
    converged, count, why = False, 0, ""
    made = getattr(ase.optimize, _CLASSES[optimizer])(
        FrechetCellFilter(moving) if cell else moving, maxstep=_LARGEST_STEP, **options
    )
    try:
        for at_rest in made.irun(fmax=fmax, steps=steps):
            converged = bool(at_rest)
            keep()
            count = made.nsteps
            told(count)
    except ValueError as error:  # numbers that are not finite: the last sound structure stays
        converged, why = False, " ".join(str(error).split())
    last = sound[0]
    energies = [energy for energy, _ in seen] or [float("nan")]
    largest = seen[-1][1] if seen else float("nan")
    if not converged and not why:
        why = f"largest force {largest:.3g} eV/Å after {count} steps"
    moved = float(np.linalg.norm(last.positions - atoms.positions, axis=1).max())
    seconds = time.perf_counter() - began
    return Relaxed(last, converged, count, energies[0], energies[-1], largest, moved, seconds, why)
