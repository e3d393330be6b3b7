"""``molflt predict``: energies of structures in any readable file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.data.structures import Structures
from molflt.evaluation.ensemble import ENSEMBLE, load_ensemble
from molflt.evaluation.predictions import Predictions, infer, open_structures
from molflt.evaluation.report import write_csv
from molflt.evaluation.uncertainty import CALIBRATION, uncertainty_of
from molflt.files import atomically, write_atomically
from molflt.training.checkpoint import load_run

__all__ = ["predict"]

_SUFFIXES = (".csv", ".json", ".extxyz", ".traj")


def predict(
    run: Path,
    structures: Path,
    *,
    out: Path,
    checkpoint: str = "best",
    batch_size: int = 64,
    device: str = "auto",
    skip_bad: bool = False,
    also: list[Path] | None = None,
    calibration: Path | None = None,
) -> None:
    """Predicts relaxed energies, in eV, of the structures in a file.

    Args:
        run: folder of a training run.
        structures: a file that ASE reads, a compact store, or an OC20 LMDB.
        out: file to write: .csv or .json (sid, formula, number of atoms, energy in eV), or .extxyz
            or .traj (the structures, with the predicted relaxed energy as their energy).
        checkpoint: best, last, or a safetensors file.
        batch_size: structures in a batch.
        device: auto, cpu, cuda or cuda:N.
        skip_bad: leave out structures that cannot be used, and list them.
        also: further runs, which together with `run` predict as one model, an ensemble: the mean,
            the standard deviation over the runs (spread_eV) and, calibrated, its 68 % interval
            (uncertainty_eV).
        calibration: uncertainty.json of an evaluation of the same runs; by default that in the
            folder ensemble of `run`, if it is there.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or the structures are missing.
        ValueError: if `out` has another ending, there is nothing to predict, the runs make no
            ensemble, or the calibration is not theirs.
    """
    run, structures, out = Path(run), Path(structures), Path(out)
    if out.suffix not in _SUFFIXES:
        raise ValueError(
            f"{out}: expected a name that ends in {', '.join(_SUFFIXES)}; "
            f"got {out.suffix or 'no ending'!r}"
        )
    model, _ = (
        load_run(run, checkpoint, device)
        if also is None
        else load_ensemble([run, *also], checkpoint, device)
    )
    dataset = open_structures(structures, skip_bad)
    found = infer(model, dataset, batch_size, structures.name)
    columns = {"energy_eV": found.energy}
    columns |= uncertainty_of(model, found, calibration, run / ENSEMBLE / CALIBRATION)
    if out.suffix == ".csv":
        write_csv(out, _rows(found, columns))
    elif out.suffix == ".json":
        write_atomically(out, (json.dumps(_rows(found, columns), indent=1) + "\n").encode())
    else:
        _write_atoms(out, dataset, columns)
    low, high = found.energy.min(), found.energy.max()
    ranges = [f"{len(found.energy):,} energies, {low:.3f} to {high:.3f} eV"]
    for name, values in list(columns.items())[1:]:
        ranges.append(f"{name} {values.min():.3f} to {values.max():.3f}")
    print(f"{out}: {'; '.join(ranges)}")


def _rows(
    found: Predictions, columns: Mapping[str, NDArray[np.float64]]
) -> list[dict[str, object]]:
    return [
        {
            "index": i,
            "sid": int(sid),
            "formula": formula,
            "natoms": int(natoms),
            **{name: float(values[i]) for name, values in columns.items()},
        }
        for i, (sid, formula, natoms) in enumerate(
            zip(found.sid, found.formula, found.natoms, strict=True)
        )
    ]


def _write_atoms(
    out: Path, dataset: Structures, columns: Mapping[str, NDArray[np.float64]]
) -> None:
    """Writes structures with their energies; the file appears complete or not at all."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms
    from ase.io import write

    frames = []
    for i, energy in enumerate(columns["energy_eV"]):
        record = dataset[i]
        more = {name: float(values[i]) for name, values in columns.items() if name != "energy_eV"}
        atoms = Atoms(
            record.atomic_numbers.numpy(),
            positions=record.pos.numpy(),
            cell=record.cell[0].numpy(),
            pbc=record.pbc[0].numpy(),
            tags=record.tags.numpy(),
            info={"sid": int(record.sid), **more},
        )
        if bool(record.fixed.any()):
            atoms.set_constraint(FixAtoms(mask=record.fixed.numpy()))
        atoms.calc = SinglePointCalculator(atoms, energy=float(energy))
        frames.append(atoms)
    with atomically(out) as part:
        write(str(part), frames, format=out.suffix.removeprefix("."))
