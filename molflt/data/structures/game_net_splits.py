"""Splits of GAME-Net's FG set: held-out metals and molecules, the authors' folds, or by name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from molflt.data.structures.game_net import GameNet
from molflt.data.structures.game_net_archive import _expect_archive
from molflt.data.structures.splits import VAL_SPLITS
from molflt.data.structures.store import write_store
from molflt.data.structures.systems import System, write_systems
from molflt.files import read_arrays, shown

_METALS = ("Cu", "Ir", "Pd")  # held out by default
_EVERY, _FIRST = 5, 2  # of the sorted molecules of a family, the third, eighth, ...
_VAL, _SHARE = 250, 5  # systems of val_id, at most a fifth of those that are not held out
_MOST = 2**24  # bytes of a file of names

_Split = dict[str, list[System]]


def _write_splits(
    src: Path,
    dst: Path,
    sha256: str,
    skip_bad: bool,
    splits: Path | None = None,
    folds: Path | None = None,
    hold_out: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """Writes a folder of stores, or one for each pair of folds; see `convert`.

    Returns:
        (name, reason) of systems that were left out.

    Raises:
        ValueError: for another archive, a system that is not valid, names that do not fit, or a
            folder with splits that the new ones do not replace.
    """
    if sum(map(bool, (splits, folds, hold_out))) > 1:
        raise ValueError("expected at most one of --splits, --folds and --hold_out")
    _expect_archive(src, sha256)
    chosen = _named(splits) if splits else None
    numbers = _folds(folds) if folds else None
    if numbers is None:  # else the pairs are known only with the systems
        _refuse_others(dst, chosen or ("train", *VAL_SPLITS))
    dataset = GameNet(src, skip_bad)
    known = {system.name: system for system in dataset.systems}
    names = {*known, *(name.removeprefix(f"{src}: ") for name, _ in dataset.bad)}
    folders: dict[str, _Split] = {}
    if splits and chosen is not None:
        _refuse_unknown(splits, (name for split in chosen.values() for name in split), names)
        folders[""] = {
            split: [known[name] for name in sorted(members) if name in known]
            for split, members in chosen.items()
        }
    elif folds and numbers is not None:
        _refuse_unknown(folds, numbers, names)
        folders = _pairs_of_folds(folds, dataset.systems, numbers)
    else:
        folders[""] = _held_out(dataset.systems, hold_out)
    for name, parts in folders.items():
        _refuse_others(dst / name, [split for split, systems in parts.items() if systems])
    for name, parts in folders.items():
        _write_folder(dst / name, parts, dataset, src.name)
    return dataset.bad


def _write_folder(folder: Path, parts: _Split, dataset: GameNet, source: str) -> None:
    place = {system.sid: index for index, system in enumerate(dataset.systems)}
    parts = {split: systems for split, systems in parts.items() if systems}
    for split, systems in parts.items():
        records = (dataset[place[system.sid]] for system in systems)
        write_store(folder / f"{split}.safetensors", records, source=f"{source}, split {split}")
    write_systems(folder, parts.items())
    counts = ", ".join(f"{split} {len(systems)}" for split, systems in parts.items())
    print(f"{folder}: {counts} systems")


def _refuse_others(folder: Path, splits: Collection[str]) -> None:
    """Refuses stores that would stay beside those of these splits, whose train may have theirs."""
    others = [path for path in sorted(folder.glob("*.safetensors")) if path.stem not in splits]
    if others:
        raise ValueError(
            f"{others[0]}: of an earlier conversion, whose systems may be in the new train; "
            f"expected none but {', '.join(splits)}; remove it, or choose another folder"
        )


def _held_out(systems: Sequence[System], groups: Sequence[str]) -> _Split:
    """Four validation splits like OC20's.

    Args:
        systems: sorted by name.
        groups: metals and families that train does not have; none: three metals, and every fifth
            molecule of each family.

    Raises:
        ValueError: for a group that there is not, or if nothing is left to train on.
    """
    metals, families = ({s.metal for s in systems}, {s.family for s in systems})
    unknown = [group for group in groups if group not in metals | families]
    if unknown:
        raise ValueError(
            f"--hold_out: expected some of {', '.join(sorted(metals))}, "
            f"{', '.join(sorted(families))}; got {shown(unknown[0])}"
        )
    catalysts = set(groups) & metals if groups else set(_METALS)
    molecules: set[tuple[str, str]] = set()
    for family, members in _molecules(systems).items():
        held = members if family in groups else [] if groups else members[_FIRST::_EVERY]
        molecules |= {(family, molecule) for molecule in held}
    parts: _Split = {split: [] for split in ("train", *VAL_SPLITS)}
    for system in systems:
        new = (system.family, system.molecule) in molecules, system.metal in catalysts
        names = {
            (False, False): "train",
            (True, False): "val_ood_ads",
            (False, True): "val_ood_cat",
        }
        parts[names.get(new, "val_ood_both")].append(system)
    seen = parts["train"]
    count = min(_VAL, len(seen) // _SHARE)
    drawn = set(np.random.default_rng(0).permutation(len(seen))[:count].tolist())
    parts["train"] = [system for i, system in enumerate(seen) if i not in drawn]
    parts["val_id"] = [system for i, system in enumerate(seen) if i in drawn]
    if not parts["train"]:
        raise ValueError("--hold_out: expected systems that are left to train on; got none")
    return parts


def _molecules(systems: Iterable[System]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for system in systems:
        found[system.family].add(system.molecule)
    return {family: sorted(members) for family, members in found.items()}


def _pairs_of_folds(
    path: Path, systems: Sequence[System], numbers: Mapping[str, int]
) -> dict[str, _Split]:
    """The authors' protocol: test on one fold, validate on another, train on the others."""
    missing = [system.name for system in systems if system.name not in numbers]
    if missing:
        raise ValueError(
            f"{path}: expected a fold of each of the {len(systems)} systems; got none of "
            f"{missing[0]} and {len(missing) - 1} more"
        )
    present = sorted({numbers[system.name] for system in systems})
    if not 3 <= len(present) <= 100:
        raise ValueError(f"{path}: expected 3 to 100 folds; got {len(present)}")
    found: dict[str, _Split] = {}
    for test in present:
        for val in present:
            if val != test:
                parts: _Split = {"train": [], "val_id": [], "test_id": []}
                for system in systems:
                    fold = numbers[system.name]
                    split = {test: "test_id", val: "val_id"}.get(fold, "train")
                    parts[split].append(system)
                found[f"test{test}-val{val}"] = parts
    return found


