"""Adsorption energies from relaxations with a potential, in the OC20 IS2RE schema.

`making.systems` defines a system and the draws that are refused. This module relaxes many of them
in several processes. Each system is written as soon as it is relaxed: an interruption costs only
those in flight.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from making.calculators import CALCULATORS
from making.files import (
    _Note,
    _note_of,
    _read_frames,
    _read_names,
    _write_names,
)
from making.processes import _in_processes
from making.settings import (
    _SIZES,
    _alone,
    _claim,
    _read_settings,
    _references,
    _store_path,
    _write_settings,
)
from making.systems import _LARGE, _SIDS_PER_SPLIT, _SPLITS, _Plan, _relax_system
from tqdm import tqdm

from molflt.data.shards import Shard
from molflt.data.structures.records import make_record
from molflt.data.structures.store import StructureStore, write_store
from molflt.files import atomically

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["make"]

# Raise when the same seed would give other systems: an interrupted run must not mix the two.
_GENERATOR_VERSION = 5
_NAMES = "systems.csv"
_PARTS = ".parts"
_FRAMES = "frames"


class _Task(NamedTuple):
    """One system to relax, and the folder that it is written to."""

    directory: Path
    plan: _Plan
    split: str
    number: int

    @property
    def part(self) -> Path:
        """A store of this system alone, kept until its split is whole."""
        return self.directory / _PARTS / self.split / f"{self.number:07d}.safetensors"

    def belongs_to(self, shard: Shard | None) -> bool:
        """Returns True if it belongs to that shard; None means all."""
        return shard is None or self.number % shard.total == shard.number - 1

    @property
    def frames(self) -> Path:
        return self.part.with_suffix(".extxyz")


def make(
    directory: Path,
    calculator: Literal["emt", "chgnet"] = "emt",
    train: int = 2000,
    val: int = 250,
    seed: int = 0,
    workers: int = 2,
    frames: bool = False,
    shard: str | None = None,
    large: int = 0,
) -> None:
    """Make a data set of real relaxations with an interatomic potential, in the OC20 schema.

    35 adsorbates of H, C, N and O on slabs of 38 metals and ordered alloys, at most 23 atoms;
    energies are against the relaxed clean slab and OC20's references, gas-phase H2, H2O, CO and
    N2, linear per element. The validation splits are those of OC20: val_id, and val_ood_ads,
    val_ood_cat, val_ood_both with adsorbates, catalysts or both that train does not have. The same
    seed gives the same systems for any number of workers; when interrupted, the same command
    continues, and with a larger train or val it adds to what is there.

    Args:
        directory: folder for train.safetensors, val_id.safetensors, ..., systems.csv, made.json.
        calculator: emt, an empirical potential of seven of the metals, about a system a second; or
            chgnet, a learned potential of all, some seconds a system (pip install molflt[chgnet]).
        train: number of training systems.
        val: number of systems in each of the four validation splits.
        seed: seed of every random draw, 0 or larger.
        workers: number of processes.
        frames: also keep each relaxation step by step, with total energies and forces, in
            DIRECTORY/frames/SPLIT.extxyz.
        shard: I/N, only each N-th system, the I-th first, for as many processes or machines that
            share the folder; when all shards are made, the same command without it joins them.
        large: number of systems in a further split, val_large, for tests at larger sizes: chains
            and rings of three to six carbon atoms, or several small adsorbates, on slabs two to six
            times as large.

    Raises:
        ValueError: a number is out of range, the folder holds data of other settings, or another
            process makes the same in it.
        ModuleNotFoundError: the calculator's package is not installed; says what to install.
        OSError: the folder cannot be written.
    """
    _check_sizes(train, val, seed, workers, large)
    if calculator not in CALCULATORS:
        raise ValueError(f"--calculator must be one of {', '.join(CALCULATORS)}; got {calculator}")
    part = None if shard is None else Shard.of(shard)
    directory = Path(directory)
    settings: dict[str, object] = {
        "generator": _GENERATOR_VERSION,
        "calculator": calculator,
        "potential": CALCULATORS[calculator].describe(),
        "seed": seed,
        "train": train,
        "val": val,
        "frames": frames,
    }
    settings |= {"large": large} if large else {}
    with _alone(directory, part):
        _claim(directory, settings)
        references = _references(directory, calculator)
        plan = _Plan(calculator, seed, tuple(references.items()), frames)
        sizes = dict.fromkeys(_SPLITS, val) | {"train": train, _LARGE: large}
        splits = [split for split in _SPLITS if _made(directory, split) < sizes[split]]
        tasks = {
            split: [_Task(directory, plan, split, i) for i in range(sizes[split])]
            for split in splits
        }
        for split in splits:
            _take_apart(directory, tasks[split], part)
        every = list(itertools.chain(*tasks.values()))
        try:
            _relax_all([task for task in every if task.belongs_to(part)], workers)
        except KeyboardInterrupt:
            print(f"\ninterrupted; the same command continues from what is in {directory / _PARTS}")
            raise
        if part is not None:
            _print_shards(directory, part, every)
            return
        for split in splits:
            _join(directory, tasks[split], settings)
        shutil.rmtree(directory / _PARTS, ignore_errors=True)
        _print_summary(directory)


def _check_sizes(train: int, val: int, seed: int, workers: int, large: int) -> None:
    for name, value, least in (
        ("train", train, 1),
        ("val", val, 1),
        ("seed", seed, 0),
        ("large", large, 0),
        ("workers", workers, 1),
    ):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}; got {value}")
    if max(train, val, large) > _SIDS_PER_SPLIT:
        raise ValueError(f"at most {_SIDS_PER_SPLIT} systems a split; got {max(train, val, large)}")


def _made(directory: Path, split: str) -> int:
    """Systems in the store of a split; 0 if there is none yet."""
    path = _store_path(directory, split)
    return len(StructureStore(path)) if path.exists() else 0


def _relax_all(tasks: list[_Task], workers: int) -> None:
    """Relax the systems that have no sound file yet."""
    missing = [task for task in tasks if not _is_whole(task)]
    if not missing:
        return
    refused: Counter[str] = Counter()
    with (
        contextlib.closing(_in_processes(_relax_one, missing, workers)) as done,
        tqdm(
            total=len(tasks),
            initial=len(tasks) - len(missing),
            unit=" systems",
            smoothing=0.05,
            disable=None,
        ) as bar,
    ):
        for split, rejected in done:
            refused.update(rejected)
            bar.set_postfix({"refused": refused.total()}, refresh=False)
            bar.set_description(split)
            bar.update()


def _is_whole(task: _Task) -> bool:
    try:
        store = StructureStore(task.part)
        store.verify()
        _note_of(store)
        return len(store) == 1
    except (FileNotFoundError, ValueError):  # a damaged part is made again
        return False


def _relax_one(task: _Task) -> tuple[str, dict[str, int]]:
    """Relaxes a system and writes it down, the store last: it says that all is there."""
    from ase.io import write

    system = _relax_system(task.plan, task.split, task.number)
    if task.plan.frames:
        for frame in system.frames:
            frame.info["sid"] = int(system.fields["sid"])
        with atomically(task.frames) as part:
            write(part, system.frames, format="extxyz")
    note = _Note(names=system.names, rejected=system.rejected)
    write_store(task.part, [make_record(**system.fields)], source=json.dumps(note))
    return task.split, system.rejected


def _take_apart(directory: Path, tasks: list[_Task], shard: Shard | None) -> None:
    """Writes the parts that a smaller data set of these settings was joined from.

    Refused draws are known of the split as a whole: its first part has them all.
    """
    from ase.io import write

    split = tasks[0].split
    made = _made(directory, split)
    if not made:
        return
    names = {int(row.pop("sid")): row for row in _read_names(directory / _NAMES)}
    rejected = _read_settings(directory).get("rejected")
    counts = rejected.get(split, {}) if isinstance(rejected, dict) else {}
    path = directory / _FRAMES / f"{split}.extxyz"
    frames = _read_frames(path) if tasks[0].plan.frames else {}
    known_in: dict[Path, tuple[str, Container[int]]] = {directory / _NAMES: ("row", names)}
    known_in |= {path: ("frame", frames)} if tasks[0].plan.frames else {}
    store = StructureStore(_store_path(directory, split))
    store.verify()
    for task, record in zip(tasks[:made], store, strict=True):
        if not task.belongs_to(shard) or _is_whole(task):
            continue
        for beside, (what, known) in known_in.items():
            if record.sid not in known:
                raise ValueError(
                    f"{beside}: no {what} of sid {record.sid}, which {store.path} has; put "
                    "the file back, or choose another folder"
                )
        own = {key: value for key, value in names[record.sid].items() if key != "split"}
        note = _Note(names=own, rejected=counts if task.number == 0 else {})
        task.part.parent.mkdir(parents=True, exist_ok=True)
        if task.plan.frames:
            write(task.frames, frames[record.sid], format="extxyz")
        write_store(task.part, [record], source=json.dumps(note))


def _join(directory: Path, tasks: list[_Task], settings: dict[str, object]) -> None:
    """Write a split's frames, names, refused draws and store from its parts, the store last."""
    split, rejected = tasks[0].split, Counter[str]()
    rows: list[dict[str, str]] = []

    def records() -> Iterator[Data]:
        for task in tasks:
            store = StructureStore(task.part)
            note = _note_of(store)
            rejected.update(note["rejected"])
            rows.append({**note["names"], "sid": str(int(store[0].sid)), "split": split})
            yield store[0]

    made = list(records())
    if tasks[0].plan.frames:
        with atomically(directory / _FRAMES / f"{split}.extxyz") as part, part.open("wb") as file:
            for task in tasks:
                with task.frames.open("rb") as one:
                    shutil.copyfileobj(one, file)
    others = _read_names(path) if (path := directory / _NAMES).exists() else []
    _write_names(path, [*(row for row in others if row["split"] != split), *rows])
    found = _read_settings(directory)
    counts = found.get("rejected")
    found["rejected"] = {**(counts if isinstance(counts, dict) else {}), split: dict(rejected)}
    _write_settings(directory, found)
    kept = (name for name in settings if name not in ("frames", *_SIZES))
    words = ", ".join(f"{name} {settings[name]}" for name in kept)
    write_store(_store_path(directory, split), made, source=f"molflt data make: {split}, {words}")


