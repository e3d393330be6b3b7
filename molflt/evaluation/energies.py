"""Evaluation of a trained run on the splits of a data set, and prediction for any structures."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from molflt.data import open_dataset, relaxed_energies
from molflt.data.splits import OC20_FILES, TEST_SPLITS, VAL_SPLITS, split_path
from molflt.evaluation.inference import Predictions, infer, resolve_device
from molflt.evaluation.report import (
    csv_text,
    errors_by_group,
    group_tables,
    metrics,
    published_table,
    results_table,
    write_files,
)
from molflt.evaluation.submission import SUBMISSION_SPLITS, check_submission_name, write_submission
from molflt.files import write_atomically

__all__ = ["evaluate", "predict"]

PREDICTION_SUFFIXES = (".csv", ".json", ".extxyz", ".traj")


def evaluate(
    run: Path,
    splits: Sequence[str] | None = None,
    data: Path | None = None,
    checkpoint: str = "best",
    out: Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
    submission: Path | None = None,
    skip_bad: bool = False,
) -> dict[str, dict[str, Any]]:
    """Evaluates an energy regressor: MAE and EwT per split, errors by group, pictures.

    Writes results.json, predictions.npz, predictions.csv, errors_by_group.csv, parity.png,
    errors.png and, if the model has a relative encoding, encoding.png.

    Args:
        run: folder of a training run.
        splits: names of splits, by default OC20's four for validation; those without labels are
            only predicted.
        data: folder of the data set; by default that of the run's configuration.
        checkpoint: best, last, or a safetensors file.
        out: folder to write; by default the run's.
        batch_size: structures in a batch.
        device: auto, cpu, cuda or cuda:N.
        submission: also write this OC20 leaderboard file, .npz, from the four test splits.
        skip_bad: leave out structures that cannot be used, and list them.

    Returns:
        Per split what `molflt.evaluation.report.metrics` returns; the same is in results.json.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or a split is missing.
        ValueError: if a split is empty, a structure cannot be used, a prediction is not finite,
            or these splits make no submission.
    """
    from molflt.train import load_run

    run, splits = Path(run), list(dict.fromkeys(splits or VAL_SPLITS))
    names = {} if submission is None else _submission_names(Path(submission), splits)
    model, config = load_run(run, checkpoint, device := resolve_device(device))
    root = _data_root(run, config) if data is None else Path(data)
    datasets = {split: _open(split_path(root, split), skip_bad) for split in splits}
    median, baseline = _training_median(config, root, skip_bad)
    found = {split: infer(model, datasets[split], batch_size, device, split) for split in splits}
    _say_what_is_missing(found)
    results = {split: metrics(part, median) for split, part in found.items()}
    groups = errors_by_group(found)

    print(f"{run}, checkpoint {checkpoint}, on {root}\n\n{results_table(results)}\n{baseline}\n")
    if groups:
        print(f"{group_tables(groups['all'])}\n")
    print(published_table(results, _is_oc20(datasets)))

    out = run if out is None else Path(out)
    written = write_files(out, found, results, groups)
    written += _draw(out, found, groups, model)
    if submission is not None:
        trial = not set(splits) <= set(TEST_SPLITS)
        parts = {name: (found[split].ids, found[split].energy) for name, split in names.items()}
        write_submission(Path(submission), parts, any_counts=trial)
        written.append(Path(submission))
        if trial:
            _warn(f"{submission}: made of validation splits; the leaderboard wants test splits")
    print("\nwritten: " + ", ".join(map(str, written)))
    return results


def predict(
    run: Path,
    structures: Path,
    *,
    out: Path,
    checkpoint: str = "best",
    batch_size: int = 64,
    device: str = "auto",
    skip_bad: bool = False,
) -> None:
    """Predicts relaxed energies, in eV, of the structures in a file.

    Args:
        run: folder of a training run.
        structures: a file that ASE reads, a compact store, or an OC20 LMDB.
        out: file to write: .csv or .json (sid, formula, number of atoms, energy in eV), or .extxyz
            or .traj (the structures, with the predicted relaxed energy as their energy).
        checkpoint: best, last, or a safetensors file.
        batch_size: structures in a batch.
        device: auto, cpu, cuda or cuda:N.
        skip_bad: leave out structures that cannot be used, and list them.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or the structures are missing.
        ValueError: if `out` has another ending, or there is nothing to predict.
    """
    from molflt.train import load_run

    run, structures, out = Path(run), Path(structures), Path(out)
    if out.suffix not in PREDICTION_SUFFIXES:
        raise ValueError(
            f"{out}: expected a name that ends in {', '.join(PREDICTION_SUFFIXES)}; "
            f"got {out.suffix or 'no ending'!r}"
        )
    model, _ = load_run(run, checkpoint, device := resolve_device(device))
    dataset = _open(structures, skip_bad)
    found = infer(model, dataset, batch_size, device, structures.name)
    _say_doubts(str(structures), found)
    if out.suffix in (".csv", ".json"):
        rows = _rows(found)
        text = csv_text(rows) if out.suffix == ".csv" else json.dumps(rows, indent=1) + "\n"
        write_atomically(out, text.encode())
    else:
        _write_atoms(out, dataset, found)
    low, high = found.energy.min(), found.energy.max()
    print(f"{out}: {len(found.energy):,} energies, {low:.3f} to {high:.3f} eV")


def _submission_names(path: Path, splits: Sequence[str]) -> dict[str, str]:
    """Split of the leaderboard file -> split of the data set."""
    check_submission_name(path)
    for group in (TEST_SPLITS, VAL_SPLITS):
        if set(splits) == set(group):
            return dict(zip(SUBMISSION_SPLITS, group, strict=True))
    raise ValueError(
        f"{path}: a submission needs --splits {' '.join(TEST_SPLITS)} (or, for a trial, the four "
        f"val_ splits); got {' '.join(splits) or 'none'}"
    )


def _data_root(run: Path, config: Mapping[str, Any]) -> Path:
    root = Path(config["data"]["root"])
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root}: no such folder, but {run / 'config.yaml'} names it as data.root; start from "
            "the folder where the run was trained, or name the data with --data"
        )
    return root


def _open(path: Path, skip_bad: bool) -> Any:
    dataset = open_dataset(path, skip_bad=skip_bad)
    if dataset.bad:
        shown = "; ".join(f"{name}: {reason}" for name, reason in dataset.bad[:5])
        more = "; ..." if len(dataset.bad) > 5 else ""
        _warn(f"{path}: {len(dataset.bad)} bad structure(s) left out: {shown}{more}")
    if len(dataset) == 0:
        raise ValueError(
            f"{path}: no structures; expected at least one; got 0 "
            f"({len(dataset.bad)} left out as bad)"
        )
    return dataset


def _training_median(
    config: Mapping[str, Any], root: Path, skip_bad: bool
) -> tuple[float | None, str]:
    """Median energy of the training split, eV, and a line that says where it comes from."""
    own = Path(config["data"]["root"])
    try:
        # data that have moved are where --data says; other data keep the training set's median
        path = split_path(own if own.is_dir() else root, config["data"]["train_split"])
    except FileNotFoundError as error:
        return None, f"no baseline, because there is no training split: {error}"
    dataset = open_dataset(path, skip_bad=skip_bad)
    energy = relaxed_energies(dataset)
    if not np.isfinite(energy).any():
        return None, f"no baseline, because {path} has no labels"
    median = float(np.nanmedian(energy))
    return median, f"baseline: always {median:.4f} eV, the median of the energies in {path}"


def _is_oc20(datasets: Mapping[str, Any]) -> bool:
    """Whether every split has as many systems as OC20's split of that name."""
    counts = {name.removeprefix("all/"): file.records for name, file in OC20_FILES.items()}
    return all(
        len(dataset) + len(dataset.bad) == counts.get(split) for split, dataset in datasets.items()
    )