def _refuse_unknown(path: Path, names: Iterable[str], known: Collection[str]) -> None:
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ValueError(
            f"{path}: expected names of systems such as {min(known)}; got {shown(unknown)}, which "
            "the archive does not have"
        )


def _named(path: Path) -> dict[str, list[str]]:
    """Names by split, of a JSON file."""
    found = _json(path)
    seen: set[str] = set()
    for split, names in found.items():
        plain = split.isascii() and split.replace("_", "a").isalnum()
        if not plain or not isinstance(names, list) or not names:
            raise ValueError(
                f"{path}: expected a list of names for each split; got {shown(names)} for "
                f"{shown(split)}"
            )
        for name in names:
            if not isinstance(name, str) or name in seen:
                raise ValueError(f"{path}: expected each name once, as text; got {shown(name)}")
            seen.add(name)
    if "train" not in found:
        raise ValueError(f"{path}: expected a split train; got {shown(list(found))}")
    return found


def _folds(path: Path) -> dict[str, int]:
    """Folds by name, of a JSON file or of arrays name and fold in an npz."""
    if path.suffix == ".npz":
        arrays = read_arrays(path, ("name", "fold"))
        names, folds = arrays["name"], arrays["fold"]
        if names.dtype.kind != "U" or folds.dtype.kind not in "iu" or names.shape != folds.shape:
            raise ValueError(
                f"{path}: expected texts name and whole numbers fold, as many; got "
                f"{names.dtype} {names.shape} and {folds.dtype} {folds.shape}"
            )
        return dict(zip(names.tolist(), folds.tolist(), strict=True))
    found = _json(path)
    for name, fold in found.items():
        if not isinstance(fold, int) or not 0 <= fold < 1000:
            raise ValueError(
                f"{path}: {shown(name)}: expected the number of a fold; got {shown(fold)}"
            )
    return found


def _json(path: Path) -> dict:
    try:
        if (size := path.stat().st_size) > _MOST:
            raise ValueError(f"{size:,} bytes, above {_MOST:,}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON; got what is none ({shown(str(error))})") from None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path}: expected an object of names in JSON; got {shown(found)}")
    return found
