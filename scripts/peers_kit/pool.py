"""List of jobs; runs unfinished ones in separate processes."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from kit.runs import digest, expect_same, run_all, run_logged

from molflt.data.structures.splits import VAL_SPLITS
from peers_kit.jobs import Job, config_of
from peers_kit.models import FITS, TRIED, title, variant_words

SCRIPT = Path(__file__).resolve().parents[1] / "peers.py"
TUNING_SEED = 99  # of no training that is compared

Jobs = dict[Path, Job]
_digest = cache(digest)


def splits_of(data: Path) -> list[str]:
    """Names of the splits beside train, val_id first."""
    stems = sorted(path.stem for path in data.glob("*.safetensors"))
    others = [stem for stem in stems if stem.startswith(("val", "test"))]
    if "train" not in stems or not others:
        raise ValueError(
            f"--data {data}: expected train.safetensors and val_id.safetensors, as molflt data "
            f"convert writes them; got {', '.join(stems) or 'none'}"
        )
    known = [split for split in VAL_SPLITS if split in others]
    return known + [split for split in others if split not in known]


def job_of(options: Namespace, model: str, seed: int, fraction: float, lr: float | None) -> Job:
    """The job of a model: everything that its result depends on."""
    words = ["--config", str(options.config), *variant_words(model), *options.words]
    splits = splits_of(options.data)
    # --config FILE, or --config=FILE
    named = (word for word in words if word.endswith((".yaml", ".yml")))
    files = [Path(it.partition("=")[2] if it.startswith("--") else it) for it in named]
    files += [options.data / f"{split}.safetensors" for split in ("train", *splits)]
    return {
        "model": title(model),
        "words": words,
        "digests": {path.as_posix(): _digest(path) for path in files},
        "data": str(options.data),
        "splits": splits,
        "seed": seed,
        "minutes": options.minutes,
        "fraction": fraction,
        "lr": lr,
        "evaluations": options.evaluations,
    }


def comparison(options: Namespace, rates: Mapping[str, float | None]) -> Jobs:
    """Jobs by the file of their result; seeds outermost, so that an early stop has all models."""
    folder = options.out / "jobs"
    return {
        folder / f"{title(model)}_{options.minutes:g}min_{fraction:g}_seed{seed}.json": job_of(
            options, model, seed, fraction, rates.get(title(model))
        )
        for seed in range(options.seeds)
        for fraction in options.fractions
        for model in options.models
    }


def tuning(options: Namespace) -> dict[str, Jobs]:
    """Short jobs by model, one per learning rate; only the curve's split is predicted."""
    found: dict[str, Jobs] = {}
    for model in options.models:
        name = title(model)
        if name in FITS:
            continue
        words = ["--config", str(options.config), *variant_words(model), *options.words]
        usual = config_of(name, words)["task"]["lr"]
        found[name] = dict(_trial(options, model, factor * usual) for factor in TRIED)
    return found


def _trial(options: Namespace, model: str, rate: float) -> tuple[Path, Job]:
    lr = float(f"{rate:.2g}")
    short = Namespace(**{**vars(options), "minutes": options.tune_minutes, "evaluations": 1})
    job = job_of(short, model, TUNING_SEED, 1.0, lr)
    file = f"tune_{title(model)}_{short.minutes:g}min_lr{lr:g}.json"
    return options.out / "jobs" / file, job | {"splits": job["splits"][:1]}


def widen(options: Namespace, trials: dict[str, Jobs]) -> bool:
    """Adds a rate beyond the best one where that is the largest or smallest; whether any was."""
    before = sum(map(len, trials.values()))
    for model in options.models:
        jobs = trials.get(title(model), {})
        best, rates = best_rate(jobs), sorted(float(job["lr"] or 0) for job in jobs.values())
        if best is not None and len(rates) < options.tune_most and best in (rates[0], rates[-1]):
            jobs.update([_trial(options, model, 3 * best if best == rates[-1] else best / 3)])
    return sum(map(len, trials.values())) > before


def best_rate(jobs: Jobs) -> float | None:
    """The learning rate with the smallest error; None if none has one."""
    errors = {}
    for path, job in jobs.items():
        error = read(path)["splits"][job["splits"][0]]["mae_eV"] if path.exists() else None
        if error is not None:
            errors[job["lr"]] = error
    return min(errors, key=errors.__getitem__) if errors else None


def read(path: Path) -> dict[str, Any]:
    """The result of a job."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def run(jobs: Jobs, workers: int) -> bool:
    """Runs jobs that have no result; refuses results of others. Returns True if all went well."""
    for path, job in jobs.items():
        if path.exists():
            expect_same(path, read(path)["job"], job)
    missing = [partial(_work, path, job) for path, job in jobs.items() if not path.exists()]
    return run_all(missing, workers)


def _work(path: Path, job: Job) -> None:
    """One job in a process with one thread."""
    log = path.parents[1] / "logs" / f"{path.stem}.txt"
    for folder in (path.parent, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    run_logged([sys.executable, str(SCRIPT), "--job", str(path)], log, 1, json.dumps(job))
