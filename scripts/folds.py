"""Cross-validation: trains one configuration on every pair of folds, and averages over them.

    python scripts/game_net.py datasets/game-net/FG_dataset_lite.tar.xz datasets/game-net/folds \\
        --folds published_predictions.npz
    python scripts/folds.py --config configs/game-net.yaml --data datasets/game-net/folds \\
        --out runs/folds --jobs 2 --published published_predictions.npz

Each folder testI-valJ of the data is one training, chosen on val_id and judged on test_id; the
trainings of one test fold are an ensemble, whose energy is their mean. Writes folds.md, .csv (a
line per system) and .png. Started again, it goes on where it was stopped and repeats nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from compare import INTERRUPTED, job_of, work_all
from kit.energies import read_energies
from kit.notes import on_data, prepare
from kit.rows import Rows, markdown, mean_sd, write_csv
from kit.words import described, trainings

from molflt import plots
from molflt.data.structures.systems import System, read_systems
from molflt.evaluation.other_models import Published, read_published
from molflt.metrics import EWT_THRESHOLD

TEST, VALIDATION = "test_id", "val_id"


def collect(out: Path, data: Path) -> Rows:
    """A row per system and finished training that has it in its test fold."""
    rows: Rows = []
    for folder in folders(data):
        run = out / folder.name
        if not (run / "results.json").exists():
            continue
        systems = read_systems(folder)
        fold, _, validated = folder.name.partition("-")
        for sid, (energy, target) in read_energies(run, TEST).items():
            own: System = systems[sid]
            label = {"fold": fold, "validated": validated, "sid": sid}
            rows.append({**label, **own._asdict(), "energy_eV": energy, "target_eV": target})
    return rows


def folders(data: Path) -> list[Path]:
    """The folders of a set of folds.

    Raises:
        ValueError: if there are none.
    """
    found = sorted(path.parent for path in data.glob("*/train.safetensors"))
    if not found:
        raise ValueError(
            f"{data}: expected folders testI-valJ with train.safetensors; got none; make them with "
            "molflt data convert --folds"
        )
    return found


def chosen(only: list[str] | None, found: list[Path]) -> list[str]:
    """Names of the folders to train on, all if none are named.

    Raises:
        ValueError: for a name that no folder has.
    """
    known = [folder.name for folder in found]
    if unknown := [name for name in only or () if name not in known]:
        raise ValueError(
            f"--only: expected some of {', '.join(known)}; got {', '.join(unknown)}; correct it"
        )
    return only or known


def others_of(path: Path | None, folder: Path) -> Published | None:
    """Published energies of all systems of a folder.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no such file, or a system is missing.
    """
    if path is None:
        return None
    published = read_published(path, folder)
    missing = sorted({own.name for own in published.systems.values()} - published.rows.keys())
    if missing:
        raise ValueError(
            f"{path}: expected energies of all {len(published.systems)} systems of {folder}; "
            f"{len(missing)} are missing, such as {missing[0]}"
        )
    return published


def errors_of(rows: Rows, published: Published | None) -> Rows:
    """Errors of our trainings and of published ones, alone and averaged, by system, eV."""
    members: dict[str, list[float]] = defaultdict(list)
    labels: dict[str, dict[str, object]] = {}
    for row in rows:
        members[row["name"]].append(row["energy_eV"])
        labels[row["name"]] = row
    found: Rows = []
    for name, energies in members.items():
        row = labels[name]
        models = {"molflt": np.array(energies)}
        if published is not None:
            row_of = published.rows[name]
            models |= {model: array[row_of] for model, array in published.models.items()}
        found += [
            {
                **{key: row[key] for key in ("name", "fold", "family", "metal", "target_eV")},
                "model": model,
                "trainings": len(values),
                "mean_eV": float(values.mean()),
                "alone_eV": float(np.abs(values - row["target_eV"]).mean()),
                "together_eV": float(abs(values.mean() - row["target_eV"])),
            }
            for model, values in models.items()
        ]
    return found


def table(errors: Rows) -> str:
    """A line per model: single trainings and ensembles, with the spread over test folds."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in errors):
        own = [row for row in errors if row["model"] == model]
        cells = []
        for key in ("alone_eV", "together_eV"):
            by_fold: dict[str, list[float]] = defaultdict(list)
            for row in own:
                by_fold[row["fold"]].append(row[key])
            mean = float(np.mean([row[key] for row in own]))
            spread = [float(np.mean(values)) for values in by_fold.values()]
            cells += [f"{mean:.4f}", mean_sd(spread, 4)]
        within = 100 * float(np.mean([row["together_eV"] < EWT_THRESHOLD for row in own]))
        lines.append([model, own[0]["trainings"], len(own), *cells, f"{within:.1f}"])
    head = ["model", "trainings a fold", "systems", "single, MAE, eV", "over folds"]
    return markdown([*head, "their mean, MAE, eV", "over folds", "EwT of the mean, %"], lines)


