"""Evaluation of an energy regressor: MAE and EwT, errors by group, pictures, a submission."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from molflt import plots
from molflt.data.structures import Structures
from molflt.data.structures.base import AS_TRAINED, Tags
from molflt.data.structures.labels import label_faults
from molflt.data.structures.splits import OC20_FILES, PUBLISHED, TEST_SPLITS, VAL_SPLITS
from molflt.evaluation.evaluated import EvaluationData
from molflt.evaluation.groups import _errors_by_group, _group_tables
from molflt.evaluation.predictions import Predictions, infer
from molflt.evaluation.published import _compare, _members, read_published
from molflt.evaluation.report import Report, _warn, align, write_csv
from molflt.evaluation.results import begin_results
from molflt.evaluation.structures import _write_relaxed
from molflt.evaluation.submission import _expect_count, _submission_names, _write_submission
from molflt.evaluation.uncertainty import _assess, _check_asked
from molflt.files import expect_writable, write_atomically
from molflt.plots import GroupError
from molflt.tasks.is2re import IS2RETask
from molflt.training.config import Config

__all__ = ["evaluate"]

_Metrics = Mapping[str, float | None]

_FILES = (
    *("predictions.npz", "predictions.csv", "errors_by_group.csv"),
    *("parity.png", "errors.png", "encoding.png"),
    *("published.csv", "published_errors.csv", "published.png"),
)


def evaluate(
    run: Path,
    model: nn.Module,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
    submission: Path | None = None,
    published: Path | None = None,
    skip_bad: bool = False,
    calibration_split: str | None = None,
    energy_key: str | None = AS_TRAINED,
    tags: Tags | None = None,
    relaxed: Path | None = None,
    force: bool = False,
) -> Report:
    """Evaluates an energy regressor.

    Writes predictions.npz, predictions.csv, errors_by_group.csv, parity.png, errors.png and, if the
    model has a relative encoding, encoding.png; of an ensemble uncertainty.json and
    uncertainty.png, and with spread_eV and uncertainty_eV in predictions.csv.

    Args:
        run: folder of the training run.
        model: `molflt.graph.EnergyRegressor` or an ensemble of such, in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: names of splits, by default those of OC20's four for validation that there are, of
            one file its part for validation; those without labels are only predicted.
        data: folder of the data set, or one file, of which all structures count; by default that of
            the run's configuration.
        batch_size: structures in a batch.
        submission: also write this OC20 leaderboard file, .npz, from the four test splits.
        published: npz file of predictions by other models, by name of the system (name, and an
            array of energies per model, a column per training): compared system by system in
            published.csv, published_errors.csv (by split, family and metal) and published.png.
        skip_bad: leave out structures that cannot be used, and list them.
        calibration_split: of an ensemble: half of this split, drawn by a hash of the sid, is what
            the uncertainty is calibrated on, and does not count in its coverage; by default of the
            first one with labels but that of the training, whose errors are too small.
        energy_key: entry of files that ASE reads that is the energy, eV; by default that of the
            training, if a source has such entries; null for y_relaxed, else energy.
        tags: what tags mean in files that ASE reads, oc20 or ase; guess finds them from the
            geometry, in any source; by default as in training.
        relaxed: folder to write SPLIT.extxyz to, the structures that the position head predicts.
        force: also evaluate structures whose tags cannot be meant.

    Returns:
        Per split: mae_eV, ewt_percent, baseline_mae_eV (always predicting the median of the
        training energies) and n, the number of systems with a label; where no system has one, the
        errors are None and n is the number of systems. Of an ensemble also member_mae_eV (the MAE
        of its members, averaged), the means spread_eV and uncertainty_eV, coverage_percent (of
        coverage_n errors that the uncertainty holds; it is made for 68), coverage_se_percent (the
        binomial standard error of that), coverage_crossed_percent (of all systems of the split that
        calibrates, each half calibrating for the other) and rank_correlation (of spread and
        |error|). With `relaxed` also adwt_percent, initial_adwt_percent and position_error_A.
    """
    reading = {"energy_key": energy_key, "tags": tags or AS_TRAINED}
    source = EvaluationData(run, config, data, skip_bad, **reading)
    splits = source.choose(splits)
    _check_asked(model, calibration_split, splits)
    names = {} if submission is None else _submission_names(submission, splits)
    others = None if published is None else read_published(published, source.folder)
    domain = source.domain(model)
    datasets = source.open(splits, model, None if force else domain)
    if relaxed is not None:
        for split, dataset in datasets.items():
            expect_writable(relaxed / f"{split}.extxyz", dataset.path)
    _expect_submission(submission, names, datasets, published)
    median, baseline = source.training_median()
    found = {
        split: infer(model, datasets[split], batch_size, split, domain, force=force)
        for split in splits
    }
    members = [] if others is None else _members(others, found)
    structures, moved = _write_relaxed(model, datasets, relaxed, batch_size)
    uncertainty = _assess(model, found, out, calibration_split, source.own.train)
    begin_results(out, *_FILES)  # after all that refuses; a calibration is of weights, and stays
    _say_what_labels_lack(found)
    results = {split: _metrics(part, median) for split, part in found.items()}
    for split, row in results.items():
        row |= {**uncertainty.rows.get(split, {}), **structures.get(split, {})}
    groups = _errors_by_group(found)
    tables = [f" on {source}", f"{_results_table(results)}\n{baseline}"]
    tables += [text for text in (source.absent, uncertainty.text, moved) if text]
    tables += [_group_tables(groups["all"])] if groups else []
    files = [*_write(out, datasets, found, groups, uncertainty.columns), *uncertainty.files]
    files += _draw(out, found, groups, model)
    if others is None:
        tables += [_published_table(results)] if _is_oc20(datasets) else []
    else:
        table, compared = _compare(others, members, found, out)
        tables.append(table)
        files += compared
    if submission is not None:
        files.append(_submit(submission, names, found))
    return Report(results, "\n\n".join(tables) + "\n", files)


def _expect_submission(
    path: Path | None,
    names: Mapping[str, str],
    datasets: Mapping[str, Structures],
    published: Path | None,
) -> None:
    """Refuses, before anything is computed, what cannot be written or has other numbers of systems.

    Args:
        path: of the submission; None for none.
        names: split of the leaderboard file -> split of the data set.
        datasets: by split.
        published: what is read besides.
    """
    if path is not None:
        expect_writable(path, *filter(None, [published]))
        for name, split in names.items():
            _expect_count(name, len(datasets[split]), any_counts=_is_trial(names))


def _is_trial(names: Mapping[str, str]) -> bool:
    return not set(names.values()) <= set(TEST_SPLITS)


def _submit(path: Path, names: Mapping[str, str], found: Mapping[str, Predictions]) -> Path:
    """Writes the leaderboard file."""
    trial = _is_trial(names)
    parts = {name: (found[split].ids, found[split].energy) for name, split in names.items()}
    _write_submission(path, parts, any_counts=trial)
    if trial:
        _warn(f"{path}: made of validation splits; the leaderboard wants test splits")
    return path


def _metrics(found: Predictions, median: float | None) -> dict[str, float | None]:
    """Of one split; `median` is that of the training energies, eV, if known."""
    energy, target = map(torch.from_numpy, found.only_labeled())
    if not len(target):
        errors = dict.fromkeys(("mae_eV", "ewt_percent", "baseline_mae_eV"))
        return {**errors, "n": len(found.energy)}
    ours = IS2RETask.sums.of(energy, target).metrics()
    always = torch.full_like(target, float("nan") if median is None else median)
    baseline = IS2RETask.sums.of(always, target).metrics()["mae_eV"]
    return {
        "mae_eV": ours["mae_eV"],
        "ewt_percent": ours["ewt_percent"],
        "baseline_mae_eV": None if median is None else baseline,
        "n": len(target),
    }


def _is_oc20(datasets: Mapping[str, Structures]) -> bool:
    """Whether every split has as many systems as OC20's split of that name.

    Of no other data that is to be expected by chance, and parts of OC20's splits do not compare.
    """
    counts = {name.removeprefix("all/"): file.records for name, file in OC20_FILES.items()}
    return all(
        len(dataset) + len(dataset.bad) == counts.get(split) for split, dataset in datasets.items()
    )


def _say_what_labels_lack(found: Mapping[str, Predictions]) -> None:
    for split, part in found.items():
        absent = int((~part.labeled).sum())
        if absent == len(part.energy):
            _warn(f"{split}: no labels; predicted only")
        elif absent:
            _warn(
                f"{split}: {absent} of {len(part.energy)} systems have no label, left out of errors"
            )
        absurd = label_faults(part.target, part.natoms, required=False)
        for index, reason in list(absurd.items())[:1]:
            _warn(
                f"{split}: sid {part.sid[index]}: {reason}; counted in the errors all the same "
                f"({len(absurd)} such); leave it out with molflt data convert --skip-bad"
            )


def _results_table(results: Mapping[str, _Metrics]) -> str:
    """A line per split and their average, in plain text."""
    keys = ("mae_eV", "ewt_percent", "baseline_mae_eV")
    rows = dict(results)
    known = [row for row in results.values() if row["mae_eV"] is not None]
    if len(known) > 1:
        average: dict[str, float | None] = {"n": sum(row["n"] or 0 for row in known)}
        for key in keys:
            values = [value for row in known if (value := row[key]) is not None]
            average[key] = float(np.mean(values)) if len(values) == len(known) else None
        rows["average"] = average
    lines = [["split", "systems", "MAE / eV", "EwT / %", "baseline MAE / eV"]]
    for split, row in rows.items():
        numbers = [_fixed(row[key], digits) for key, digits in zip(keys, (4, 2, 4), strict=True)]
        lines.append([split, f"{row['n']:,}", *numbers])
    return align(lines)


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _published_table(results: Mapping[str, _Metrics]) -> str:
    """Published validation results on OC20, and `results`, obtained on whole splits of it."""
    lines = [["model", "training", *VAL_SPLITS, "EwT val_id / %"]]
    for entry in PUBLISHED:
        values = [_fixed(getattr(entry, split), 4) for split in VAL_SPLITS]
        lines.append([entry.model, entry.setting, *values, _fixed(entry.ewt_id, 2)])
    ours = [_fixed(results.get(split, {}).get("mae_eV"), 4) for split in VAL_SPLITS]
    ewt = _fixed(results.get("val_id", {}).get("ewt_percent"), 2)
    lines.append(["this run", "see its config.yaml", *ours, ewt])
    return f"published, on OC20: MAE / eV on the validation splits\n{align(lines, 2)}"


def _write(
    out: Path,
    datasets: Mapping[str, Structures],
    found: Mapping[str, Predictions],
    groups: Mapping[str, Mapping[str, Sequence[GroupError]]],
    more: Mapping[str, Mapping[str, NDArray[np.float64]]],
) -> list[Path]:
    """Writes predictions.npz, predictions.csv (with `more` columns) and errors_by_group.csv."""
    arrays: dict[str, NDArray[np.str_] | NDArray[np.float64]] = {}
    rows: list[dict[str, object]] = []
    for split, part in found.items():
        arrays[f"{split}_ids"], arrays[f"{split}_energy"] = part.ids, part.energy
        named = (part.sid, part.adsorbate, part.slab)
        columns = (*named, part.natoms, part.energy, part.target, part.labeled)
        rows += [
            {
                "split": split,
                "sid": sid,
                **datasets[split].origin(i),
                "adsorbate": adsorbate,
                "slab": slab,
                "natoms": natoms,
                "energy_eV": float(energy),
                "target_eV": float(target) if known else None,
                "error_eV": float(energy - target) if known else None,
                **{name: float(values[i]) for name, values in more.get(split, {}).items()},
            }
            for i, (sid, adsorbate, slab, natoms, energy, target, known) in enumerate(
                zip(*columns, strict=True)
            )
        ]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(out / "predictions.npz", buffer.getvalue())
    written = [out / "predictions.npz", write_csv(out / "predictions.csv", rows)]
    members = [
        {"split": split, "kind": kind, "group": group.group, "n": group.n, "mae_eV": group.mae}
        for split, kinds in groups.items()
        for kind, members in kinds.items()
        for group in members
    ]
    return written + ([write_csv(out / "errors_by_group.csv", members)] if members else [])


def _draw(
    out: Path,
    found: Mapping[str, Predictions],
    groups: Mapping[str, Mapping[str, Sequence[GroupError]]],
    model: nn.Module,
) -> list[Path]:
    drawn = []
    if groups:
        pairs = {split: part.only_labeled() for split, part in found.items() if part.labeled.any()}
        names = {split: _names(found[split]) for split in pairs}
        panels = {split: pair[::-1] for split, pair in pairs.items()}
        plots.parity(panels, out / "parity.png", names)
        absolute = {split: np.abs(energy - target) for split, (energy, target) in pairs.items()}
        plots.errors(groups["all"], absolute, out / "errors.png")
        drawn += [out / "parity.png", out / "errors.png"]
    position = getattr(getattr(model, "encoding", None), "position", None)
    if position is not None and plots.has_bias(position):
        plots.rpe_profiles(model, out / "encoding.png")
        drawn.append(out / "encoding.png")
    return drawn


def _names(part: Predictions) -> list[str]:
    """What pictures call the systems with a label."""
    named = zip(part.sid, part.adsorbate, part.slab, part.labeled, strict=True)
    return [f"sid {sid} {adsorbate} on {slab}" for sid, adsorbate, slab, known in named if known]
