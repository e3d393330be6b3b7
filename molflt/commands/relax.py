"""``molflt relax``: relaxes structures with a trained potential."""

import re
from pathlib import Path
from typing import Literal

from ase.io import Trajectory, write
from tqdm import tqdm

from molflt.commands.options import refuse_idle
from molflt.data.structures import Structures
from molflt.data.structures.ase_fields import drop_labels_, warn_of_lost
from molflt.data.structures.base import ANY_TAGS
from molflt.data.structures.geometry import atoms_coincide, overlaps_of
from molflt.data.structures.sources import Paths, files_of, named
from molflt.evaluation.predictions import open_structures
from molflt.evaluation.relaxation import OptimizerName, Relaxed, relax_atoms
from molflt.files import add_row, appending, atomically, expect_ending, expect_writable, warn
from molflt.pretrained.calculator import Calculator


def relax(
    structures: list[Path],
    *,
    run: str,
    out: Path = Path("relaxed.extxyz"),
    fmax: float = 0.05,
    steps: int = 500,
    optimizer: OptimizerName = "lbfgs",
    cell: bool = False,
    pressure: float | None = None,
    trajectories: Path | None = None,
    checkpoint: str | None = None,
    device: str = "auto",
    dtype: Literal["float32", "float64"] = "float64",
    skip_bad: bool = False,
) -> int:
    """Relaxes the structures in a file with a potential, subject to their constraints.

    Each structure is written when its relaxation ends, with its energy, forces and other fields. A
    table (.csv) is written next to the file. If a relaxation does not converge, the last valid
    structure is written and the exit status is 3.

    Args:
        structures: files that ASE reads, compact stores, OC20 LMDBs, folders of these, or quoted
            patterns.
        run: folder of a training run with --recipe potential, an exported potential, or
            hf:OWNER/NAME.
        out: file to write, .extxyz or .traj; an existing file is replaced.
        fmax: largest force on a free atom at convergence, in eV/Å; with --cell also the largest
            virial, in eV per atom.
        steps: maximum number of steps.
        optimizer: lbfgs, bfgs or fire.
        cell: also relax the cells; requires structures that are periodic along all axes.
        pressure: hydrostatic pressure in GPa, with --cell; 0 by default. Written energies do not
            contain its term p V.
        trajectories: folder for the trajectory of each relaxation, NUMBER-SID.traj.
        checkpoint: best (the default), last, or a safetensors file; requires a training run.
        device: auto, cpu, cuda or cuda:N.
        dtype: precision of the computation.
        skip_bad: skip and list invalid structures.

    Returns:
        0, or 3 if a relaxation did not converge.
    """
    if not cell:
        refuse_idle("molflt relax", "no --cell", {"pressure": pressure})
    expect_ending(out, ".extxyz", ".traj")
    calculator = Calculator(run, checkpoint, device, dtype)
    for path in (out, out.with_suffix(".csv")):  # before anything is read
        expect_writable(path, *files_of(structures))
    dataset, calculator.overlaps_told = _readable_structures(structures, skip_bad, cell)
    if trajectories is not None:
        trajectories.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(dataset), unit=" structures", disable=None)
    results: dict[int, Relaxed] = {}  # by index in the file that was read
    try:
        for index, record in enumerate(dataset):
            atoms = dataset.to_atoms(index)
            sid = atoms.info["sid"] = dataset.name(index, int(record.sid))
            if len(dataset.files) > 1:
                atoms.info["file"] = str(dataset.file(index))
            bar.set_description(f"sid {sid}")
            result = relax_atoms(
                atoms,
                calculator,
                optimizer=optimizer,
                fmax=fmax,
                steps=steps,
                cell=cell,
                pressure=pressure or 0.0,
                trajectory=trajectories and _trajectory(trajectories, dataset, index, sid),
                on_step=lambda step: bar.set_postfix(step=step),
            )
            _add(out, dataset, index, result, first=not results)
            results[dataset.place(index)] = result
            bar.update()
    finally:
        bar.close()
        warn_of_lost(out, [result.atoms for result in results.values()])
        if 0 < len(results) < len(dataset):
            warn(f"{out} contains {len(results)} of {len(dataset)} structures")
    return _report(out, results)


def _readable_structures(paths: Paths, skip_bad: bool, cell: bool) -> tuple[Structures, bool]:
    """Opens the structures to relax; returns them, and True after a warning of overlaps."""
    dataset = open_structures(paths, skip_bad, ANY_TAGS._replace(keep_atoms=True))
    sids = []
    for index, record in enumerate(dataset):
        if cell and not bool(record.pbc.all()):
            raise ValueError(
                f"{dataset.where(index)}: --cell expects crystals, which are periodic along all "
                f"axes; got pbc {record.pbc[0].tolist()}; omit --cell"
            )
        if atoms_coincide(record):
            sids.append(int(record.sid))
    if sids:
        warn(overlaps_of(named(paths).name, sids, len(dataset)))
    return dataset, bool(sids)


def _trajectory(folder: Path, dataset: Structures, index: int, sid: int | str) -> Path:
    name = re.sub(r"[^\w.+-]", "_", str(sid))[:80]
    path = folder / f"{dataset.place(index):06d}-{name}.traj"
    expect_writable(path, *dataset.files)
    return path


def _add(out: Path, data: Structures, index: int, result: Relaxed, first: bool) -> None:
    """Appends a structure to `out` and a row to the table."""
    atoms = result.atoms
    drop_labels_(atoms, moved=True)
    atoms.info |= {"converged": result.converged, "steps": result.steps}
    row = {
        "index": data.place(index),
        **({"file": str(data.file(index))} if len(data.files) > 1 else {}),
        "sid": atoms.info["sid"],
        "formula": atoms.get_chemical_formula(),
        "natoms": len(atoms),
        "converged": result.converged,
        "steps": result.steps,
        "energy_before_eV": result.before,
        "energy_eV": result.after,
        "largest_force_eV_per_A": result.largest_force,
        "moved_A": result.moved,
        "seconds": round(result.seconds, 3),
        "why": result.why or None,
    }
    if first:
        with atomically(out) as new:
            write(str(new), atoms, format=out.suffix[1:])
    elif out.suffix == ".traj":  # `write` would start a second file inside
        with appending(out), Trajectory(str(out), "a") as opened:
            opened.write(atoms)
    else:
        with appending(out):
            write(str(out), atoms, format="extxyz", append=True)
    add_row(out.with_suffix(".csv"), row, first)


def _report(out: Path, results: dict[int, Relaxed]) -> int:
    """Prints numbers of relaxations and returns the exit status: 3 if one did not converge."""
    failed = {index: result for index, result in results.items() if not result.converged}
    steps = sum(result.steps for result in results.values())
    seconds = sum(result.seconds for result in results.values())
    print(
        f"{out}: {len(results) - len(failed):,} of {len(results):,} relaxations converged, "
        f"{steps:,} steps in {seconds:.1f} s; table in {out.with_suffix('.csv')}"
    )
    for index, result in failed.items():
        name = f"sid {result.atoms.info['sid']}, {result.atoms.get_chemical_formula()}"
        warn(f"structure {index}, {name}: not converged: {result.why}")
    return 3 if failed else 0
