"""Merge sets of adsorption energies with different references into one training set.

    python scripts/merge.py OUT sample=datasets/chgnet-sample game-net=datasets/game-net/fg

Energies of the sets are relative to different molecules and come from different methods. In each
set, one energy per element of the adsorbates is fitted to the training split by least squares. The
fitted energies are subtracted. A set that is a single file is divided into splits at random, as in
training. Structures without relaxed positions are treated as relaxed. Writes train.safetensors,
val_id.safetensors and references.json, which contains the subtracted energies in eV by set and
element.
"""

import json
from pathlib import Path

import numpy as np
from ase.data import chemical_symbols
from kit.words import described, guarded
from torch_geometric.data import Data

from molflt.data.structures.labels import fit_element_energies
from molflt.data.structures.sources import DataSet
from molflt.data.structures.store import write_store

SPLITS = ("train", "val_id")


def shifted(record: Data, reference: float, sid: int) -> Data:
    """Returns a copy of a record with `reference` subtracted from its energies and a new sid.

    Missing relaxed positions are replaced by the initial positions.
    """
    record = record.clone()
    record.sid = sid
    for name in ("y_relaxed", "y_init", "y_baseline"):
        record[name] = record[name] - reference
    if not record.pos_relaxed.isfinite().all():
        record.pos_relaxed = record.pos.clone()
    return record


def merge(out: Path, sets: dict[str, Path]) -> None:
    """Writes both splits and references.json, and prints the number of structures in each set."""
    merged: dict[str, list[Data]] = {split: [] for split in SPLITS}
    references = {}
    for name, root in sets.items():
        parts = DataSet(root).open(SPLITS)
        if not np.isfinite(parts["train"].y_relaxed).all():
            raise ValueError(f"{root}: expected energies of all structures in the training split")
        fit = fit_element_energies(parts["train"], of_adsorbates=True)
        present = np.flatnonzero(fit.present)
        references[name] = {chemical_symbols[z]: float(fit.energies[z]) for z in present}
        for split, part in parts.items():
            atoms = part.compositions(np.arange(len(part)), of_adsorbates=True)
            if missing := np.flatnonzero(atoms.any(axis=0) & ~fit.present).tolist():
                symbol = chemical_symbols[missing[0]]
                raise ValueError(f"{root}: adsorbates with {symbol} in {split}, but not in train")
            for record, reference in zip(part, atoms @ fit.energies, strict=True):
                merged[split].append(shifted(record, reference, len(merged[split])))
        print(f"{name}: {', '.join(f'{split} {len(own)}' for split, own in parts.items())}")
    for split, records in merged.items():
        write_store(out / f"{split}.safetensors", records, source=", ".join(sets))
    (out / "references.json").write_text(json.dumps(references, indent=1) + "\n")


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("out", type=Path, help="folder of the merged stores")
    parser.add_argument("sets", nargs="+", metavar="NAME=ROOT", help="name and root of a set")
    options = parser.parse_args(words)
    sets = {}
    for word in options.sets:
        name, equals, root = word.partition("=")
        if not (name and equals and root) or name in sets:
            raise ValueError(f"{word}: expected NAME=ROOT, with distinct names")
        sets[name] = Path(root)
    merge(options.out, sets)


if __name__ == "__main__":
    raise SystemExit(main())
