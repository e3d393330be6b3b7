"""``molflt data make-emt``: adsorption energies from EMT relaxations, in the OC20 IS2RE schema.

What a system is and which draws are refused: :mod:`molflt.data.structures.emt_systems`. This module
runs many of them, over several processes, so that an interruption costs at most one part of 25
systems.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from molflt.data.structures.emt_systems import (
    _SIDS_PER_SPLIT,
    _SPLITS,
    _relax_system,
    _System,
)
from molflt.data.structures.records import make_record
from molflt.data.structures.store import StructureStore, write_store
from molflt.files import write_atomically

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["make_emt"]

# Raise when the same seed would give other systems: an interrupted run must not mix the two.
_GENERATOR_VERSION = 3
_SETTINGS = "emt.json"
_PARTS = ".parts"
_SYSTEMS_PER_PART = 25
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _Part(NamedTuple):
    """Systems ``first`` to ``last - 1`` of a split, kept in one file until the split is whole."""

    split: str
    first: int
    last: int

    def path(self, directory: Path) -> Path:
        return directory / _PARTS / f"{self.split}-{self.first:07d}.safetensors"


def make_emt(
    directory: Path, train: int = 2000, val: int = 250, seed: int = 0, workers: int = 2
) -> None:
    """Make a data set of real relaxations with ASE's EMT potential, in the OC20 schema.

    Slabs of Ag, Al, Au, Cu, Ni, Pd, Pt and their binary alloys with one adsorbate each; energies
    are against the relaxed clean slab and the relaxed gas-phase adsorbate. The validation splits
    are those of OC20: val_id, and val_ood_ads, val_ood_cat, val_ood_both with adsorbates,
    metals or both that train does not have. About 4 systems a second per worker. The same seed
    gives the same systems for any number of workers; when interrupted, the same command continues.

    Args:
        directory: folder for train.safetensors, val_id.safetensors, ... and emt.json.
        train: number of training systems.
        val: number of systems in each of the four validation splits.
        seed: seed of every random draw, 0 or larger.
        workers: number of processes.

    Raises:
        ValueError: a number is out of range, or the folder holds data of other settings.
        OSError: the folder cannot be written.
    """
    for name, value, least in (
        ("train", train, 1),
        ("val", val, 1),
        ("seed", seed, 0),
        ("workers", workers, 1),
    ):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}; got {value}")
    if max(train, val) > _SIDS_PER_SPLIT:
        raise ValueError(f"at most {_SIDS_PER_SPLIT} systems a split; got {max(train, val)}")
    directory = Path(directory)
    settings = {"generator": _GENERATOR_VERSION, "seed": seed, "train": train, "val": val}
    _claim(directory, settings)
    splits = [s for s in _SPLITS if not _store_path(directory, s).exists()]
    parts = {split: _parts(split, train if split == "train" else val) for split in splits}
    try:
        _relax_parts(directory, [p for group in parts.values() for p in group], seed, workers)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command continues from what is in {directory / _PARTS}")
        raise
    for split in splits:
        _join_parts(directory, split, parts[split], settings)
    shutil.rmtree(directory / _PARTS, ignore_errors=True)
    _print_summary(directory)


def _store_path(directory: Path, split: str) -> Path:
    return directory / f"{split}.safetensors"


def _parts(split: str, count: int) -> list[_Part]:
    return [
        _Part(split, first, min(first + _SYSTEMS_PER_PART, count))
        for first in range(0, count, _SYSTEMS_PER_PART)
    ]


def _claim(directory: Path, settings: dict[str, int]) -> None:
    """Note the settings in the folder; refuse a folder that holds something else."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _SETTINGS
    if not path.exists():
        for split in _SPLITS:
            if _store_path(directory, split).exists():
                raise ValueError(
                    f"{_store_path(directory, split)}: already there, and not from make-emt "
                    f"(no {_SETTINGS} beside it); choose another folder"
                )
        write_atomically(path, (json.dumps(settings, indent=1) + "\n").encode())
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        before = {name: found.get(name) for name in settings}
    except (ValueError, AttributeError):
        raise ValueError(
            f"{path}: not the settings of a make-emt run; got {path.read_bytes()[:40]!r}; "
            "delete the file, or choose another folder"
        ) from None
    if before != settings:
        words = ", ".join(
            f"{name} {before[name]} (now {settings[name]})"
            for name in settings
            if before[name] != settings[name]
        )
        raise ValueError(
            f"{directory}: begun with other settings: {words}; repeat those, or choose another "
            "folder"
        )


