"""Options, folders, processes and predictions of training runs."""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from tqdm import tqdm

from kit.rows import Rows
from kit.systems import SYSTEMS, read_systems
from molflt.evaluation.results import RESULTS, own_results, read_rows
from molflt.files import write_atomically
from molflt.metrics import EWT_THRESHOLD
from molflt.training.config import read_config
from molflt.training.run_folder import read_provenance

Job = dict[str, Any]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def digest(path: Path) -> str:
    """Returns the SHA-256 digest of a file, or of the LMDBs in a folder."""
    if path.is_dir():
        each = "".join(map(digest, sorted(path.glob("*.lmdb"))))
        return hashlib.sha256(each.encode()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def on_data(job: Job, folder: Path) -> Job:
    """Returns the job with `folder` as the data root and with digests of the folder's files."""
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob(SYSTEMS)])
    stores = {path.as_posix(): digest(path) for path in paths}
    return job | {"words": [*job["words"], f"--data.root={folder}"], "stores": stores}


def expect_same(place: Path, was: Job, job: Job) -> None:
    """Raises ValueError if `job` differs in a key of `was`, the job that made `place`."""
    if other := [key for key in was if was[key] != job.get(key)]:
        raise ValueError(f"{place}: made with different {', '.join(other)}; choose another folder")


def prepare(run: Path, job: Job) -> None:
    """Writes the job to a new folder, or checks that an existing folder belongs to it."""
    note = run / "job.json"
    if note.exists():
        expect_same(run, json.loads(note.read_text()), job)
    else:
        write_atomically(note, (json.dumps(job, indent=1) + "\n").encode())


def run_logged(command: Sequence[str], log: Path, threads: int, text: str = "") -> None:
    """Runs a process; if the process fails, raises RuntimeError with the last line of its log."""
    environment = os.environ | dict.fromkeys(THREADS, str(threads))
    with open(log, "a") as file:
        done = subprocess.run(
            command, input=text, text=True, env=environment, stdout=file, stderr=file, check=False
        )
    if done.returncode != 0:
        last = " ".join(log.read_text().strip().splitlines()[-1:])
        raise RuntimeError(f"{log}: exited with {done.returncode}: {last}")


def run_all(works: Collection[Callable[[], object]], at_once: int) -> bool:
    """Calls functions in threads and prints their errors; returns True if all calls succeed."""
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


def words_of(variant: str) -> list[str]:
    """Returns the options of a variant FILE.yaml[,key=value ...]."""
    path, *changes = variant.split(",")
    return ["--config", path, *(f"--{change}" for change in changes)]


def name_of(variant: str) -> str:
    """Returns the name of a variant, such as flt,dropout=0.1 for lm/flt.yaml,model.dropout=0.1."""
    path, *changes = variant.split(",")
    parts = (change.partition("=") for change in changes)
    own = [f"{key.rpartition('.')[2]}{equals}{value}" for key, equals, value in parts]
    return ",".join([Path(path).stem, *own])


def job_of(options: argparse.Namespace, variant: str, seed: int) -> Job:
    """Returns the description of a run, which is stored in its folder."""
    words = words_of(variant)
    files = [options.config, *(Path(word) for word in words if word.endswith(".yaml"))]
    own = {"variant": name_of(variant), "seed": str(seed)}
    more = [re.sub(r"\{(variant|seed)\}", lambda it: own[it[1]], word) for word in options.words]
    given = (Path(word.rpartition("=")[2]) for word in more if word.endswith(".yaml"))
    files += [path for path in given if path.is_file()]
    return {
        "config": str(options.config),
        "sha256": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
        "words": [*words, f"--seed={seed}", *more],
    }


def finished(run: Path) -> bool:
    """Returns True if results.json belongs to the data of the run and training has ended.

    The results of a run without weights, such as an unpacked archive, are accepted.
    """
    last = run / "checkpoints" / "last.safetensors"
    if not (run / RESULTS).exists() or own_results(run, [])[1]:
        return False
    if not last.exists():
        return True
    with safe_open(last, "pt") as file:
        header = file.metadata() or {}
    steps = read_config(run)["trainer"]["max_steps"]
    return "stopped" in header or int(header.get("step", steps)) >= steps


def work(run: Path, job: Job, threads: int, evaluation: tuple[str, ...] = ()) -> None:
    """Trains or resumes a run and evaluates it with the options `evaluation`."""
    if finished(run):
        return
    train = ["train", "--config", job["config"], "--run", str(run), *job["words"]]
    if (run / "checkpoints" / "last.ckpt").exists():
        train = ["train", "--resume", str(run)]
    else:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # the folder contains no checkpoint
    evaluate = ["evaluate", str(run), *evaluation]
    # A run that was stopped early cannot be resumed.
    for words in (evaluate,) if read_provenance(run).get("stopped") else (train, evaluate):
        run_logged([sys.executable, "-m", "molflt", *words], run / "log.txt", threads)


def work_all(
    jobs: dict[Path, Job], options: argparse.Namespace, evaluation: tuple[str, ...] = ()
) -> int:
    """Trains and evaluates all runs, several at a time; returns 1 if a run failed."""
    for run, job in jobs.items():
        prepare(run, job)
    works = [partial(work, run, job, options.threads, evaluation) for run, job in jobs.items()]
    return int(not run_all(works, options.jobs))


def collect(out: Path, kind: str, among: list[str], seeds: list[int]) -> Rows:
    """Returns one row per finished run and split, with the run's name under the key `kind`."""
    rows = []
    for name in among:
        for seed in seeds:
            path = out / name / f"seed{seed}" / RESULTS
            for split, result in json.loads(path.read_text()).items() if path.exists() else ():
                rows.append({kind: name, "seed": seed, "split": split, **result})
    return rows


def read_energies(run: Path, split: str) -> dict[int, tuple[float, float]]:
    """Returns (predicted energy, label) in eV for each sid; missing labels are NaN."""
    rows = [row for row in read_rows(run / "predictions.csv") if row["split"] == split]
    found = ((row["sid"], row["energy_eV"], row["target_eV"] or "nan") for row in rows)
    return {int(sid): (float(energy), float(target)) for sid, energy, target in found}


def system_rows(folder: Path, energies: Mapping[int, tuple[float, float]], **labels: Any) -> Rows:
    """Returns one row per system with `labels`, the system's names, and energies in eV."""
    systems = read_systems(folder)
    return [
        {**labels, **systems[sid]._asdict(), "energy_eV": energy, "target_eV": target}
        for sid, (energy, target) in energies.items()
    ]


def errors_of_mean(runs: Sequence[Path], split: str) -> tuple[float, float] | None:
    """Returns the MAE (eV) and EwT (%) of energies averaged over runs; None without labels."""
    found = [read_energies(run, split) for run in runs]
    systems = sorted(sid for sid, (_, target) in found[0].items() if math.isfinite(target))
    if not systems:
        return None
    energy = np.array([[own[sid][0] for sid in systems] for own in found]).mean(axis=0)
    error = np.abs(energy - [found[0][sid][1] for sid in systems])
    return float(error.mean()), float(100 * (error < EWT_THRESHOLD).mean())


def publish(path: Path, text: str) -> None:
    """Writes a text to a file and prints it."""
    write_atomically(path, f"{text}\n".encode())
    print(text)
