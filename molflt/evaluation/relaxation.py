"""Relaxation with ASE's optimizers, and files of the structures predicted by the position head."""

import time
from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from ase import Atoms, optimize
from ase.calculators.calculator import Calculator
from ase.calculators.singlepoint import SinglePointCalculator
from ase.filters import FrechetCellFilter
from ase.geometry import find_mic
from ase.io import write
from ase.units import GPa
from numpy.typing import NDArray

from molflt.atoms import Data
from molflt.data.structures import Structures
from molflt.data.structures.base import to_atoms
from molflt.evaluation.predictions import Predictions
from molflt.evaluation.results import Results, results_table
from molflt.files import atomically

OptimizerName = Literal["lbfgs", "bfgs", "fire"]
_LARGEST_STEP = 0.1  # Å per atom; with ASE's default, 0.2, atoms may leave the learned region
_Array = NDArray[np.float64]
_THRESHOLDS = np.arange(0.01, 0.5, 0.001)  # Å, as in OC20's evaluator


class Relaxed(NamedTuple):
    """The result of a relaxation."""

    atoms: Atoms
    """last structure with finite energy and forces; its calculator contains these results"""
    converged: bool
    steps: int
    before: float
    """energy of the initial structure in eV; NaN if it is not finite"""
    after: float
    """energy of the last structure in eV"""
    largest_force: float
    """largest force on a free atom of the last structure, in eV/Å"""
    moved: float
    """largest displacement of an atom, in Å"""
    seconds: float
    why: str
    """reason why the relaxation did not converge; empty if it did"""


def relax_atoms(
    atoms: Atoms,
    calculator: Calculator,
    *,
    optimizer: OptimizerName = "lbfgs",
    fmax: float = 0.05,
    steps: int = 500,
    cell: bool = False,
    pressure: float = 0.0,
    trajectory: Path | None = None,
    on_step: Callable[[int], object] = lambda step: None,
) -> Relaxed:
    """Relaxes a copy of a structure, subject to its constraints.

    Args:
        atoms: the structure.
        calculator: calculator of energies, forces and, with `cell`, stress.
        optimizer: ASE optimizer.
        fmax: convergence threshold for the largest force on a free atom, in eV/Å, and with `cell`
            also for the virial, in eV per atom.
        steps: maximum number of steps.
        cell: also relax the cell, with `ase.filters.FrechetCellFilter`.
        pressure: hydrostatic pressure on the cell, in GPa; energies do not contain its term p V.
        trajectory: .traj file to which the structures of all steps are written.
        on_step: function that is called with the number of each step.
    """
    begin, moving = time.perf_counter(), atoms.copy()
    moving.calc = calculator
    subject = FrechetCellFilter(moving, scalar_pressure=pressure * GPa) if cell else moving
    last: Atoms = atoms.copy()
    energies: list[float] = []
    largest_force, virial = nan, nan  # of the last structure
    options: dict[str, Any] = {"logfile": None, "trajectory": trajectory and str(trajectory)}
    converged, count, why = False, 0, ""
    relaxation = getattr(optimize, optimizer.upper())(subject, maxstep=_LARGEST_STEP, **options)
    try:
        for is_converged in relaxation.irun(fmax=fmax, steps=steps):
            converged = bool(is_converged)
            last, results = moving.copy(), calculator.results
            stored = {x: results[x] for x in ("energy", "forces", "stress") if x in results}
            last.calc = SinglePointCalculator(last, **stored)
            largest_force = float(np.linalg.norm(moving.get_forces(), axis=1).max())
            of_cell = subject.get_forces()[len(moving) :]  # ASE treats the cell as three atoms
            virial = float(np.linalg.norm(of_cell, axis=1).max(initial=0.0))
            energies.append(float(results["energy"]))
            count = relaxation.nsteps
            on_step(count)
    except (ValueError, RuntimeError) as error:  # keep the last finite structure
        unmet = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        if unmet and str(error) != "Did not converge":  # the message of FixBondLengths
            raise
        reason = "constraints on bond lengths cannot be met" if unmet else str(error)
        converged, why = False, " ".join(reason.split())
    before, after = (energies[0], energies[-1]) if energies else (nan, nan)
    if not converged and not why:
        of_virial = f" and virial {virial:.3g} eV per atom" if cell else ""
        why = f"largest force {largest_force:.3g} eV/Å{of_virial} after {count} steps"
    moved = float(np.linalg.norm(last.positions - atoms.positions, axis=1).max())
    seconds = time.perf_counter() - begin
    return Relaxed(last, converged, count, before, after, largest_force, moved, seconds, why)


def adwt(distances: _Array) -> float:
    """Computes the average distance within threshold (ADwT) of OC20, in percent.

    This is the fraction of structures whose atoms are, on average, closer to their relaxed
    positions than a threshold, averaged over thresholds from 0.01 to 0.5 Å (arXiv:2010.09990,
    section 4.2). `distances` contains the mean distance of each structure in Å.
    """
    return 100.0 * float((distances[:, None] < _THRESHOLDS).mean())


def position_error(pos: NDArray[np.floating], record: Data) -> float:
    """Returns the mean minimum-image distance, in Å, of free atoms from their relaxed positions.

    The result is NaN without relaxed positions or free atoms. `pos` contains positions in Å, of
    shape (N, 3), and `record` is the structure with its relaxed positions.
    """
    free = ~record.fixed.numpy()
    offset = (record.pos_relaxed.numpy() - pos)[free]
    if not len(offset) or not np.isfinite(offset).all():
        return float("nan")
    axes = record.pbc[0].numpy()
    lattice = np.where(axes[:, None], record.cell[0].numpy(), 0.0)
    return float(find_mic(offset, lattice, axes)[1].mean())


def write_relaxed(
    found: Mapping[str, Predictions], datasets: Mapping[str, Structures], folder: Path | None
) -> tuple[Results, str]:
    """Writes FOLDER/SPLIT.extxyz with the structures predicted by the position head.

    Returns:
        By split, the metrics adwt_percent, initial_adwt_percent (the ADwT of the initial positions)
        and position_error_A, which are None if the relaxed positions are unknown; and a table of
        these metrics.
    """
    rows: Results = {}
    if folder is None:
        return rows, ""
    for split, dataset in datasets.items():
        errors, initial_errors = np.empty(len(dataset)), np.empty(len(dataset))
        frames = []
        for index, displacement in enumerate(found[split].by_atom["displacement"]):
            record = dataset[index]
            pos = (record.pos + torch.from_numpy(displacement) * ~record.fixed[:, None]).numpy()
            frames.append(to_atoms(record))
            frames[-1].info["sid"] = dataset.name(index, record.sid)
            frames[-1].set_positions(pos, apply_constraint=False)
            errors[index] = position_error(pos, record)
            initial_errors[index] = position_error(record.pos.numpy(), record)
        with atomically(folder / f"{split}.extxyz") as file:
            write(str(file), frames, format="extxyz")
        known = np.isfinite(errors)
        rows[split] = dict.fromkeys(("adwt_percent", "initial_adwt_percent", "position_error_A"))
        if known.any():
            rows[split]["adwt_percent"] = adwt(errors[known])
            rows[split]["initial_adwt_percent"] = adwt(initial_errors[known])
            rows[split]["position_error_A"] = float(errors[known].mean())
    table = results_table("split", rows)
    return rows, f"relaxed structures, predicted by the position head\n{table}"
