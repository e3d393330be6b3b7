"""Make a data set of relaxed adsorbates on slabs, in the schema of OC20's IS2RE task.

    python scripts/make_data.py DIR --calculator chgnet --train 5000 --val 500 --workers 2

This script draws and relaxes systems in several processes; see `making/systems.py` for a
description of the systems. After an interruption, the same command continues. `--help` lists the
options.
"""

import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ase.io
from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeInt, PositiveInt
from kit.runs import THREADS, expect_same
from kit.words import guarded
from making.calculators import CALCULATORS, linear_references, molecule_energies
from making.systems import _LARGE, _SPLITS, _Plan, _relax_system
from torch_geometric.data import Data
from tqdm import tqdm

from molflt.data.structures.store import StructureStore, write_store
from molflt.evaluation.results import write_csv
from molflt.files import atomically, csv_rows, write_atomically
from molflt.lock import FolderLock

# Increase this number when the systems change, because runs must not mix versions.
_GENERATOR_VERSION = 5
_SIZES = ("train", "val", "large")
_BUSY = "is making data in this folder; wait until it ends, or choose a different folder"


class _Task(NamedTuple):
    """A system to relax and the file to which it is written."""

    plan: _Plan
    split: str
    number: int
    part: Path


def make(
    directory: Path,
    calculator: Literal["emt", "chgnet"] = "emt",
    train: PositiveInt = 2000,
    val: PositiveInt = 250,
    seed: NonNegativeInt = 0,
    workers: PositiveInt = 2,
    frames: bool = False,
    large: NonNegativeInt = 0,
) -> None:
    """Make a data set of relaxations with an interatomic potential, in the OC20 schema.

    The systems are 35 adsorbates of H, C, N and O on slabs of 38 metals and ordered alloys, with up
    to 23 atoms. Energies are relative to the relaxed clean slab and, as in OC20, to linear
    combinations of the potential's energies of gas-phase H2, H2O, CO and N2. The validation splits
    are the same as in OC20: val_id, val_ood_ads (adsorbates that are not in train), val_ood_cat
    (catalysts that are not in train) and val_ood_both. The same seed results in the same systems
    for any number of workers. After an interruption, the same command continues. A larger `train`
    or `val` adds systems.

    Args:
        directory: folder for train.safetensors, val_id.safetensors, ..., systems.csv and made.json.
        calculator: emt, an empirical potential for seven of the metals (about one system per
            second), or chgnet, a learned potential for all metals (several seconds per system;
            pip install molflt[chgnet]).
        train: number of training systems.
        val: number of systems in each of the four validation splits.
        seed: seed of all random numbers, 0 or larger.
        workers: number of processes.
        frames: also write all relaxation steps, with total energies and forces, to
            DIRECTORY/frames/SPLIT.extxyz.
        large: number of systems in the additional split val_large. Its slabs are two to six times
            as large, and its adsorbates are chains and rings of three to six carbon atoms, or
            several small adsorbates.
    """
    settings = {
        "generator": _GENERATOR_VERSION,
        "calculator": calculator,
        "potential": CALCULATORS[calculator].describe(),
        "seed": seed,
        "frames": frames,
        **{"train": train, "val": val, "large": large},
    }
    directory = Path(directory)
    with FolderLock(directory, _BUSY).held():
        made = _claim(directory, settings)
        if "molecules_eV" not in made:
            made["molecules_eV"] = molecule_energies(calculator)
            made["references_eV"] = linear_references(made["molecules_eV"])
            _write_json(directory / "made.json", made)
        references = made["references_eV"]
        words = ", ".join(f"{element} {energy:.4f}" for element, energy in references.items())
        print(f"references of {calculator}, eV: {words} (from H2, H2O, CO, N2)")
        plan = _Plan(calculator, seed, tuple(references.items()), frames)
        sizes = dict.fromkeys(_SPLITS, val) | {"train": train, _LARGE: large}
        tasks = {
            split: [
                _Task(plan, split, i, directory / ".parts" / split / f"{i:07d}.safetensors")
                for i in range(len(_store(directory, split)), sizes[split])
            ]
            for split in _SPLITS
        }
        _relax_all([task for own in tasks.values() for task in own], workers)
        for split, own in tasks.items():
            if own:
                _join(directory, split, own, made)
        shutil.rmtree(directory / ".parts", ignore_errors=True)
        _print_summary(directory, made)


