"""Folders of training runs: their identity, processes and predictions."""

import csv
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kit.rows import Rows
from molflt.data.structures.systems import SYSTEMS, read_systems
from molflt.files import write_atomically
from molflt.metrics import EWT_THRESHOLD

Job = dict[str, Any]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def digest(path: Path) -> str:
    """sha256 of a file, or of the LMDBs in a folder."""
    if path.is_dir():
        each = "".join(map(digest, sorted(path.glob("*.lmdb"))))
        return hashlib.sha256(each.encode()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def on_data(job: Job, folder: Path) -> Job:
    """Adds the stores of a folder and their digests to a job."""
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob(SYSTEMS)])
    stores = {path.as_posix(): digest(path) for path in paths}
    return job | {"words": [*job["words"], f"--data.root={folder}"], "stores": stores}


def expect_same(place: Path, was: Job, job: Job) -> None:
    """Raises ValueError if a result belongs to another job; earlier versions may lack a key."""
    if other := [key for key in was if was[key] != job.get(key)]:
        raise ValueError(f"{place}: made with other {', '.join(other)}; choose another --out")


def prepare(run: Path, job: Job) -> None:
    """Writes the job to a new folder, or checks that the folder belongs to it."""
    note = run / "job.json"
    if note.exists():
        expect_same(run, json.loads(note.read_text()), job)
    else:
        write_atomically(note, (json.dumps(job, indent=1) + "\n").encode())


def run_logged(command: Sequence[str], log: Path, threads: int, text: str = "") -> None:
    """Runs a process with an input; raises RuntimeError with the last line of its log."""
    environment = os.environ | dict.fromkeys(THREADS, str(threads))
    with open(log, "a") as file:
        done = subprocess.run(
            command, input=text, text=True, env=environment, stdout=file, stderr=file, check=False
        )
    if done.returncode != 0:
        last = " ".join(log.read_text().strip().splitlines()[-1:])
        raise RuntimeError(f"{log}: exited with {done.returncode}: {last}")


def run_all(works: Collection[Callable[[], object]], at_once: int) -> bool:
    """Calls functions in threads and prints their errors. Returns True if all succeed."""
    well = True
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(work) for work in works]
        try:
            for done in tqdm(as_completed(waiting), total=len(waiting), unit=" runs"):
                if done.exception() is not None:
                    well = False
                    tqdm.write(str(done.exception()), file=sys.stderr)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return well


def read_energies(run: Path, split: str) -> dict[int, tuple[float, float]]:
    """Predicted energy and label of each system of a split, by sid, eV; NaN without a label."""
    with open(run / "predictions.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    found = ((row["sid"], row["energy_eV"], row["target_eV"] or "nan") for row in rows)
    return {int(sid): (float(energy), float(target)) for sid, energy, target in found}


def system_rows(folder: Path, energies: Mapping[int, tuple[float, float]], **labels: Any) -> Rows:
    """A row per system of a folder of stores: labels, its names, and energies, eV."""
    systems = read_systems(folder)
    return [
        {**labels, **systems[sid]._asdict(), "energy_eV": energy, "target_eV": target}
        for sid, (energy, target) in energies.items()
    ]


def errors_of_mean(runs: Sequence[Path], split: str) -> tuple[float, float] | None:
    """MAE, eV, and EwT, %, of the mean energies of several runs; None without labels."""
    found = [read_energies(run, split) for run in runs]
    systems = sorted(sid for sid, (_, target) in found[0].items() if math.isfinite(target))
    if not systems:
        return None
    energy = np.array([[own[sid][0] for sid in systems] for own in found]).mean(axis=0)
    error = np.abs(energy - [found[0][sid][1] for sid in systems])
    return float(error.mean()), float(100 * (error < EWT_THRESHOLD).mean())


def publish(path: Path, text: str) -> None:
    """Writes a text to a file, and prints it."""
    write_atomically(path, f"{text}\n".encode())
    print(text)
