"""Train on GAME-Net without a group of molecule families and metals, for each group in turn.

    python scripts/held_out.py datasets/game-net/FG_dataset_lite.tar.xz \\
        --data datasets/game-net/held-out --config configs/game-net.yaml --out runs/held-out \\
        --seeds 0 1 2 --jobs 2

Families and metals, in alphabetical order, are assigned to the groups in turn. Each training run
excludes the families and metals of one group. Every system is thus tested with a new family and
with a new metal, or with both new if they are in one group. Kernel ridge regression and the median
are fitted to the same training systems. Writes held_out.md and held_out.csv (a line per prediction)
for groups whose runs have all succeeded. After an interruption, the same command continues.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from game_net import convert, read
from kit.rows import Row, Rows, by_group, markdown, mean_sd, names, pick, write_csv
from kit.runs import finished, job_of, on_data, publish, read_energies, system_rows, work_all
from kit.systems import SYSTEMS
from kit.words import guarded, parsed, trainings
from peers_kit.models import FITS

from molflt.data.structures import open_dataset
from molflt.data.structures.sources import VAL_SPLITS, split_path
from molflt.metrics import EWT_THRESHOLD

Energies = dict[str, dict[int, tuple[float, float]]]  # split -> sid -> (energy, label) in eV

NEW = {"val_ood_ads": "family", "val_ood_cat": "metal"}  # split -> new property


def make_groups(archive: Path, data: Path, groups: int) -> list[Path]:
    """Returns a folder of stores for each group; writes the folders that do not exist."""
    folders = [data / f"{i}-of-{groups}" for i in range(groups)]
    missing = {i for i, folder in enumerate(folders) if not (folder / SYSTEMS).exists()}
    if folders and not missing:
        return folders
    systems, _ = read(archive)
    kinds = [sorted({getattr(system, kind) for system in systems}) for kind in NEW.values()]
    most = min(map(len, kinds))
    if not 2 <= groups <= most:
        raise ValueError(f"--groups: expected 2 to {most}; got {groups}")
    for i in missing:
        held = [name for every in kinds for name in every[i::groups]]
        convert(archive, folders[i], hold_out=held)
    return folders


def rows_of(folder: Path, model: str, seed: int, found: Energies) -> Rows:
    """Returns one row per system with the error of a model in eV."""
    labels = {"model": model, "seed": seed, "group": folder.name}
    rows = [
        row
        for split, energies in found.items()
        for row in system_rows(folder, energies, **labels, split=split)
    ]
    return [row | {"error_eV": abs(row["energy_eV"] - row["target_eV"])} for row in rows]


def fits(folder: Path) -> Iterator[Row]:
    """Fits kernel ridge regression and the median, and yields a row for each model and system."""
    train = open_dataset(split_path(folder, "train"))
    for name, kind in FITS.items():
        model = kind(seed=0)
        model.fit(train)
        found: Energies = {}
        for path in filter(Path.exists, (folder / f"{split}.safetensors" for split in VAL_SPLITS)):
            dataset = open_dataset(path)
            sids = (dataset[index].sid for index in range(len(dataset)))
            pairs = zip(model.predict(dataset), dataset.y_relaxed, strict=True)
            found[path.stem] = dict(zip(sids, pairs, strict=True))
        yield from rows_of(folder, name, 0, found)


def table(rows: Rows) -> str:
    """Formats the mean errors over the systems of all groups, with the spread over seeds."""
    splits = [split for split in VAL_SPLITS if split in names(rows, "split")]
    head = ["model", "seeds", *(f"{split} MAE, eV" for split in splits)]
    head += [f"{split} EwT, %" for split in splits]
    lines = []
    for model in names(rows, "model"):
        own, maes, within = pick(rows, model=model), [], []
        seeds = names(own, "seed")
        for split in splits:
            parts = (pick(own, seed=seed, split=split) for seed in seeds)
            errors = [np.array([row["error_eV"] for row in part]) for part in parts]
            maes.append(mean_sd([float(one.mean()) for one in errors], 4))
            within.append(mean_sd([100 * float((e < EWT_THRESHOLD).mean()) for e in errors], 1))
        lines.append([model, len(seeds), *maes, *within])
    return markdown(head, lines)


def write(out: Path, folders: list[Path], seeds: list[int]) -> None:
    """Writes and prints the results of all groups and seeds."""
    rows: Rows = []
    for folder in folders:
        for seed in seeds:
            run = out / folder.name / f"seed{seed}"
            found = {split: read_energies(run, split) for split in VAL_SPLITS}
            rows += rows_of(folder, "molflt", seed, found)
        rows += fits(folder)
    write_csv(out / "held_out.csv", rows)
    groups = [
        by_group(pick(rows, split=split), kind, "error_eV", f"new {kind}")
        for split, kind in NEW.items()
    ]
    publish(out / "held_out.md", "\n\n".join([table(rows), *groups]))


@guarded
def main(words: list[str] | None = None) -> int:
    parser = trainings(__doc__, "configs/game-net.yaml", "runs/held-out", seeds=[0, 1, 2])
    parser.add_argument("archive", type=Path, help="FG_dataset_lite.tar.xz")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("datasets/game-net/held-out"))
    options = parsed(parser, words)
    folders = make_groups(options.archive, options.data, options.groups)
    jobs = {}
    for seed in options.seeds:
        job = job_of(options, str(options.config), seed)
        for folder in folders:
            jobs[options.out / folder.name / f"seed{seed}"] = on_data(job, folder)
    code = work_all(jobs, options)
    if done := [f for f in folders if all(finished(r) for r in jobs if r.parent.name == f.name)]:
        write(options.out, done, options.seeds)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
