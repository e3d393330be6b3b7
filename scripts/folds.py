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

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from compare import job_of, work_all
from kit.rows import Rows, markdown, mean_sd, names, pick, write_csv
from kit.runs import on_data, read_energies
from kit.words import described, guarded, trainings

from molflt import plots
from molflt.data.structures.systems import read_systems
from molflt.evaluation.other_models import Published, read_published
from molflt.metrics import EWT_THRESHOLD

TEST, VALIDATION = "test_id", "val_id"


def collect(out: Path, folders: list[Path]) -> Rows:
    """A row per system and finished training that has it in its test fold."""
    rows: Rows = []
    for folder in folders:
        run = out / folder.name
        if not (run / "results.json").exists():
            continue
        systems = read_systems(folder)
        fold, _, validated = folder.name.partition("-")
        for sid, (energy, target) in read_energies(run, TEST).items():
            label = {"fold": fold, "validated": validated, "sid": sid}
            own = {"energy_eV": energy, "target_eV": target}
            rows.append({**label, **systems[sid]._asdict(), **own})
    return rows


def errors_of(rows: Rows, published: Published | None) -> Rows:
    """Errors of our trainings and of published ones, alone and averaged, by system, eV."""
    members: dict[str, Rows] = defaultdict(list)
    for row in rows:
        members[row["name"]].append(row)
    found: Rows = []
    for name, own in members.items():
        row, models = own[0], {"molflt": np.array([one["energy_eV"] for one in own])}
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


def mean(rows: Rows, key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def table(errors: Rows) -> str:
    """A line per model: single trainings and ensembles, with the spread over test folds."""
    lines = []
    for model in names(errors, "model"):
        own = pick(errors, model=model)
        folds = [pick(own, fold=fold) for fold in names(own, "fold")]
        cells = []
        for key in ("alone_eV", "together_eV"):
            cells += [f"{mean(own, key):.4f}", mean_sd([mean(fold, key) for fold in folds], 4)]
        within = 100 * float(np.mean([row["together_eV"] < EWT_THRESHOLD for row in own]))
        lines.append([model, own[0]["trainings"], len(own), *cells, f"{within:.1f}"])
    head = ["model", "trainings a fold", "systems", "single, MAE, eV", "over folds"]
    return markdown([*head, "their mean, MAE, eV", "over folds", "EwT of the mean, %"], lines)


def by_group(errors: Rows, kind: str) -> str:
    """Errors of ensembles by family or metal, a column per model."""
    models = names(errors, "model")
    lines = []
    for group in sorted(names(errors, kind)):
        parts = [pick(errors, model=model, **{kind: group}) for model in models]
        lines.append([group, len(parts[0]), *(f"{mean(own, 'together_eV'):.3f}" for own in parts)])
    return markdown([kind, "systems", *(f"{model}, MAE, eV" for model in models)], lines)


def write(out: Path, folders: list[Path], published: Published | None) -> None:
    """Writes and prints what all finished trainings together say."""
    rows = collect(out, folders)
    if not rows:
        return
    errors = errors_of(rows, published)
    trained = len({(row["fold"], row["validated"]) for row in rows})
    parts = [table(errors), by_group(errors, "family"), by_group(errors, "metal")]
    text = "\n\n".join([f"{trained} trainings", *parts])
    (out / "folds.md").write_text(f"{text}\n")
    write_csv(out / "folds.csv", errors)
    panels = {}
    for model in names(errors, "model"):
        own = pick(errors, model=model)
        pair = (np.array([row[key] for row in own]) for key in ("target_eV", "mean_eV"))
        panels[f"{model}, mean of {own[0]['trainings']}"] = tuple(pair)
    plots.parity(panels, out / "folds.png")
    print(text)


@guarded
def main(words: list[str] | None = None) -> int:
    parser = described(__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/game-net.yaml"))
    parser.add_argument("--data", type=Path, required=True, help="folder of folders testI-valJ")
    parser.add_argument("--out", type=Path, default=Path("runs/folds"))
    parser.add_argument("--published", type=Path, help="npz file of predictions of others")
    parser.add_argument("--seed", type=int, default=0)
    options = trainings(parser, words)
    folders = sorted(path.parent for path in options.data.glob("*/train.safetensors"))
    if not folders:
        raise ValueError(f"{options.data}: expected folders testI-valJ with train.safetensors")
    published = read_published(options.published, folders[0]) if options.published else None
    if published:
        known = {system.name for system in published.systems.values()}
        if missing := sorted(known - published.rows.keys()):
            raise ValueError(f"{options.published}: expected energies of {missing[0]}; got none")
    job = job_of(options, str(options.config), options.seed)
    jobs = {options.out / folder.name: on_data(job, folder) for folder in folders}
    code = work_all(jobs, options, ("--splits", TEST, VALIDATION))
    write(options.out, folders, published)
    return code


if __name__ == "__main__":
    sys.exit(main())
