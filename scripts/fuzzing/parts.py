"""Seeds that several processes make: predictions in shards, and a data set of relaxations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

SHARDS = 3
MADE = ["--train=1", "--val=1", "--workers=1", "--frames=true"]
SPLITS = ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")


def make(folder: Path, command: Callable[..., None]) -> None:
    """Writes them below `shards`, `parts` and `joined`.

    Args:
        folder: of the seeds, with a run and its data.
        command: runs a command of the package.
    """
    store = folder / "data" / "val_id.safetensors"
    (folder / "shards").mkdir()
    for ending in ("csv", "json", "extxyz"):
        words = ["predict", str(folder / "run"), str(store), "--batch_size=2", "--device=cpu"]
        words += [f"--out={folder / 'shards' / f'e.{ending}'}"]
        command(*words)
        for number in range(SHARDS):
            command(*words, f"--shard={number + 1}/{SHARDS}")
    write_parts(folder / "parts", store, 0)
    shutil.copytree(folder / "parts", folder / "joined")
    command("data", "make", str(folder / "joined"), *MADE)
    write_parts(folder / "joined", store, 1)


def write_parts(folder: Path, store: Path, number: int) -> None:
    """A folder of relaxed systems that are not joined yet, one of each split."""
    import ase.io

    from molflt.data.structures import make, open_dataset
    from molflt.data.structures.base import to_atoms
    from molflt.data.structures.calculators import CALCULATORS
    from molflt.data.structures.store import write_store

    for place, (split, record) in enumerate(zip(SPLITS, open_dataset(store), strict=True)):
        record.sid = record.sid * 0 + 10 * number + place
        names = {"adsorbate": "H", "catalyst": "Pt", "facet": "111", "site": "top"}
        note = {"names": names, "rejected": {"slab": 0, "energy": 1}}
        part = folder / ".parts" / split / f"{number:07d}.safetensors"
        part.parent.mkdir(parents=True, exist_ok=True)
        write_store(part, [record], source=json.dumps(note))
        atoms = to_atoms(record)
        atoms.info["sid"] = int(record.sid)
        ase.io.write(part.with_suffix(".extxyz"), [atoms, atoms], format="extxyz")
    settings = {
        "generator": make._GENERATOR_VERSION,
        "calculator": "emt",
        "potential": CALCULATORS["emt"].describe(),
        **{"seed": 0, "train": 1, "val": 1, "frames": True},
        "molecules_eV": {"H2": 1.07, "H2O": 1.88, "CO": 0.67, "N2": 0.26},
    }
    if not number:
        (folder / "made.json").write_text(json.dumps(settings))
