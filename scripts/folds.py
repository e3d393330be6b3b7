"""Train a configuration for every pair of folds and report errors of single runs and ensembles.

    python scripts/game_net.py datasets/game-net/FG_dataset_lite.tar.xz datasets/game-net/folds \\
        --folds published_predictions.npz
    python scripts/folds.py --config configs/game-net.yaml --data datasets/game-net/folds \\
        --out runs/folds --jobs 2 --published published_predictions.npz

Each folder testI-valJ of the data has its own training run. Weights are selected on val_id and
evaluated on test_id. All runs with the same test fold form an ensemble, which predicts the mean of
their energies. Writes folds.md, folds.csv (a line per system and model) and folds.png. After an
interruption, the same command continues.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from kit.rows import Rows, by_group, markdown, mean_sd, names, pick, write_csv
from kit.runs import job_of, on_data, publish, read_energies, system_rows, work_all
from kit.systems import read_systems
from kit.words import guarded, parsed, trainings

from molflt import plots
from molflt.metrics import EWT_THRESHOLD

TEST, VALIDATION = "test_id", "val_id"

Published = dict[str, dict[str, np.ndarray]]  # energies (training runs,) in eV by model and system


def read_published(path: Path) -> Published:
    """Reads an npz file with `name` (n,), and energies in eV for each model: (n,) or (n, k).

    n is the number of systems, and k is the number of training runs.
    """
    arrays = dict(np.load(path, allow_pickle=False))
    names = arrays["name"].tolist()
    energies = {model: own for model, own in arrays.items() if own.dtype.kind == "f"}
    if len(set(names)) < len(names) or {len(own) for own in energies.values()} != {len(names)}:
        raise ValueError(f"{path}: expected unique names and energies of shape (n,) or (n, k)")
    return {
        m: dict(zip(names, e.reshape(len(names), -1), strict=True)) for m, e in energies.items()
    }


def collect(out: Path, folders: list[Path]) -> Rows:
    """Returns one row per system in the test fold of each finished run."""
    rows: Rows = []
    for folder in folders:
        run = out / folder.name
        if (run / "results.json").exists():
            labels = {"run": run.name, "fold": folder.name.partition("-")[0]}
            rows += system_rows(folder, read_energies(run, TEST), **labels)
    return rows


def errors_of(rows: Rows, published: Published | None) -> Rows:
    """Returns one row per system and model: errors of single runs and of the ensemble, in eV."""
    members: dict[str, Rows] = defaultdict(list)
    for row in rows:
        members[row["name"]].append(row)
    found: Rows = []
    for name, own in members.items():
        row, models = own[0], {"molflt": np.array([one["energy_eV"] for one in own])}
        if published is not None:
            models |= {model: energies[name] for model, energies in published.items()}
        found += [
            {
                **{key: row[key] for key in ("name", "fold", "family", "metal", "target_eV")},
                "model": model,
                "runs": len(values),
                "mean_eV": float(values.mean()),
                "alone_eV": float(np.abs(values - row["target_eV"]).mean()),
                "together_eV": float(abs(values.mean() - row["target_eV"])),
            }
            for model, values in models.items()
        ]
    return found


def table(errors: Rows) -> str:
    """Formats the errors of single runs and ensembles, with the spread over test folds."""
    lines = []
    for model in names(errors, "model"):
        own = pick(errors, model=model)
        folds = [pick(own, fold=fold) for fold in names(own, "fold")]
        cells = []
        for key in ("alone_eV", "together_eV"):
            whole, *means = (float(np.mean([row[key] for row in part])) for part in (own, *folds))
            cells += [f"{whole:.4f}", mean_sd(means, 4)]
        within = 100 * float(np.mean([row["together_eV"] < EWT_THRESHOLD for row in own]))
        lines.append([model, own[0]["runs"], len(own), *cells, f"{within:.1f}"])
    head = ["model", "runs per fold", "systems", "single, MAE, eV", "over folds"]
    return markdown([*head, "ensemble, MAE, eV", "over folds", "ensemble EwT, %"], lines)


def write(out: Path, rows: Rows, published: Published | None) -> None:
    """Writes and prints the results of all finished runs."""
    errors = errors_of(rows, published)
    write_csv(out / "folds.csv", errors)
    panels = {}
    for model in names(errors, "model"):
        own = pick(errors, model=model)
        pair = (np.array([row[key] for row in own]) for key in ("target_eV", "mean_eV"))
        panels[f"{model}, mean of {own[0]['runs']}"] = tuple(pair)
    plots.parity(panels, out / "folds.png")
    groups = [by_group(errors, kind, "together_eV", kind) for kind in ("family", "metal")]
    parts = [f"{len(names(rows, 'run'))} training runs", table(errors), *groups]
    publish(out / "folds.md", "\n\n".join(parts))


@guarded
def main(words: list[str] | None = None) -> int:
    parser = trainings(__doc__, "configs/game-net.yaml", "runs/folds")
    parser.add_argument("--data", type=Path, required=True, help="folder that contains testI-valJ")
    parser.add_argument("--published", type=Path, help="npz file with published predictions")
    parser.add_argument("--seed", type=int, default=0)
    options = parsed(parser, words)
    folders = sorted(path.parent for path in options.data.glob("*/train.safetensors"))
    if not folders:
        raise ValueError(f"{options.data}: expected folders testI-valJ with train.safetensors")
    published = read_published(options.published) if options.published else None
    if published:
        known = {system.name for system in read_systems(folders[0]).values()}
        if missing := sorted(known - next(iter(published.values())).keys()):
            raise ValueError(f"{options.published}: expected energies of {missing[0]}; got none")
    job = job_of(options, str(options.config), options.seed)
    jobs = {options.out / folder.name: on_data(job, folder) for folder in folders}
    code = work_all(jobs, options, ("--splits", TEST, VALIDATION))
    if rows := collect(options.out, folders):
        write(options.out, rows, published)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
