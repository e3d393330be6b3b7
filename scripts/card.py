"""Print the card of a data set that `scripts/make_data.py` has made.

python scripts/card.py datasets/chgnet-sample > datasets/chgnet-sample/README.md
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from kit.rows import markdown
from torch_geometric.data import Data

from molflt.atoms import Tag
from molflt.data.structures.splits import VAL_SPLITS
from molflt.data.structures.store import StructureStore

SPLITS = ("train", *VAL_SPLITS)
KNOWN = ("train", "val_id")
LABELS = {
    "chgnet": (
        "**The labels are CHGNet energies, not DFT.** CHGNet (Deng et al., Nat. Mach. Intell. 5,\n"
        "1031, 2023) is a potential learned from DFT of bulk crystals, to which surfaces are new:\n"
        "trends are chemistry, numbers are not."
    ),
    "emt": (
        "**The labels are energies of ASE's EMT, not DFT**, whose parameters for H, C, N and O\n"
        "are rough: numbers compare models with each other, and with nothing else."
    ),
}


TITLES = {"chgnet": "CHGNet", "emt": "EMT"}
CARD = """# {title} sample

{count} relaxations of an adsorbate on a slab of a metal or an ordered alloy, with {title}, in the
schema of OC20's IS2RE task: an initial structure, its relaxed positions and its adsorption energy.
{labels}
[How far they are from DFT](../../docs/results/sample.md#how-far-the-labels-are-from-dft).

Made by `python scripts/make_data.py {folder} {options}`
with {versions}.
The same command with a larger `--train` and `--val` keeps these systems and adds others.

Licence: CC0 1.0 (no rights reserved).

## Splits

Energies are against the relaxed clean slab and OC20's references, gas-phase H2, H2O, CO and N2,
linear per element ({elements} eV).
The last column is the error of predicting the training median, {median} eV. Knowing which adsorbate
it is, and nothing else, gives {by_adsorbate} eV on val_id.

{splits}

- train and val_id: {adsorbates} on {catalysts}.
- val_ood_ads and val_ood_both: {new_adsorbates}, which train does not have.
- val_ood_cat and val_ood_both: {new_catalysts}, which train does not have.

Adsorbate atoms move by {moved} Å (median over systems of the largest displacement), 95 % of systems
less than {most_moved} Å, at most {farthest} Å.

{by_name}

How a system is made, and when a draw is refused: `scripts/making/systems.py`.
Refused and drawn again: {refused}.
`systems.csv` names adsorbate, catalyst, facet and site of each sid.

## Files

{files}
"""


class System(NamedTuple):
    """One system with its names."""

    record: Data
    adsorbate: str
    catalyst: str

    @property
    def energy(self) -> float:
        """Label, eV."""
        return float(self.record.y_relaxed)

    @property
    def moved(self) -> float:
        """Largest displacement of an atom of the adsorbate, Å."""
        adsorbate = self.record.tags == Tag.ADSORBATE
        away = (self.record.pos_relaxed - self.record.pos)[adsorbate]
        return float(away.norm(dim=1).max())


Systems = dict[str, list[System]]


def read(folder: Path) -> Systems:
    """All systems by split."""
    with (folder / "systems.csv").open(newline="", encoding="utf-8") as file:
        named = {
            int(row["sid"]): (row["adsorbate"], row["catalyst"]) for row in csv.DictReader(file)
        }
    return {
        split: [
            System(record, *named[record.sid])
            for record in StructureStore(folder / f"{split}.safetensors")
        ]
        for split in SPLITS
    }


def spread(energies: Iterable[float]) -> tuple[str, str]:
    """Mean ± sd and range, eV."""
    e = list(energies)
    return f"{statistics.mean(e):.2f} ± {statistics.pstdev(e):.2f}", f"{min(e):.2f} to {max(e):.2f}"


def split_table(systems: Systems, median: float) -> str:
    """A line for each split."""
    lines = []
    for split, own in systems.items():
        sizes = [one.record.natoms for one in own]
        error = statistics.mean(abs(one.energy - median) for one in own)
        atoms = f"{statistics.mean(sizes):.1f} ({min(sizes)} to {max(sizes)})"
        lines.append([split, len(own), atoms, *spread(x.energy for x in own), f"{error:.3f}"])
    head = ("split", "systems", "atoms", "y_relaxed, mean ± sd, eV", "range, eV", "median MAE, eV")
    return markdown(head, lines)


def adsorbate_table(systems: Systems) -> str:
    """A line for each adsorbate, those that training does not have last."""
    groups: dict[str, list[float]] = {}
    known = {one.adsorbate for one in systems["train"]}
    for one in (one for own in systems.values() for one in own):
        groups.setdefault(one.adsorbate, []).append(one.energy)
    lines = [
        [name + " (held out)" * (name not in known), len(own), *spread(own)]
        for name, own in sorted(groups.items(), key=lambda item: (item[0] not in known, item[0]))
    ]
    return markdown(("adsorbate", "systems", "y_relaxed, mean ± sd, eV", "range, eV"), lines)


def by_adsorbate(systems: Systems) -> float:
    """MAE on val_id of the training median of each adsorbate, eV."""
    own: dict[str, list[float]] = {}
    for one in systems["train"]:
        own.setdefault(one.adsorbate, []).append(one.energy)
    medians = {name: statistics.median(energies) for name, energies in own.items()}
    return statistics.mean(abs(x.energy - medians[x.adsorbate]) for x in systems["val_id"])


def listed(systems: Systems, what: str) -> tuple[str, str]:
    """Names that training has, and those that only the others have."""
    names = {split: {getattr(one, what) for one in own} for split, own in systems.items()}
    new = set().union(*names.values()) - names["train"]
    return ", ".join(sorted(names["train"])), ", ".join(sorted(new))


def files_table(folder: Path) -> str:
    """Size and checksum of each store."""
    stores = [folder / f"{split}.safetensors" for split in SPLITS]
    rows = [(one.name, one.read_bytes()) for one in stores]
    lines = [
        [f"`{name}`", f"{len(data):,}", f"`{hashlib.sha256(data).hexdigest()}`"]
        for name, data in rows
    ]
    return markdown(("file", "bytes", "sha256"), lines)


def facts(folder: Path) -> dict[str, object]:
    """Values for the placeholders of the card."""
    made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    systems = read(folder)
    everything = [one for own in systems.values() for one in own]
    median = statistics.median(one.energy for one in systems["train"])
    moved = np.array([one.moved for one in everything])
    refused = {
        reason: sum(counts[reason] for counts in made["rejected"].values())
        for reason in made["rejected"]["train"]
    }
    kind = made["calculator"]
    adsorbates, new_adsorbates = listed(systems, "adsorbate")
    catalysts, new_catalysts = listed(systems, "catalyst")
    return {
        "title": TITLES[kind],
        "labels": LABELS[kind],
        "count": f"{len(everything):,}",
        "folder": folder.as_posix(),
        "options": f"--calculator {kind} --train {made['train']} --val {made['val']}",
        "versions": made["potential"].partition("(")[2].rstrip(")"),
        "elements": ", ".join(f"{name} {e:.4f}" for name, e in made["references_eV"].items()),
        "median": f"{median:.3f}",
        "by_adsorbate": f"{by_adsorbate(systems):.3f}",
        "splits": split_table(systems, median),
        "adsorbates": adsorbates,
        "new_adsorbates": new_adsorbates,
        "catalysts": catalysts,
        "new_catalysts": new_catalysts,
        "moved": f"{np.median(moved):.2f}",
        "most_moved": f"{np.quantile(moved, 0.95):.2f}",
        "farthest": f"{moved.max():.2f}",
        "by_name": adsorbate_table(systems),
        "refused": ", ".join(f"{name} {count}" for name, count in refused.items() if count),
        "files": files_table(folder),
    }


def main(words: list[str] | None = None) -> None:
    """Prints the card."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the data set")
    print(CARD.format_map(facts(parser.parse_args(words).folder)), end="")


if __name__ == "__main__":
    main()
