"""Trains variants of one configuration with several seeds, and compares: mean and sd over seeds.

    python scripts/compare.py --config configs/compare.yaml --out runs/compare --jobs 2
    python scripts/compare.py --config configs/lm/wikitext2.yaml --out runs/lm \\
        --variants configs/lm/performer.yaml configs/lm/flt-local.yaml
    python scripts/compare.py ... -- --trainer.max_steps 600      # more options for every training

Evaluates every run, and writes comparison.md, .csv, .json and .png. Started again, it goes on
where it was stopped and repeats nothing.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from molflt.plots.figure import BLUE, picture
from molflt.train import load_run

SHELLS = ["--model.nodes=shells", "--model.diameter=16", "--model.max_frequency=0.15"]
KERNEL = ["--model.mixing=auto", "--model.placement=multiplicative"]
RECIPROCAL = ["--model.periodic=reciprocal", "--model.max_frequency=0.25"]
NEAR = ["--model.near_field=5"]
MOVING = ["--model.refinements=2", "--model.move_atoms=true"]
VARIANTS = {
    "flt": ["--model.mixing=linear", "--model.position=spectral"],
    "performer": ["--model.mixing=linear", "--model.position=none"],
    "softmax-mask": ["--model.mixing=softmax", "--model.position=spectral"],
    "softmax": ["--model.mixing=softmax", "--model.position=none"],
    "flt-shells": ["--model.mixing=auto", *SHELLS],
    "flt-images": ["--model.mixing=linear", "--model.periodic=images"],
    "flt-reciprocal": ["--model.mixing=auto", *RECIPROCAL],
    "kernel": KERNEL,
    "kernel-shells": [*KERNEL, *SHELLS],
    "kernel-reciprocal": [*KERNEL, *RECIPROCAL],
    "near": [*KERNEL, *SHELLS, *NEAR],
    "near-reciprocal": [*KERNEL, *RECIPROCAL, *NEAR],
    "near-reciprocal-twice": [*KERNEL, *RECIPROCAL, *NEAR, "--model.refinements=2"],
    "near-reciprocal-moving": [*KERNEL, *RECIPROCAL, *NEAR, *MOVING],
    "near-reciprocal-on-the-way": [
        *(*KERNEL, *RECIPROCAL, *NEAR, *MOVING, "--task.interpolate=0.5", "--task.noise=0.02"),
    ],
}
PAPERS = ["flt", "performer", "softmax-mask", "softmax"]
# what is compared, by its name in results.json: heading and digits
MEASURES = {
    "energy_mae": ("MAE, eV", 4),
    "perplexity": ("perplexity", 2),
    "top1_percent": ("top-1, %", 2),
}


def words_of(variant: str) -> list[str]:
    """Options of a variant: a name above, or FILE.yaml[,key=value ...].

    Raises:
        ValueError: if it is neither.
    """
    if variant in VARIANTS:
        return VARIANTS[variant]
    path, *changes = variant.split(",")
    if not path.endswith(".yaml"):
        raise ValueError(
            f"variant {variant!r}; expected a YAML file or one of {', '.join(VARIANTS)}"
        )
    return ["--config", path, *(f"--{change}" for change in changes)]


def name_of(variant: str) -> str:
    """Folder and row of a variant: configs/lm/flt.yaml,model.heads=2 -> flt,heads=2."""
    path, *changes = variant.split(",")
    return ",".join([Path(path).stem, *(change.rpartition(".")[2] for change in changes)])


def job_of(options: argparse.Namespace, variant: str, seed: int) -> dict:
    """What makes a run what it is; kept beside it, so that no other run is taken for it."""
    words = words_of(variant)
    files = [options.config, *(Path(word) for word in words if word.endswith(".yaml"))]
    return {
        "config": str(options.config),
        "sha256": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
        "words": [*words, f"--seed={seed}", *options.words],
    }


def prepare(run: Path, job: dict) -> None:
    """Notes the job in a new folder, or checks that the folder belongs to it.

    Raises:
        ValueError: if the folder holds a run with other options.
    """
    note = run / "job.json"
    if note.exists() and json.loads(note.read_text()) != job:
        raise ValueError(
            f"{note}: this run was made with other options or another {job['config']}; choose "
            "another --out, or remove it"
        )
    run.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(job, indent=1) + "\n")


def work(run: Path, job: dict, threads: int) -> None:
    """Trains, or goes on training, and evaluates one run.

    Raises:
        RuntimeError: with the last line of the log, if either fails.
    """
    if (run / "results.json").exists():
        return
    train = ["train", "--config", job["config"], "--run", str(run), *job["words"]]
    if (run / "checkpoints" / "last.ckpt").exists():
        train = ["train", "--resume", str(run)]
    else:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # stopped before the first
    evaluate = ["evaluate", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with open(run / "log.txt", "a") as log:
        for words in (train, evaluate):
            command = [sys.executable, "-m", "molflt", *words]
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
            if done.returncode != 0:
                last = (run / "log.txt").read_text().strip().splitlines()[-1:]
                raise RuntimeError(
                    f"{run}: molflt {words[0]} exited with {done.returncode}: {last}"
                )


def collect(out: Path, variants: list[str], seeds: list[int]) -> list[dict]:
    """One row per finished run and split: the numbers of its results.json."""
    rows = []
    for variant in variants:
        for seed in seeds:
            path = out / variant / f"seed{seed}" / "results.json"
            for split, result in json.loads(path.read_text()).items() if path.exists() else ():
                rows.append({"variant": variant, "seed": seed, "split": split, **result})
    return rows


def summarize(rows: list[dict], out: Path) -> dict:
    """Mean and standard deviation over seeds, per variant and split; and sizes of the models.

    A measure that is null in one of the seeds is left out: a mean of the others would mislead.
    """
    summary: dict = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        seeds = sorted({row["seed"] for row in own})
        model, _ = load_run(out / variant / f"seed{seeds[0]}")
        splits = {}
        for split in dict.fromkeys(row["split"] for row in own):
            part = [row for row in own if row["split"] == split]
            splits[split] = {
                name: {"mean": statistics.fmean(values), "sd": spread(values)}
                for name in part[0].keys() - {"variant", "seed", "split"}
                for values in [[row[name] for row in part]]
                if None not in values
            }
        parameters = sum(p.numel() for p in model.parameters())
        summary[variant] = {"parameters": parameters, "seeds": seeds, "splits": splits}
    return summary


def spread(values: list[float]) -> float | None:
    """Sample standard deviation; None from a single seed."""
    return statistics.stdev(values) if len(values) > 1 else None


def table(summary: dict, rows: list[dict], measure: str) -> str:
    """Markdown: the measure of each split, EwT of val_id, and the ratio that FLT is judged by."""
    splits = list(dict.fromkeys(row["split"] for row in rows))
    label, digits = MEASURES[measure]
    energies = measure == "energy_mae"
    head = ["variant", "parameters", "seeds", *(f"{split} {label}" for split in splits)]
    head += ["val_id EwT, %"] * energies
    lines = [head, ["---"] * len(head)]
    for variant, entry in summary.items():
        found = entry["splits"]
        cells = [number(found[split].get(measure), digits) for split in splits]
        if energies:
            cells.append(number(found["val_id"]["energy_within_threshold"], 1, scale=100))
        lines.append([variant, f"{entry['parameters']:,}", str(len(entry["seeds"])), *cells])
    if energies:
        baseline = {row["split"]: f"{row['baseline_mae']:.4f}" for row in rows}
        lines.append(["training median", "", "", *(baseline[split] for split in splits), ""])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    if {"flt", "performer"} <= summary.keys() and energies:
        flt, performer = (
            summary[name]["splits"]["val_id"][measure]["mean"] for name in ("flt", "performer")
        )
        text += f"\nval_id MAE, FLT / Performer: {flt / performer:.3f}\n"
    return text


def draw(summary: dict, measure: str, png: Path) -> None:
    """Mean and spread of each variant that has them on the first split, best on top."""
    split = next(iter(next(iter(summary.values()))["splits"]))
    found = {name: entry["splits"][split] for name, entry in summary.items()}
    values = {name: part[measure] for name, part in found.items() if measure in part}
    if not values:
        return
    largest = measure == "top1_percent"
    names = sorted(values, key=lambda name: values[name]["mean"], reverse=not largest)
    with picture(png, figsize=(6.4, 1.0 + 0.3 * len(names))) as figure:
        axes = figure.subplots()
        for place, name in enumerate(names):
            mean, sd = values[name]["mean"], values[name]["sd"] or 0.0
            axes.errorbar(mean, place, xerr=sd, fmt="o", capsize=3, color=BLUE)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel(f"{split} {MEASURES[measure][0]}\nmean ± standard deviation over seeds")
        axes.grid(alpha=0.3)


def number(value: dict | None, digits: int, scale: float = 1) -> str:
    """Mean ± sd; a dash where a run has no such number, such as a perplexity that overflowed."""
    if value is None:
        return "–"
    text = f"{scale * value['mean']:.{digits}f}"
    return text if value["sd"] is None else f"{text} ± {scale * value['sd']:.{digits}f}"


def write(out: Path, variants: list[str], seeds: list[int]) -> None:
    """Writes and prints the comparison of all runs that are finished."""
    rows = collect(out, variants, seeds)
    if not rows:
        return
    summary = summarize(rows, out)
    measure = next(name for name in MEASURES if name in rows[0])
    text = table(summary, rows, measure)
    (out / "comparison.md").write_text(text)
    draw(summary, measure, out / "comparison.png")
    (out / "comparison.json").write_text(json.dumps(summary, indent=2) + "\n")
    with open(out / "comparison.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(text)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options of the script; what follows -- goes to every training."""
    words = sys.argv[1:] if words is None else words
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/compare.yaml"))
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    known = f"{', '.join(VARIANTS)}, or FILE.yaml[,key=value ...]"
    parser.add_argument("--variants", nargs="+", default=PAPERS, help=known, metavar="VARIANT")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    options = parser.parse_args(words[:cut])
    options.words = words[cut + 1 :]
    return options


def main(words: list[str] | None = None) -> int:
    """Runs what is not finished; returns 1 if a run failed."""
    options = parse(words)
    try:
        # seeds outside, so that a comparison stopped early has all variants
        jobs = {
            options.out / name_of(variant) / f"seed{seed}": job_of(options, variant, seed)
            for seed in options.seeds
            for variant in options.variants
        }
        for run, job in jobs.items():
            prepare(run, job)
    except (ValueError, OSError) as error:
        missing = isinstance(error, OSError) and error.filename
        text = f"{error.filename}: {error.strerror}" if missing else error
        print(f"compare.py: error: {text}", file=sys.stderr)
        return 2
    failed = False
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(work, run, job, options.threads) for run, job in jobs.items()]
        try:
            for done in tqdm(as_completed(waiting), total=len(waiting), unit=" runs"):
                if done.exception() is not None:
                    failed = True
                    tqdm.write(str(done.exception()), file=sys.stderr)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print("interrupted; start again with the same options to go on", file=sys.stderr)
            return 130
    write(options.out, [name_of(variant) for variant in options.variants], options.seeds)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