def _say_what_is_missing(found: Mapping[str, Predictions]) -> None:
    for split, part in found.items():
        _say_doubts(split, part)
        absent = int((~part.labeled).sum())
        if absent == len(part.energy):
            _warn(f"{split}: no labels; predicted only")
        elif absent:
            _warn(
                f"{split}: {absent} of {len(part.energy)} systems have no label, left out of errors"
            )


def _say_doubts(name: str, part: Predictions) -> None:
    if part.unknown:
        _warn(
            f"{name}: {', '.join(part.unknown)} did not occur in training; energies of structures "
            "with them mean nothing; train on data that have them"
        )
    if part.untagged:
        _warn(
            f"{name}: {part.untagged} of {len(part.energy)} structures have no atom with a tag "
            "above 0; their energies sum over all atoms instead of surface and adsorbate; set tags "
            "(0 subsurface, 1 surface, 2 adsorbate)"
        )


def _warn(text: str) -> None:
    print(f"molflt: warning: {text}", file=sys.stderr)


def _draw(
    out: Path, found: Mapping[str, Predictions], groups: Mapping[str, Any], model: Any
) -> list[Path]:
    from molflt import plots

    drawn = []
    if groups:
        pairs = {split: part.only_labeled() for split, part in found.items() if part.labeled.any()}
        plots.parity({split: pair[::-1] for split, pair in pairs.items()}, out / "parity.png")
        absolute = {split: np.abs(energy - target) for split, (energy, target) in pairs.items()}
        everything = groups["all"]
        plots.errors(everything["adsorbate"], everything["natoms"], absolute, out / "errors.png")
        drawn += [out / "parity.png", out / "errors.png"]
    position = getattr(getattr(model, "encoding", None), "position", None)
    if position is not None and plots.has_bias(position):
        plots.rpe_profiles(model, out / "encoding.png")
        drawn.append(out / "encoding.png")
    return drawn


def _rows(found: Predictions) -> list[dict[str, Any]]:
    columns = (found.sid, found.formula, found.natoms, found.energy)
    return [
        {
            "index": i,
            "sid": int(sid),
            "formula": formula,
            "natoms": int(natoms),
            "energy_eV": float(energy),
        }
        for i, (sid, formula, natoms, energy) in enumerate(zip(*columns, strict=True))
    ]


def _write_atoms(out: Path, dataset: Any, found: Predictions) -> None:
    """Writes structures with their energies; the file appears complete or not at all."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms
    from ase.io import write

    frames = []
    for i, energy in enumerate(found.energy):
        record = dataset[i]
        atoms = Atoms(
            record.atomic_numbers.numpy(),
            positions=record.pos.numpy(),
            cell=record.cell[0].numpy(),
            pbc=record.pbc[0].numpy(),
            tags=record.tags.numpy(),
            info={"sid": int(record.sid)},
        )
        if bool(record.fixed.any()):
            atoms.set_constraint(FixAtoms(mask=record.fixed.numpy()))
        atoms.calc = SinglePointCalculator(atoms, energy=float(energy))
        frames.append(atoms)
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{out.stem}.", suffix=out.suffix, dir=out.parent)
    os.close(handle)
    try:
        write(part, frames, format=out.suffix.removeprefix("."))
        os.replace(part, out)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)