def _claim(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of made.json; writes this file first if it does not exist.

    Raises ValueError if the folder contains data that were made with different settings.
    """
    path = directory / "made.json"
    if not path.exists():
        if found := sorted(directory.glob("*.safetensors")):
            raise ValueError(f"{found[0]}: exists without {path.name}; choose a different folder")
        _write_json(path, settings)
        return settings
    made = json.loads(path.read_text(encoding="utf-8"))
    was = {name: made.get(name) for name in settings}
    # splits may grow
    was |= {name: max(made.get(name, 0), settings[name]) for name in _SIZES}
    expect_same(directory, was, settings)
    return made | {name: settings[name] for name in _SIZES}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(path, f"{text}\n".encode())


def _store(directory: Path, split: str) -> StructureStore | list[Data]:
    """Returns the systems of a split that were written by previous calls."""
    path = directory / f"{split}.safetensors"
    return StructureStore(path) if path.exists() else []


def _relax_all(tasks: list[_Task], workers: int) -> None:
    """Relaxes the systems that do not have a file yet."""
    missing = [task for task in tasks if not task.part.exists()]
    done = len(tasks) - len(missing)
    with tqdm(total=len(tasks), initial=done, unit=" systems", disable=None) as bar:
        for _ in _in_processes(missing, workers):
            bar.update()


def _in_processes(tasks: list[_Task], workers: int) -> Iterable[None]:
    """Relaxes systems in processes with one thread each.

    Results would otherwise depend on the number of threads, because of rounding.
    """
    os.environ.update(dict.fromkeys(THREADS, "1"))  # inherited by the workers
    ignore_interrupts = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, **ignore_interrupts)
    try:
        for done in as_completed([pool.submit(_relax_one, task) for task in tasks]):
            yield done.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _relax_one(task: _Task) -> None:
    """Relaxes a system and writes its files; the store is written last."""
    system = _relax_system(task.plan, task.split, task.number)
    if task.plan.frames:
        for frame in system.frames:
            frame.info["sid"] = system.record.sid
        with atomically(task.part.with_suffix(".extxyz")) as part:
            ase.io.write(part, system.frames, format="extxyz")
    note = {"names": system.names, "rejected": system.rejected}
    write_store(task.part, [system.record], source=json.dumps(note))


def _join(directory: Path, split: str, tasks: list[_Task], made: dict[str, Any]) -> None:
    """Appends the files of new systems to the files of the split; the store is written last."""
    records = list(_store(directory, split))
    count = len(records)
    rows, rejected = [], Counter(made.setdefault("rejected", {}).get(split, {}))
    for task in tasks:
        part = StructureStore(task.part)
        note = json.loads(part.source)
        rejected.update(note["rejected"])
        records += part
        rows.append({"sid": records[-1].sid, "split": split, **note["names"]})
    if tasks[0].plan.frames:
        path = directory / "frames" / f"{split}.extxyz"
        files = [task.part.with_suffix(".extxyz") for task in tasks]
        # An interrupted call may have appended the new frames already.
        known = path.read_bytes().partition(files[0].read_bytes())[0] if count else b""
        with atomically(path) as whole, whole.open("wb") as file:
            file.write(known)
            for own in files:
                file.write(own.read_bytes())
    path = directory / "systems.csv"
    known = csv_rows(path.read_text(encoding="utf-8")) if path.exists() else []
    new = {row["sid"] for row in rows}
    rows += [row for row in known if int(row["sid"]) not in new]
    write_csv(path, sorted(rows, key=lambda row: int(row["sid"])))
    made["rejected"][split] = dict(rejected)
    _write_json(directory / "made.json", made)
    words = ", ".join(f"{name} {made[name]}" for name in ("calculator", "potential", "seed"))
    source = f"scripts/make_data.py: {split}, {words}"
    write_store(directory / f"{split}.safetensors", records, source=source)


def _print_summary(directory: Path, made: dict[str, Any]) -> None:
    for split in _SPLITS:
        if store := _store(directory, split):
            print(f"{split}: {len(store)} systems, mean energy {store.y_relaxed.mean():.3f} eV")
    counts = sum(map(Counter, made["rejected"].values()), Counter())
    words = ", ".join(f"{reason} {counts[reason]}" for reason in made["rejected"]["train"])
    print(f"rejected draws: {words}")


@guarded
def main(words: list[str] | None = None) -> None:
    auto_cli(make, args=words)


if __name__ == "__main__":
    raise SystemExit(main())
