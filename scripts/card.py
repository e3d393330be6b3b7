"""Print the card of a data set made by `scripts/make_data.py`.

python scripts/card.py datasets/chgnet-sample > datasets/chgnet-sample/README.md
"""

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from kit.rows import Rows, markdown, names, pick, read_csv
from kit.words import described

from molflt.atoms import Tag
from molflt.data.structures.splits import VAL_SPLITS
from molflt.data.structures.store import StructureStore

SPLITS = ("train", *VAL_SPLITS)
CHGNET = """**The labels are CHGNet energies, not DFT.** CHGNet (Deng et al., Nat. Mach. Intell. 5,
1031, 2023) is a potential learned from DFT of bulk crystals, to which surfaces are new:
trends are chemistry, numbers are not."""
EMT = "**The labels are energies of ASE's EMT, not DFT**, whose parameters are rough."
LABELS = {"chgnet": CHGNET, "emt": EMT}
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


def read(folder: Path) -> Rows:
    """A row per system: split, adsorbate, catalyst, atoms, energy, eV, largest displacement, Å."""
    named = {row["sid"]: row for row in read_csv(folder / "systems.csv")}
    rows = []
    for split in SPLITS:
        for record in StructureStore(folder / f"{split}.safetensors"):
            away = (record.pos_relaxed - record.pos)[record.tags == Tag.ADSORBATE]
            numbers = {"energy": float(record.y_relaxed), "moved": float(away.norm(dim=1).max())}
            rows.append({**named[record.sid], **numbers, "split": split, "atoms": record.natoms})
    return rows


def spread(energies: Iterable[float]) -> tuple[str, str]:
    """Mean ± sd and range, eV."""
    e = list(energies)
    return f"{statistics.mean(e):.2f} ± {statistics.pstdev(e):.2f}", f"{min(e):.2f} to {max(e):.2f}"


def split_table(rows: Rows, median: float) -> str:
    """A line for each split."""
    lines = []
    for split in SPLITS:
        own = pick(rows, split=split)
        sizes, energies = ([row[key] for row in own] for key in ("atoms", "energy"))
        error = statistics.mean(abs(energy - median) for energy in energies)
        atoms = f"{statistics.mean(sizes):.1f} ({min(sizes)} to {max(sizes)})"
        lines.append([split, len(own), atoms, *spread(energies), f"{error:.3f}"])
    head = ("split", "systems", "atoms", "y_relaxed, mean ± sd, eV", "range, eV", "median MAE, eV")
    return markdown(head, lines)


def adsorbate_table(rows: Rows, known: list[str]) -> str:
    """A line for each adsorbate; those that training does not have come last."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["adsorbate"]].append(row["energy"])
    lines = [
        [name + " (held out)" * (name not in known), len(own), *spread(own)]
        for name, own in sorted(groups.items(), key=lambda item: (item[0] not in known, item[0]))
    ]
    return markdown(("adsorbate", "systems", "y_relaxed, mean ± sd, eV", "range, eV"), lines)


def by_adsorbate(rows: Rows) -> float:
    """MAE on val_id of the training median of each adsorbate, eV."""
    train, val = (pick(rows, split=split) for split in ("train", "val_id"))
    medians = {
        name: statistics.median(row["energy"] for row in pick(train, adsorbate=name))
        for name in names(train, "adsorbate")
    }
    return statistics.mean(abs(row["energy"] - medians[row["adsorbate"]]) for row in val)


def files_table(folder: Path) -> str:
    """Size and checksum of each store."""
    lines = []
    for split in SPLITS:
        data = (folder / f"{split}.safetensors").read_bytes()
        checksum = hashlib.sha256(data).hexdigest()
        lines.append([f"`{split}.safetensors`", f"{len(data):,}", f"`{checksum}`"])
    return markdown(("file", "bytes", "sha256"), lines)


def facts(folder: Path) -> dict[str, object]:
    """Values of the placeholders of the card."""
    made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    rows, kind = read(folder), made["calculator"]
    train = pick(rows, split="train")
    median = statistics.median(row["energy"] for row in train)
    moved = np.array([row["moved"] for row in rows])
    counts = {
        reason: sum(counts[reason] for counts in made["rejected"].values())
        for reason in made["rejected"]["train"]
    }
    found: dict[str, object] = {}
    for what in ("adsorbate", "catalyst"):
        known = set(names(train, what))
        found[f"{what}s"] = ", ".join(sorted(known))
        found[f"new_{what}s"] = ", ".join(sorted(set(names(rows, what)) - known))
    return found | {
        "title": TITLES[kind],
        "labels": LABELS[kind],
        "count": f"{len(rows):,}",
        "folder": folder.as_posix(),
        "options": f"--calculator {kind} --train {made['train']} --val {made['val']}",
        "versions": made["potential"].partition("(")[2].rstrip(")"),
        "elements": ", ".join(f"{name} {e:.4f}" for name, e in made["references_eV"].items()),
        "median": f"{median:.3f}",
        "by_adsorbate": f"{by_adsorbate(rows):.3f}",
        "splits": split_table(rows, median),
        "moved": f"{np.median(moved):.2f}",
        "most_moved": f"{np.quantile(moved, 0.95):.2f}",
        "farthest": f"{moved.max():.2f}",
        "by_name": adsorbate_table(rows, names(train, "adsorbate")),
        "refused": ", ".join(f"{name} {count}" for name, count in counts.items() if count),
        "files": files_table(folder),
    }


def main(words: list[str] | None = None) -> None:
    """Prints the card."""
    parser = described(__doc__)
    parser.add_argument("folder", type=Path, help="folder of the data set")
    print(CARD.format_map(facts(parser.parse_args(words).folder)), end="")


if __name__ == "__main__":
    main()
