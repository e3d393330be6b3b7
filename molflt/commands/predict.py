"""``molflt predict``: energies of structures in any readable file."""

from __future__ import annotations

import json
from pathlib import Path

from molflt.data.structures import Structures
from molflt.evaluation.predictions import Predictions, infer, open_structures
from molflt.evaluation.report import write_csv
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

    Raises:
        FileNotFoundError: if the run, its checkpoint, or the structures are missing.
        ValueError: if `out` has another ending, or there is nothing to predict.
    """
    run, structures, out = Path(run), Path(structures), Path(out)
    if out.suffix not in _SUFFIXES:
        raise ValueError(
            f"{out}: expected a name that ends in {', '.join(_SUFFIXES)}; "
            f"got {out.suffix or 'no ending'!r}"
        )
    model, _ = load_run(run, checkpoint, device)
    dataset = open_structures(structures, skip_bad)
    found = infer(model, dataset, batch_size, structures.name)
    if out.suffix == ".csv":
        write_csv(out, _rows(found))
    elif out.suffix == ".json":
        write_atomically(out, (json.dumps(_rows(found), indent=1) + "\n").encode())
    else:
        _write_atoms(out, dataset, found)
    low, high = found.energy.min(), found.energy.max()
    print(f"{out}: {len(found.energy):,} energies, {low:.3f} to {high:.3f} eV")


def _rows(found: Predictions) -> list[dict[str, object]]:
    columns = (found.sid, found.formula, found.natoms, found.energy)
    return [
        {
            "index": i,
            "sid": int(sid),
            "formula": formula,
            "natoms": int(natoms),
            "energy_eV": float(energy),
        }
        for i, (sid, formula, natoms, energy) in enumerate(zip(*columns, strict=True))
    ]


def _write_atoms(out: Path, dataset: Structures, found: Predictions) -> None:
    """Writes structures with their energies; the file appears complete or not at all."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms
    from ase.io import write

    frames = []
    for i, energy in enumerate(found.energy):
        record = dataset[i]
        atoms = Atoms(
            record.atomic_numbers.numpy(),
            positions=record.pos.numpy(),
            cell=record.cell[0].numpy(),
            pbc=record.pbc[0].numpy(),
            tags=record.tags.numpy(),
            info={"sid": int(record.sid)},
        )
        if bool(record.fixed.any()):
            atoms.set_constraint(FixAtoms(mask=record.fixed.numpy()))
        atoms.calc = SinglePointCalculator(atoms, energy=float(energy))
        frames.append(atoms)
    with atomically(out) as part:
        write(str(part), frames, format=out.suffix.removeprefix("."))
