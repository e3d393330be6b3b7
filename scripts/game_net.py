"""Convert the archive of GAME-Net's FG data set to a compact store for each split.

    molflt data download game-net datasets/game-net
    python scripts/game_net.py datasets/game-net/FG_dataset_lite.tar.xz datasets/game-net/fg

The data are PBE + D2 relaxations of organic molecules on 14 metals (Pablo-Garcia et al., Nat.
Comput. Sci. 3, 433, 2023). The archive contains the initial and relaxed structures of each system,
and tables of total energies. The stores contain adsorption energies in eV: the total energy minus
the energies of the relaxed clean surface and the relaxed molecule. Tags are 0 for fixed metal
atoms, 1 for free metal atoms and 2 for adsorbates. The sid of a system is its index in the sorted
list of names, which is stored in systems.csv.

By default, train excludes the metals Cu, Ir and Pd and every fifth molecule of each family. The
systems with these metals and molecules are in val_ood_ads (new molecule), val_ood_cat (new metal)
and val_ood_both. val_id is drawn from the other systems.
"""

import io
import itertools
import json
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from ase.data import atomic_numbers
from ase.io.vasp import read_vasp_configuration
from kit.systems import System, write_systems
from kit.words import described, guarded
from torch_geometric.data import Data
from tqdm import tqdm

from molflt.atoms import Tag
from molflt.data.structures.ase_fields import fixed_atoms
from molflt.data.structures.records import make_record
from molflt.data.structures.sources import VAL_SPLITS
from molflt.data.structures.store import write_store

RELAXED, INITIAL, FAMILIES = "energies.dat", "energies_i.dat", "groups.dat"
START, END = ".poscar", ".contcar"
NAME = re.compile(r"([a-z]{2})-(\w{1,16})-([a-z]{1,4})", re.ASCII)  # metal, molecule, placement
METALS = ("Cu", "Ir", "Pd")  # held out by default
EVERY, FIRST = 5, 2  # the third, eighth, ... molecule of each sorted family
VAL, SHARE = 250, 5  # val_id contains 250 systems, but at most a fifth of those not held out

Split = dict[str, list[System]]
Tables = Mapping[str, dict[str, str]]


def read(path: Path) -> tuple[list[System], list[Data]]:
    """Returns the systems of the archive, sorted by name, and their structures.

    If a table contains a name twice, the last row is used, as in the authors' models.
    """
    files = _texts(path)
    tables: Tables = {
        name: dict(line.split() for line in files[name].splitlines())
        for name in (RELAXED, INITIAL, FAMILIES)
    }
    stems = {PurePosixPath(name).stem for name in files if name not in tables}
    systems: list[System] = []
    for name in sorted(stems | tables[FAMILIES].keys()):
        if match := NAME.fullmatch(name):
            family, metal = tables[FAMILIES].get(name, ""), match[1].capitalize()
            systems.append(System(len(systems), name, match[2], family, metal))
    bar = tqdm(systems, desc=path.name, unit=" systems", disable=None)
    return systems, [_record(system, files, tables) for system in bar]


def _texts(path: Path) -> dict[str, str]:
    """Returns the contents of all files in the archive."""
    found = {}
    with tarfile.open(path, "r:xz") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                found[str(PurePosixPath(member.name))] = file.read().decode("ascii", "replace")
    return found


def _record(system: System, files: Mapping[str, str], tables: Tables) -> Data:
    """Returns the record of a system, with energies relative to the surface and the molecule."""
    path = f"{system.family}/structures/{system.name}"
    start, end = (read_vasp_configuration(io.StringIO(files[path + kind])) for kind in (START, END))
    slab = float(tables[RELAXED][f"{system.metal.lower()}-0000"])
    molecule = float(tables[RELAXED][system.molecule])
    metal, fixed = start.numbers == atomic_numbers[system.metal], fixed_atoms(start)
    return make_record(
        pos=start.positions,
        atomic_numbers=start.numbers,
        cell=start.cell.array,
        pbc=start.pbc,
        tags=np.where(metal, np.where(fixed, Tag.SUBSURFACE, Tag.SURFACE), Tag.ADSORBATE),
        fixed=fixed,
        sid=system.sid,
        y_init=float(tables[INITIAL][system.name]) - slab - molecule,
        y_relaxed=float(tables[RELAXED][system.name]) - slab - molecule,
        pos_relaxed=end.positions,
    )


