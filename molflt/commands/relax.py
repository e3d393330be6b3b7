"""``molflt relax``: structures at rest by a trained potential."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from molflt.data.structures.in_memory import to_atoms
from molflt.evaluation.relaxation import OptimizerName, Relaxed, readable_structures, relax_atoms
from molflt.evaluation.report import write_csv
from molflt.files import atomically
from molflt.pretrained.calculator import Calculator

__all__ = ["relax"]

_NOT_CONVERGED = 3  # exit status
_MOST_LISTED = 20


def relax(
    structures: Path,
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
    """Relaxes the structures in a file with a potential; fixed atoms stay where they are.

    Writes the relaxed structures with energies and forces, and a table (.csv) beside them. The exit
    status is 3 if a relaxation has not converged; its last sound structure is written all the same.

    Args:
        structures: a file that ASE reads, a compact store, or an OC20 LMDB.
        run: folder of a training run with --recipe potential, an exported potential, or
            hf:OWNER/NAME.
        out: file to write, .extxyz or .traj.
        fmax: largest force on a free atom at the end, eV/Å.
        steps: after which a relaxation has not converged.
        optimizer: lbfgs, bfgs or fire.
        cell: relax the cells, too; of structures that are periodic along all axes.
        trajectories: folder to write each relaxation to, step by step, as SID.traj.
        checkpoint: of a run: best (the default), last, or a safetensors file.
        device: auto, cpu, cuda or cuda:N.
        dtype: of the arithmetic.
        skip_bad: leave out structures that cannot be used, and list them.

    Returns:
        0, or 3 if some have not converged.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or the structures are missing.
        ValueError: if the run has no potential, there is nothing to relax, or an option is out of
            its range.
    """
    out = Path(out)
    if out.suffix not in (".extxyz", ".traj"):
        raise ValueError(f"{out}: expected a name that ends in .extxyz, .traj; got {out.suffix!r}")
    if not fmax > 0 or steps < 1:
        raise ValueError(
            f"--fmax must be above 0 and --steps at least 1; got {fmax} and {steps}; correct them"
        )
    calculator = Calculator(run, checkpoint, device, dtype)
    dataset = readable_structures(Path(structures), skip_bad, cell)
    if trajectories is not None:
        trajectories.mkdir(parents=True, exist_ok=True)
    found: list[Relaxed] = []
    with tqdm(total=len(dataset), unit=" structures", disable=None) as bar:
        for index, record in enumerate(dataset):
            atoms = to_atoms(record)
            bar.set_description(f"sid {atoms.info['sid']}")
            kept = trajectories and trajectories / f"{index:06d}-{atoms.info['sid']}.traj"
            found.append(
                relax_atoms(
                    atoms,
                    calculator,
                    optimizer=optimizer,
                    fmax=fmax,
                    steps=steps,
                    cell=cell,
                    trajectory=kept,
                    told=lambda step: bar.set_postfix(step=step),
                )
            )
            bar.update()
    _write(out, found)
    return _summary(out, found)


def _write(out: Path, found: list[Relaxed]) -> None:
    from ase.io import write

    frames = []
    for part in found:
        part.atoms.info |= {"converged": part.converged, "steps": part.steps}
        frames.append(part.atoms)
    with atomically(out) as file:
        write(str(file), frames, format=out.suffix.removeprefix("."))
    rows: list[dict[str, object]] = [
        {
            "index": index,
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
        for index, part in enumerate(found)
    ]
    write_csv(out.with_suffix(".csv"), rows)


def _summary(out: Path, found: list[Relaxed]) -> int:
    lost = [(i, part) for i, part in enumerate(found) if not part.converged]
    steps = sum(part.steps for part in found)
    print(
        f"{out}: {len(found) - len(lost):,} of {len(found):,} relaxations converged, {steps:,} "
        f"steps in {sum(part.seconds for part in found):.1f} s; table in {out.with_suffix('.csv')}"
    )
    for index, part in lost[:_MOST_LISTED]:
        print(
            f"molflt: warning: structure {index}, sid {part.atoms.info['sid']}, "
            f"{part.atoms.get_chemical_formula()}: not converged: {part.why}",
            file=sys.stderr,
        )
    if len(lost) > _MOST_LISTED:
        print(f"molflt: warning: and {len(lost) - _MOST_LISTED} more", file=sys.stderr)
    return _NOT_CONVERGED if lost else 0