def by_group(errors: Rows, kind: str) -> str:
    """Errors of ensembles by family or metal, a column per model."""
    models = list(dict.fromkeys(row["model"] for row in errors))
    lines = []
    for group in sorted({row[kind] for row in errors}):
        own = [row for row in errors if row[kind] == group]
        cells = [
            f"{np.mean([row['together_eV'] for row in own if row['model'] == model]):.3f}"
            for model in models
        ]
        lines.append([group, len(own) // len(models), *cells])
    return markdown([kind, "systems", *(f"{model}, MAE, eV" for model in models)], lines)


def write(out: Path, data: Path, published: Published | None) -> None:
    """Writes and prints what all finished trainings together say."""
    rows = collect(out, data)
    if not rows:
        return
    errors = errors_of(rows, published)
    trainings = len({(row["fold"], row["validated"]) for row in rows})
    text = "\n\n".join([table(errors), by_group(errors, "family"), by_group(errors, "metal")])
    (out / "folds.md").write_text(f"{trainings} trainings\n\n{text}\n")
    write_csv(out / "folds.csv", errors)
    panels = {}
    for model in dict.fromkeys(row["model"] for row in errors):
        own = [row for row in errors if row["model"] == model]
        pair = (np.array([row[key] for row in own]) for key in ("target_eV", "mean_eV"))
        panels[f"{model}, mean of {own[0]['trainings']}"] = tuple(pair)
    plots.parity(panels, out / "folds.png")
    print(f"{trainings} trainings\n\n{text}")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options of the script; what follows -- goes to every training."""
    parser = described(__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/game-net.yaml"))
    parser.add_argument("--data", type=Path, required=True, help="folder of folders testI-valJ")
    parser.add_argument("--out", type=Path, default=Path("runs/folds"))
    parser.add_argument("--published", type=Path, help="npz file of predictions of others")
    parser.add_argument("--only", nargs="+", help="these folders alone")
    parser.add_argument("--seed", type=int, default=0)
    return trainings(parser, words)


def main(words: list[str] | None = None) -> int:
    """Runs what is not finished; returns 1 if a run failed."""
    options = parse(words)
    try:
        jobs, found = {}, folders(options.data)
        wanted = chosen(options.only, found)
        for folder in found:
            run, job = options.out / folder.name, job_of(options, str(options.config), options.seed)
            job = on_data(job, folder)
            if folder.name in wanted:
                jobs[run] = job
            if folder.name in wanted or (run / "results.json").exists():  # all these are collected
                prepare(run, job)
        others = others_of(options.published, found[0])
    except (ValueError, OSError) as error:
        print(f"folds.py: error: {error}", file=sys.stderr)
        return 2
    splits = ("--splits", TEST, VALIDATION)
    code = work_all(jobs, options.jobs, options.threads, splits)
    if code != INTERRUPTED:
        write(options.out, options.data, others)
    return code


if __name__ == "__main__":
    sys.exit(main())