def _print_shards(directory: Path, made: Shard, tasks: list[_Task]) -> None:
    """Describes missing shards and the next step."""
    missing = Counter(task.number % made.total + 1 for task in tasks if not _is_whole(task))
    if missing:
        words = [f"{number}/{made.total} ({missing[number]} missing)" for number in sorted(missing)]
        print(f"{directory}: shard {made} is made; not yet, or lost: {', '.join(words)}")
    else:
        what = "the same command without --shard joins them"
        print(f"{directory}: all {made.total} shards are made; {what}")


def _print_summary(directory: Path) -> None:
    print(f"{'split':<14}{'systems':>8}{'atoms':>7}{'mean eV':>9}{'sd eV':>7}{'median MAE eV':>15}")
    median = None
    rejected = _read_settings(directory).get("rejected")
    for split in filter(partial(_made, directory), _SPLITS):
        store = StructureStore(_store_path(directory, split))
        energies = store.y_relaxed
        median = float(np.median(energies)) if median is None else median
        error = np.abs(energies - median).mean()
        print(
            f"{split:<14}{len(store):>8}{store.natoms.mean():>7.1f}{energies.mean():>9.3f}"
            f"{energies.std():>7.3f}{error:>15.3f}"
        )
    print(f"median MAE: the error of predicting train's median, {median:.3f} eV, for every system")
    counts: Counter[str] = Counter()
    for one in rejected.values() if isinstance(rejected, dict) else ():
        counts.update(one)
    words = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    print(f"draws refused and drawn again: {words}")
