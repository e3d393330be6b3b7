"""Train on small random subsets of a training set and report errors by number of labels.

    python scripts/few_labels.py --data FOLDER --out runs/few/scratch -- --task.lr=1e-3
    python scripts/few_labels.py --data FOLDER --out runs/few/start -- --init=adsorption
    python scripts/few_labels.py --data FOLDER --out runs/few/ridge --ridge --seeds 0 1 2

A draw is a folder with a store of k labeled structures and links to the validation splits. Runs are
evaluated after the last step; the validation splits are not used for selection. Arguments after --
are options of `molflt train`. With --ridge, kernel ridge regression is fitted to each draw instead.
Writes few_labels.md and few_labels.csv. After an interruption, the same command continues.
"""

from pathlib import Path

import numpy as np
from kit.rows import Rows, markdown, mean_sd, names, pick, write_csv
from kit.runs import collect, digest, job_of, on_data, prepare, publish, work_all
from kit.words import guarded, parsed, refuse_idle, trainings
from peers_kit.ridge import KernelRidge

from molflt.data.structures import Structures, open_dataset
from molflt.data.structures.labels import fit_element_energies
from molflt.data.structures.sources import VAL_SPLITS
from molflt.data.structures.store import write_store

TRAIN = "train.safetensors"


def draw(data: Path, folder: Path, count: int, seed: int) -> None:
    """Writes a folder with `count` random training structures and all validation splits."""
    prepare(folder, {"data": digest(data / TRAIN), "labels": count, "seed": seed})
    for split in VAL_SPLITS:
        link, store = folder / f"{split}.safetensors", data / f"{split}.safetensors"
        if store.exists() and not link.exists():
            link.symlink_to(store.resolve())
    if not (folder / TRAIN).exists():
        dataset = open_dataset(data / TRAIN)
        if not 1 <= count <= len(dataset):
            raise ValueError(f"--labels {count}: expected 1 to {len(dataset)}; got {count}")
        chosen = np.random.default_rng(seed).permutation(len(dataset))[:count]
        write_store(folder / TRAIN, (dataset[int(i)] for i in sorted(chosen)))


def ridge(folder: Path, count: int, seed: int) -> Rows:
    """Fits kernel ridge regression to a draw and returns a row for each validation split.

    If the data contain baseline energies, element energies are fitted to the labels minus the
    baselines, and kernel ridge regression is fitted to the residuals. The column constant_mae_eV
    then contains the errors without kernel ridge regression.
    """
    model, train = KernelRidge(seed), open_dataset(folder / TRAIN)
    with_baseline = bool(np.isfinite(train.y_baseline).all())

    def left(dataset: Structures) -> np.ndarray:
        """Returns the energies in eV to which kernel ridge regression is fitted."""
        if not with_baseline:
            return dataset.y_relaxed
        atoms = dataset.compositions(np.arange(len(dataset)), of_adsorbates=True)
        return dataset.y_relaxed - dataset.y_baseline - atoms @ elements

    if with_baseline:
        labels = train.y_relaxed - train.y_baseline
        elements = fit_element_energies(train, of_adsorbates=True, labels=labels).energies
    model.fit(train, left(train))
    rows = []
    for split in VAL_SPLITS:
        if (folder / f"{split}.safetensors").exists():
            dataset = open_dataset(folder / f"{split}.safetensors")
            row, rest = {"labels": str(count), "seed": seed, "split": split}, left(dataset)
            if with_baseline:
                row["constant_mae_eV"] = float(np.abs(rest).mean())
            rows.append({**row, "mae_eV": float(np.abs(model.predict(dataset) - rest).mean())})
    return rows


def table(rows: Rows) -> str:
    """Formats the mean and standard deviation of the MAE over draws, in eV."""
    splits = names(rows, "split")
    lines = []
    for labels in names(rows, "labels"):
        cells = ([row["mae_eV"] for row in pick(rows, labels=labels, split=one)] for one in splits)
        lines.append([labels, *(mean_sd(own, 3) for own in cells)])
    return markdown(["labels", *(f"{split} MAE, eV" for split in splits)], lines)


@guarded
def main(words: list[str] | None = None) -> int:
    parser = trainings(__doc__, "configs/few-labels.yaml", "runs/few-labels", seeds=range(3))
    parser.add_argument("--data", type=Path, required=True, help="folder with one store per split")
    parser.add_argument("--labels", nargs="+", type=int, default=[10, 30, 100, 300])
    parser.add_argument("--ridge", action="store_true", help="fit kernel ridge regression only")
    options = parsed(parser, words)
    if options.ridge:
        refuse_idle(parser, options, "with --ridge", "config", "jobs", "threads", "words")
    jobs, rows = {}, []
    for count in options.labels:
        for seed in options.seeds:
            folder = options.out / "data" / f"{count}-{seed}"
            draw(options.data, folder, count, seed)
            if options.ridge:
                rows += ridge(folder, count, seed)
                continue
            job = job_of(options, str(options.config), seed)
            jobs[options.out / str(count) / f"seed{seed}"] = on_data(job, folder)
    code = work_all(jobs, options, ("--checkpoint", "last"))
    rows = rows or collect(options.out, "labels", [str(k) for k in options.labels], options.seeds)
    if rows:
        write_csv(options.out / "few_labels.csv", rows)
        publish(options.out / "few_labels.md", table(rows))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