def _relax_parts(directory: Path, parts: list[_Part], seed: int, workers: int) -> None:
    """Relax the systems of every part that has no sound file yet."""
    missing = [part for part in parts if not _is_whole(part, directory)]
    total = sum(part.last - part.first for part in parts)
    tasks = [(seed, part.split, i) for part in missing for i in range(part.first, part.last)]
    if not tasks:
        return
    with (
        contextlib.closing(_relax_all(tasks, workers)) as systems,
        tqdm(total=total, initial=total - len(tasks), unit=" systems", smoothing=0.05) as bar,
    ):
        for part in missing:
            bar.set_description(part.split)
            done = []
            for _ in range(part.first, part.last):
                done.append(next(systems))
                bar.update()
            rejected: Counter[str] = Counter()
            for system in done:
                rejected.update(system.rejected)
            write_store(
                part.path(directory),
                (make_record(**system.fields) for system in done),
                source=json.dumps(rejected),
            )


def _is_whole(part: _Part, directory: Path) -> bool:
    try:
        return len(StructureStore(part.path(directory))) == part.last - part.first
    except (FileNotFoundError, ValueError):  # a damaged part is made again
        return False


def _relax_one(task: tuple[int, str, int]) -> _System:
    return _relax_system(*task)


def _relax_all(tasks: list[tuple[int, str, int]], workers: int) -> Generator[_System, None, None]:
    """Systems in the order of ``tasks``, whoever finishes first.

    One worker is a process of its own as well: with more threads the last bits would differ.
    """
    with _one_thread_each():
        pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        try:
            yield from pool.map(_relax_one, tasks)
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process ended early: out of memory, killed, or make_emt was called by a "
                "script without `if __name__ == '__main__':`; the same command continues"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Workers inherit these variables: their array libraries must not start threads as well."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and end when the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _join_parts(directory: Path, split: str, parts: list[_Part], settings: dict[str, int]) -> None:
    """Write the split's store from its parts, and the refused draws into the settings file."""
    rejected: Counter[str] = Counter()

    def records() -> Iterator[Data]:
        for part in parts:
            store = StructureStore(part.path(directory))
            rejected.update(json.loads(store.source))
            yield from (store[i] for i in range(len(store)))

    source = f"ASE EMT relaxations: molflt data make-emt, split {split}, " + ", ".join(
        f"{name} {value}" for name, value in settings.items()
    )
    write_store(_store_path(directory, split), records(), source=source)
    path = directory / _SETTINGS
    found = json.loads(path.read_text(encoding="utf-8"))
    found.setdefault("rejected", {})[split] = rejected
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())


def _print_summary(directory: Path) -> None:
    print(f"{'split':<14}{'systems':>8}{'atoms':>7}{'mean eV':>9}{'sd eV':>7}{'median MAE eV':>15}")
    median = None
    for split in _SPLITS:
        store = StructureStore(_store_path(directory, split))
        energies = store.y_relaxed
        median = float(np.median(energies)) if median is None else median
        error = np.abs(energies - median).mean()
        print(
            f"{split:<14}{len(store):>8}{store.natoms.mean():>7.1f}{energies.mean():>9.3f}"
            f"{energies.std():>7.3f}{error:>15.3f}"
        )
    print(f"median MAE: the error of predicting train's median, {median:.3f} eV, for every system")
