"""Jobs of a comparison and processes that run unfinished jobs."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from kit.runs import digest, expect_same, run_all, run_logged

from molflt.data.structures.sources import VAL_SPLITS
from peers_kit.jobs import Job, config_of
from peers_kit.models import FITS, TRIED, title, variant_words

SCRIPT = Path(__file__).resolve().parents[1] / "peers.py"
TUNING_SEED = 99  # differs from the compared seeds

Jobs = dict[Path, Job]
_digest = cache(digest)


def splits_of(data: Path) -> list[str]:
    """Returns the names of all splits except train, starting with val_id."""
    stems = sorted(path.stem for path in data.glob("*.safetensors"))
    others = [stem for stem in stems if stem.startswith(("val", "test"))]
    if "train" not in stems or not others:
        raise ValueError(f"--data {data}: expected train.safetensors and val_id.safetensors")
    known = [split for split in VAL_SPLITS if split in others]
    return known + [split for split in others if split not in known]


def words_of_job(options: Namespace, model: str) -> list[str]:
    """Returns the options of `molflt train` for a model."""
    return ["--config", str(options.config), *variant_words(model), *options.words]


def job_of(options: Namespace, model: str, seed: int, fraction: float, lr: float | None) -> Job:
    """Returns all settings that affect a result; `lr=None` selects the usual learning rate."""
    words = words_of_job(options, model)
    splits = splits_of(options.data)
    # Both --config FILE and --config=FILE are possible.
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
    """Returns all jobs, keyed by result file; the jobs of the first seed come first."""
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
    """Returns one job per network and learning rate, keyed by network and then by result file.

    These jobs are short and predict only the first split.
    """
    found: dict[str, Jobs] = {}
    for model in options.models:
        name = title(model)
        if name not in FITS:
            usual = config_of(name, words_of_job(options, model))["task"]["lr"]
            found[name] = dict(_trial(options, model, factor * usual) for factor in TRIED)
    return found


def _trial(options: Namespace, model: str, rate: float) -> tuple[Path, Job]:
    lr = float(f"{rate:.2g}")
    short = Namespace(**{**vars(options), "minutes": options.tune_minutes, "evaluations": 1})
    job = job_of(short, model, TUNING_SEED, 1.0, lr)
    file = f"tune_{title(model)}_{short.minutes:g}min_lr{lr:g}.json"
    return options.out / "jobs" / file, job | {"splits": job["splits"][:1]}


def widen(options: Namespace, trials: dict[str, Jobs]) -> bool:
    """Adds a rate for each model whose best learning rate is the largest or smallest so far.

    A model has at most `options.tune_most` rates. Returns True if a rate was added.
    """
    before = sum(map(len, trials.values()))
    for model in options.models:
        jobs = trials.get(title(model), {})
        best, rates = best_rate(jobs), sorted(float(job["lr"] or 0) for job in jobs.values())
        if best is not None and len(rates) < options.tune_most and best in (rates[0], rates[-1]):
            jobs.update([_trial(options, model, 3 * best if best == rates[-1] else best / 3)])
    return sum(map(len, trials.values())) > before


def best_rate(jobs: Jobs) -> float | None:
    """Returns the learning rate with the smallest error, or None if all jobs diverged or failed."""
    errors = {}
    for path, job in jobs.items():
        error = read(path)["splits"][job["splits"][0]]["mae_eV"] if path.exists() else None
        if error is not None:
            errors[job["lr"]] = error
    return min(errors, key=errors.__getitem__) if errors else None


def read(path: Path) -> dict[str, Any]:
    """Reads the result of a job."""
    return json.loads(path.read_text())


def run(jobs: Jobs, workers: int) -> bool:
    """Runs all jobs without a result; returns True if all jobs succeed."""
    for path, job in jobs.items():
        if path.exists():
            expect_same(path, read(path)["job"], job)
    missing = [partial(_work, path, job) for path, job in jobs.items() if not path.exists()]
    return run_all(missing, workers)


def _work(path: Path, job: Job) -> None:
    """Runs a job in a process with one thread."""
    log = path.parents[1] / "logs" / f"{path.stem}.txt"
    for folder in (path.parent, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    run_logged([sys.executable, str(SCRIPT), "--job", str(path)], log, 1, json.dumps(job))
