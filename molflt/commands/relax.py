"""``molflt relax``: relaxes structures with a trained potential."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tqdm import tqdm

from molflt.data.structures.ase_fields import drop_labels_, not_held
from molflt.data.structures.sources import files_of
from molflt.evaluation.relaxation import OptimizerName, Relaxed, readable_structures, relax_atoms
from molflt.evaluation.results import csv_text, warn, write_csv
from molflt.files import append, appending, atomically, expect_writable, shown, write_atomically
from molflt.pretrained.calculator import Calculator

if TYPE_CHECKING:
    from ase import Atoms

    from molflt.data.structures import Structures

__all__ = ["relax"]

_NOT_CONVERGED = 3  # exit status
_MOST_LISTED = 20


def relax(
    structures: Path | Sequence[Path],
    *,
    run: str,
    out: Path = Path("relaxed.extxyz"),
    fmax: float = 0.05,
    steps: int = 500,
    optimizer: OptimizerName = "lbfgs",
    cell: bool = False,
    trajectories: Path | None = None,
    checkpoint: str | None = None,
    device: str = "auto",
    dtype: Literal["float32", "float64"] = "float64",
    skip_bad: bool = False,
) -> int:
    """Relaxes the structures in a file with a potential, subject to their constraints.

    Writes each relaxed structure as soon as it is done, with its energy, forces and other fields,
    and a table (.csv) next to the file. If a relaxation does not converge, its last valid structure
    is written and the exit status is 3.

    Args:
        structures: files that ASE reads, compact stores, OC20 LMDBs, folders of these, or patterns
            in quotes.
        run: folder of a training run with --recipe potential, an exported potential, or
            hf:OWNER/NAME.
        out: file to write, .extxyz or .traj.
        fmax: largest force on a free atom at convergence, eV/Å; with --cell also the largest
            virial, eV per atom.
        steps: maximum number of steps.
        optimizer: lbfgs, bfgs or fire.
        cell: also relax the cells; needs structures that are periodic along all axes.
        trajectories: folder for the trajectory of each relaxation, NUMBER-SID.traj.
        checkpoint: best (the default), last, or a safetensors file; only for a run.
        device: auto, cpu, cuda or cuda:N.
        dtype: precision of the computation.
        skip_bad: leave out and list invalid structures.

    Returns:
        0, or 3 if a relaxation did not converge.
    """
    out = Path(out)
    if out.suffix not in (".extxyz", ".traj"):
        raise ValueError(f"{out}: expected a name that ends in .extxyz, .traj; got {out.suffix!r}")
    if not fmax > 0 or steps < 1:
        raise ValueError(f"--fmax must be above 0 and --steps at least 1; got {fmax} and {steps}")
    calculator = Calculator(run, checkpoint, device, dtype)
    for path in (out, out.with_suffix(".csv")):  # before anything is read
        expect_writable(path, *files_of(structures))
    dataset, calculator.overlaps_told = readable_structures(structures, skip_bad, cell)
    steps_of = _trajectories(trajectories, dataset)
    bar = tqdm(total=len(dataset), unit=" structures", disable=None)
    with _Output(out, len(dataset)) as output, bar:
        for index, record in enumerate(dataset):
            atoms = dataset.to_atoms(index)
            sid = atoms.info["sid"] = dataset.name(index, int(record.sid))
            if len(dataset.files) > 1:
                atoms.info["file"] = str(dataset.file(index))
            bar.set_description(f"sid {sid}")
            output.add(
                dataset.place(index),
                relax_atoms(
                    atoms,
                    calculator,
                    optimizer=optimizer,
                    fmax=fmax,
                    steps=steps,
                    cell=cell,
                    trajectory=steps_of[index],
                    on_step=lambda step: bar.set_postfix(step=step),
                ),
            )
            bar.update()
    return _summary(out, output.found)


def _trajectories(folder: Path | None, dataset: Structures) -> list[Path | None]:
    """Creates the folder and returns the trajectory file of each structure."""
    if folder is None:
        return [None] * len(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [
        folder / f"{dataset.place(i):06d}-{_plain(dataset.name(i, int(record.sid)))}.traj"
        for i, record in enumerate(dataset)
    ]
    for path in paths:
        if path.exists():
            expect_writable(path, *dataset.files)
    return list(paths)


def _plain(name: str | int) -> str:
    """Replaces characters of a name that file names should not have."""
    return re.sub(r"[^\w.+-]", "_", str(name))[:80]


class _Output:
    """Writes relaxed structures and their table one by one; the first one replaces older files.

    Args:
        out: file of structures, .extxyz or .traj.
        total: number of structures to relax.
    """

    def __init__(self, out: Path, total: int) -> None:
        self.out, self.table, self.total = out, out.with_suffix(".csv"), total
        self.found: dict[int, Relaxed] = {}  # written so far, by index in the file read
        self.lost: dict[str, None] = {}  # messages, in order

    def add(self, place: int, part: Relaxed) -> None:
        """Writes one structure, with its index in the file that was read."""
        atoms = part.atoms
        drop_labels_(atoms)
        atoms.info |= {"converged": part.converged, "steps": part.steps}
        row = _row(place, part)
        self._add_atoms(atoms)
        if self.found:
            append(self.table, csv_text([row]).partition("\n")[2])
        else:
            write_csv(self.table, [row])
        self.found[place] = part

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        """Prints what the format cannot store, and the count if some structures are missing."""
        for text in self.lost:
            warn(f"{self.out}: {text}")
        if 0 < len(self.found) < self.total:
            print(f"molflt: {self.out} has {len(self.found)} of {self.total}", file=sys.stderr)

    def _add_atoms(self, atoms: Atoms) -> None:
        from ase.io import Trajectory, write

        self.lost |= dict.fromkeys(not_held(atoms, self.out.suffix))
        if self.out.suffix == ".extxyz":
            file = StringIO()
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                write(file, atoms, format="extxyz")
            self.lost |= dict.fromkeys(f"ASE: {shown(str(each.message), 200)}" for each in heard)
            if self.found:
                append(self.out, file.getvalue())
            else:
                write_atomically(self.out, file.getvalue().encode())
        elif self.found:
            with appending(self.out), Trajectory(str(self.out), "a") as opened:
                opened.write(atoms)
        else:
            with atomically(self.out) as new, Trajectory(str(new), "w") as opened:
                opened.write(atoms)


def _row(index: int, part: Relaxed) -> dict[str, object]:
    return {
        "index": index,
        **({"file": part.atoms.info["file"]} if "file" in part.atoms.info else {}),
        "sid": part.atoms.info["sid"],
        "formula": part.atoms.get_chemical_formula(),
        "natoms": len(part.atoms),
        "converged": part.converged,
        "steps": part.steps,
        "energy_before_eV": part.before,
        "energy_eV": part.after,
        "largest_force_eV_per_A": part.largest_force,
        "moved_A": part.moved,
        "seconds": round(part.seconds, 3),
        "why": part.why or None,
    }


def _summary(out: Path, found: dict[int, Relaxed]) -> int:
    lost = [(place, part) for place, part in found.items() if not part.converged]
    steps = sum(part.steps for part in found.values())
    seconds = sum(part.seconds for part in found.values())
    print(
        f"{out}: {len(found) - len(lost):,} of {len(found):,} relaxations converged, {steps:,} "
        f"steps in {seconds:.1f} s; table in {out.with_suffix('.csv')}"
    )
    for place, part in lost[:_MOST_LISTED]:
        warn(
            f"structure {place}, sid {part.atoms.info['sid']}, "
            f"{part.atoms.get_chemical_formula()}: not converged: {part.why}"
        )
    if len(lost) > _MOST_LISTED:
        warn(f"and {len(lost) - _MOST_LISTED} more")
    return _NOT_CONVERGED if lost else 0
