"""Compare direct prediction of relaxed energies with relaxation using a potential.

    python scripts/make_data.py DATA --calculator emt --frames true
    python scripts/by_relaxation.py DATA --direct runs/is2re --potential runs/potential \\
        --out runs/by-relaxation --splits val_id val_ood_both --count 200

The potential predicts total energies, such as those in DATA/frames/SPLIT.extxyz. To convert them to
adsorption energies, the energy of the clean slab and the references are subtracted. Their sum is
computed for each system from the data: the total energy minus the adsorption energy of the relaxed
structure. Writes errors and costs to by_relaxation.md and by_relaxation.csv, and a line per relaxed
system to SPLIT/relaxed.jsonl. After an interruption, the same command continues if the weights and
the data have not changed.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

import ase.io
import numpy as np
from kit.rows import Row, Rows, markdown, write_csv
from kit.runs import digest, prepare, publish
from kit.words import described, guarded
from torch import nn

from molflt import Calculator
from molflt.data.structures import Structures, open_dataset
from molflt.data.structures.base import to_atoms
from molflt.data.structures.parts import Part
from molflt.data.structures.sources import split_path
from molflt.evaluation.predictions import infer
from molflt.evaluation.relaxation import adwt, position_error, relax_atoms
from molflt.files import write_atomically
from molflt.training.checkpoint import find_weights, load_run, weights_digest


def offsets(frames: Path, dataset: Structures) -> dict[int, float]:
    """Returns the total energy minus the adsorption energy of each system in eV, keyed by sid."""
    if not frames.is_file():
        raise FileNotFoundError(f"{frames}: no such file; run scripts/make_data.py --frames true")
    totals = {
        int(atoms.info["sid"]): float(atoms.get_potential_energy())
        for atoms in ase.io.iread(frames, index=":")
    }
    missing = [int(record.sid) for record in dataset if int(record.sid) not in totals]
    if missing:
        raise ValueError(f"{frames}: expected frames of all systems; got none of {missing[0]}")
    return {int(r.sid): totals[int(r.sid)] - float(r.y_relaxed) for r in dataset}


def relax_all(
    dataset: Structures,
    own: Mapping[int, float],
    path: Path,
    calculator: Calculator,
    options: argparse.Namespace,
) -> Rows:
    """Returns one row per system; rows of systems relaxed earlier are read from `path`."""
    kept = path.read_text().splitlines() if path.exists() else []
    rows: Rows = [json.loads(line) for line in kept]
    known = {row["sid"] for row in rows}
    for record in dataset:
        sid = int(record.sid)
        if sid in known:
            continue
        found = relax_atoms(to_atoms(record), calculator, fmax=options.fmax, steps=options.steps)
        row: Row = {"sid": sid, "error": found.after - own[sid] - float(record.y_relaxed)}
        row["position"] = position_error(found.atoms.positions, record)
        row |= {"seconds": found.seconds, "steps": found.steps, "converged": found.converged}
        rows.append(row)
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    sids = {int(record.sid) for record in dataset}
    return [row for row in rows if row["sid"] in sids]


def compare(
    split: str, model: nn.Module, calculator: Calculator, options: argparse.Namespace
) -> Rows:
    """Returns a row for direct prediction and a row for relaxation."""
    store, frames = split_path(options.data, split), options.data / "frames" / f"{split}.extxyz"
    dataset = open_dataset(store)
    own = offsets(frames, dataset)
    job = {name: str(getattr(options, name)) for name in ("data", "fmax", "steps")}
    digests = {"store": digest(store), "frames": digest(frames)}
    digests["potential"] = weights_digest(find_weights(options.potential)[0])
    folder = options.out / split
    prepare(folder, {"config": str(options.potential), **job, "digests": digests})
    some = Part(dataset, range(min(options.count, len(dataset))))
    began = time.perf_counter()
    direct = infer(model, some, 32, split)
    seconds = time.perf_counter() - began
    rows = relax_all(some, own, folder / "relaxed.jsonl", calculator, options)
    errors, positions = (np.array([row[key] for row in rows]) for key in ("error", "position"))
    columns = ("split", "way", "mae_eV", "adwt_percent", "s_per_system", "converged")
    mae, converged = np.abs(direct.energy - direct.target).mean(), sum(r["converged"] for r in rows)
    one = (split, "direct", mae, None, seconds / len(some), None)
    mean = np.mean([row["seconds"] for row in rows])
    other = (split, "relaxation", np.abs(errors).mean(), adwt(positions), mean)
    relaxed = (*other, f"{converged} of {len(rows)}")
    return [dict(zip(columns, way, strict=True)) for way in (one, relaxed)]


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("data", type=Path)
    for name in ("direct", "potential", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--splits", nargs="+", default=["val_id"])
    for name in ("count", "steps"):
        parser.add_argument(f"--{name}", type=int, default=200)
    parser.add_argument("--fmax", type=float, default=0.05)
    options = parser.parse_args(words)
    calculator = Calculator(options.potential, device="cpu")
    model, _ = load_run(options.direct)
    found = [row for one in options.splits for row in compare(one, model, calculator, options)]
    write_csv(options.out / "by_relaxation.csv", found)
    cells = ([f"{x:.4g}" if isinstance(x, float) else x for x in row.values()] for row in found)
    publish(options.out / "by_relaxation.md", markdown(found[0], cells))


if __name__ == "__main__":
    raise SystemExit(main())