def held_out(systems: Sequence[System], groups: Sequence[str] = ()) -> Split:
    """Returns train and four validation splits, which have the same names as in OC20.

    `groups` are the metals and families that train excludes; the default is three metals and every
    fifth molecule of each family.
    """
    metals, families = ({s.metal for s in systems}, {s.family for s in systems})
    unknown = sorted(set(groups) - metals - families)
    if unknown:
        known = ", ".join([*sorted(metals), *sorted(families)])
        raise ValueError(f"--hold-out: expected one or more of {known}; got {unknown[0]}")
    catalysts = set(groups) & metals if groups else set(METALS)
    molecules: set[tuple[str, str]] = set()
    for family in families:
        members = sorted({system.molecule for system in systems if system.family == family})
        held = members if family in groups else [] if groups else members[FIRST::EVERY]
        molecules |= {(family, molecule) for molecule in held}
    parts: Split = {split: [] for split in ("train", *VAL_SPLITS)}
    names = {(False, False): "train", (True, False): "val_ood_ads", (False, True): "val_ood_cat"}
    for system in systems:
        new = (system.family, system.molecule) in molecules, system.metal in catalysts
        parts[names.get(new, "val_ood_both")].append(system)
    seen = parts["train"]
    count = min(VAL, len(seen) // SHARE)
    drawn = set(np.random.default_rng(0).permutation(len(seen))[:count].tolist())
    parts["train"] = [system for i, system in enumerate(seen) if i not in drawn]
    parts["val_id"] = [system for i, system in enumerate(seen) if i in drawn]
    return parts


def pairs_of_folds(path: Path, systems: Sequence[System]) -> dict[str, Split]:
    """Returns the splits for each ordered pair of a test fold and a validation fold.

    As in the authors' protocol, the remaining folds are used for training. The file is a JSON file
    with the fold of each name, or an npz file with the arrays name and fold.
    """
    if path.suffix == ".npz":
        arrays = np.load(path, allow_pickle=False)
        numbers = dict(zip(arrays["name"].tolist(), arrays["fold"].tolist(), strict=True))
    else:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    _refuse_unknown(path, numbers, systems)
    missing = [system.name for system in systems if system.name not in numbers]
    if missing:
        raise ValueError(f"{path}: expected a fold for each system; got none for {missing[0]}")
    present = sorted({numbers[system.name] for system in systems})
    found: dict[str, Split] = {}
    for test, val in itertools.permutations(present, 2):
        parts: Split = {"train": [], "val_id": [], "test_id": []}
        for system in systems:
            split = {test: "test_id", val: "val_id"}.get(numbers[system.name], "train")
            parts[split].append(system)
        found[f"test{test}-val{val}"] = parts
    return found


def named(path: Path, systems: Sequence[System]) -> Split:
    """Reads the system names of each split from a JSON file and returns the splits."""
    chosen: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    names = [name for split in chosen.values() for name in split]
    _refuse_unknown(path, names, systems)
    if "train" not in chosen or len(set(names)) < len(names):
        raise ValueError(f"{path}: expected a split train, and each name once")
    known = {system.name: system for system in systems}
    return {split: [known[name] for name in sorted(own)] for split, own in chosen.items()}


def _refuse_unknown(path: Path, names: Iterable[str], systems: Iterable[System]) -> None:
    unknown = sorted(set(names) - {system.name for system in systems})
    if unknown:
        raise ValueError(f"{path}: expected names of systems; got {unknown[0]}")


def convert(
    archive: Path,
    folder: Path,
    splits: Path | None = None,
    folds: Path | None = None,
    hold_out: Sequence[str] = (),
) -> None:
    """Writes a store for each split to `folder`, or to a subfolder for each pair of folds."""
    systems, records = read(archive)
    if folds:
        parts = {folder / name: split for name, split in pairs_of_folds(folds, systems).items()}
    else:
        parts = {folder: named(splits, systems) if splits else held_out(systems, hold_out)}
    parts = {path: {name: own for name, own in s.items() if own} for path, s in parts.items()}
    for path, split in parts.items():
        others = [old for old in sorted(path.glob("*.safetensors")) if old.stem not in split]
        if others:  # its systems may be in the new training set
            raise ValueError(f"{others[0]}: left by an earlier conversion; remove it first")
    for path, split in parts.items():
        for name, own in split.items():
            chosen = (records[system.sid] for system in own)
            source = f"{archive.name}, split {name}"
            write_store(path / f"{name}.safetensors", chosen, source=source)
        write_systems(path, split.items())
        counts = ", ".join(f"{name} {len(own)}" for name, own in split.items())
        print(f"{path}: {counts} systems")


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("archive", type=Path, help="FG_dataset_lite.tar.xz")
    parser.add_argument("folder", type=Path, help="folder to which the stores are written")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--splits", type=Path, help="JSON file: names of systems by split")
    folds = "JSON or npz file with the fold of each name; writes a folder testI-valJ per pair"
    way.add_argument("--folds", type=Path, help=folds)
    held = "metals and families that are excluded from train"
    way.add_argument("--hold-out", nargs="+", default=[], help=held)
    convert(**vars(parser.parse_args(words)))


if __name__ == "__main__":
    raise SystemExit(main())
