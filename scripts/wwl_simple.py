"""Makes the five published folds of relaxed adsorbates on metals and alloys, for scripts/folds.py.

    python scripts/wwl_simple.py wwl_simple.extxyz folds.json datasets/wwl-simple
    python scripts/folds.py --config configs/demo.yaml --data datasets/wwl-simple \\
        --out runs/wwl-simple

The structures are those of Deimel et al., ACS Catal. 10, 13729 (2020); folds.json names the systems
of each test fold, as equivGNN has them (Nat. Commun. 16, 8761, 2025). Of the others, every tenth is
val_id, which chooses the weights; the fold that is judged has no part in that. The input are
relaxed structures. A sid is the place in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ase.io import read
from kit.words import described

from molflt.data.structures.records import make_record
from molflt.data.structures.store import write_store
from molflt.data.structures.systems import System, write_systems


def main(words: list[str] | None = None) -> int:
    parser = described(__doc__)
    for name in ("structures", "folds", "out"):
        parser.add_argument(name, type=Path)
    options: argparse.Namespace = parser.parse_args(words)
    frames = read(options.structures, ":")
    folds = {
        name: fold for fold, own in json.loads(options.folds.read_text()).items() for name in own
    }
    records, systems = [], []
    for sid, atoms in enumerate(frames):
        info = atoms.info
        records.append(
            make_record(
                pos=atoms.positions,
                atomic_numbers=atoms.numbers,
                cell=atoms.cell.array,
                pbc=atoms.pbc,
                tags=atoms.get_tags(),
                fixed=atoms.arrays["fixed"],
                sid=sid,
                y_relaxed=info["y_relaxed"],
            )
        )
        facet = str(info["facet"])
        systems.append(System(sid, info["name"], info["adsorbate"], facet, info["metal"]))
    for fold in sorted(set(folds.values())):
        rest = [one for one in systems if folds[one.name] != fold]
        parts = {
            "train": [one for i, one in enumerate(rest) if i % 10],
            "val_id": rest[::10],
            "test_id": [one for one in systems if folds[one.name] == fold],
        }
        folder = options.out / f"test{fold}-val0"
        folder.mkdir(parents=True, exist_ok=True)
        for split, own in parts.items():
            write_store(folder / f"{split}.safetensors", (records[one.sid] for one in own))
        write_systems(folder, parts.items())
        print(f"{folder}: " + ", ".join(f"{split} {len(own)}" for split, own in parts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
