"""Evaluation of energy regressors: MAE and EwT, errors by group, figures and submissions."""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from molflt import plots
from molflt.data.structures import Structures
from molflt.data.structures.base import AS_TRAINED, Tags
from molflt.data.structures.labels import label_faults, limit_in
from molflt.data.structures.sources import OC20_FILES, TEST_SPLITS
from molflt.evaluation.calibration import assess, check_calibration_split
from molflt.evaluation.evaluated import EvaluationData, warn_of_labels
from molflt.evaluation.predictions import Predictions, infer
from molflt.evaluation.relaxation import write_relaxed
from molflt.evaluation.results import Evaluation, Results, results_table, write_csv
from molflt.files import expect_writable, warn, write_atomically
from molflt.tasks.is2re import IS2RETask
from molflt.training.config import Config

_SIZE_RANGES = 6
_PRINTED = 12  # groups in a printed table; the CSV file contains all


def evaluate(
    run: Path,
    model: nn.Module,
    config: Config,
    out: Path,
    batch_size: int = 64,
    calibration_split: str | None = None,
    tags: Tags | None = None,
    relaxed: Path | None = None,
    force: bool = False,
    **which: Any,
) -> Evaluation:
    """Evaluates an energy regressor. Splits without labels are predicted but not scored.

    Writes predictions.npz (for the four test splits of OC20, a submission to its leaderboard),
    predictions.csv, errors_by_group.csv, parity.png and, with a relative encoding, encoding.png.
    For ensembles, adds spread_eV to predictions.csv and, if a split is large enough for
    calibration, also adds uncertainty_eV and writes uncertainty.json and uncertainty.png.

    Args:
        batch_size: number of structures per batch.
        calibration_split: for ensembles, the split used to calibrate the uncertainty; by default
            the first large enough split except the training split, whose errors are too small. Half
            of its systems, selected by a hash of the sid, are used for calibration and excluded
            from the coverage.
        tags: convention of the tags in files that ASE reads: oc20 or ase; by default that of
            training. guess derives the tags of any source from the geometry.
        relaxed: folder for SPLIT.extxyz with the structures predicted by the position head.
        force: also evaluate structures with implausible tags.
        which: see `molflt.evaluation.evaluated.EvaluationData`.

    Returns:
        Per split: mae_eV, ewt_percent, baseline_mae_eV (the MAE of the median training energy or,
        if the model adds baseline energies, of these plus the median training difference) and n,
        the number of systems with a label. Without labels, the errors are None and n is the number
        of all systems. For ensembles, also member_mae_eV (mean MAE of the members), spread_eV and
        uncertainty_eV (means over the systems), coverage_percent (share of errors within the
        uncertainty; the target is 68), coverage_n (number of errors considered),
        coverage_se_percent (binomial standard error of the coverage), coverage_crossed_percent
        (coverage of the calibration split, without new elements, if each half calibrates the other)
        and rank_correlation (of uncertainty and |error|). With `relaxed`, also adwt_percent,
        initial_adwt_percent and position_error_A.
    """
    source = EvaluationData(run, config, tags=tags or AS_TRAINED, **which)
    splits = source.splits
    check_calibration_split(model, calibration_split, splits)
    domain = source.domain(model)
    if relaxed is not None and domain is not None and not domain.relaxed:
        raise ValueError(
            "--relaxed expects a model trained with relaxed positions; got none; omit --relaxed"
        )
    members = getattr(model, "members", [model])
    if relaxed is not None and any(member.position_head is None for member in members):
        raise ValueError(
            "--relaxed expects a model with a position head; train with --model.position_head "
            "true, or omit --relaxed"
        )
    datasets = source.open(model, None if force else domain)
    if relaxed is not None:
        for split, dataset in datasets.items():
            expect_writable(relaxed / f"{split}.extxyz", dataset.path)
    median, baseline = source.training_median()
    by_atom = [] if relaxed is None else ["displacement"]
    found = {
        split: infer(model, datasets[split], batch_size, split, domain, by_atom, force)
        for split in splits
    }
    relaxations, relaxation_table = write_relaxed(found, datasets, relaxed)
    spreads, columns, spread_table = assess(model, found, out, calibration_split, source.learned)
    adds_baseline = source.own.reading.baseline_key is not None
    results: Results = {}
    rows: list[dict[str, object]] = []
    for split, part in found.items():
        _warn_of_labels(split, part, datasets[split])
        results[split] = _metrics(part, median, adds_baseline)
        results[split] |= {**spreads.get(split, {}), **relaxations.get(split, {})}
        numbers = {"error_eV": part.energy - part.target, **columns.get(split, {})}
        rows += part.rows(split, datasets[split], ("adsorbate", "slab"), numbers)
    write_csv(out / "predictions.csv", rows)
    _write_arrays(out / "predictions.npz", found)
    by_group = ""
    if group_errors := _errors_by_group(found):
        write_csv(out / "errors_by_group.csv", group_errors)
        by_group = _group_tables(group_errors)
    _draw(out, found, model, datasets)
    tables = [f" on {source.data.root}", f"{_results_table(results)}\n{baseline}", source.absent]
    tables += [spread_table, relaxation_table, by_group]
    return Evaluation(results, "\n\n".join(filter(None, tables)) + "\n")


def _warn_of_labels(split: str, part: Predictions, dataset: Structures) -> None:
    missing, count = int((~part.labeled).sum()), len(part.energy)
    if missing == count:
        warn(f"{split}: no labels; errors are not computed")
    elif missing:
        warn(f"{split}: {missing} of {count} systems have no label; errors ignore them")
    limits = partial(limit_in, dataset)
    faults = label_faults(part.target, part.natoms, False, bool(dataset.quantity), limits=limits)
    warn_of_labels(split, dataset, faults)


def _metrics(
    part: Predictions, median: float | None, adds_baseline: bool
) -> dict[str, float | None]:
    """Returns the metrics of a split; `median` is the median training energy in eV, if known."""
    row: dict[str, float | None] = dict.fromkeys(("mae_eV", "ewt_percent", "baseline_mae_eV"))
    energy, target = part.only_labeled()
    if not len(target):
        return row | {"n": len(part.energy)}
    metrics = IS2RETask.sums.of(torch.from_numpy(energy), torch.from_numpy(target)).metrics()
    row |= {name: metrics[name] for name in ("mae_eV", "ewt_percent")}
    if median is not None:
        baseline = part.baseline[part.labeled] if adds_baseline else 0.0
        row["baseline_mae_eV"] = float(np.abs(target - baseline - median).mean())
    return row | {"n": len(target)}


def _results_table(results: Results) -> str:
    """Formats errors, and their unweighted average over splits if there are several."""
    rows, names = dict(results), ("n", "mae_eV", "ewt_percent", "baseline_mae_eV")
    labeled = [row for row in results.values() if row["mae_eV"] is not None]
    if len(labeled) > 1:
        average: dict[str, float | None] = {"n": sum(row["n"] or 0 for row in labeled)}
        for key in names[1:]:
            values = [row[key] for row in labeled]
            average[key] = None if None in values else float(np.mean(values))  # type: ignore[arg-type]
        rows["average"] = average
    return results_table("split", rows, names, n=("systems", 0))


def _errors_by_group(found: Mapping[str, Predictions]) -> list[dict[str, Any]]:
    """Groups the errors of labeled systems by adsorbate, metal (elements of the slab) and size."""

    def labeled(column_of: Callable[[Predictions], ArrayLike]) -> NDArray[Any]:
        columns = [np.asarray(column_of(part))[part.labeled] for part in found.values()]
        return np.concatenate(columns)

    error = labeled(lambda part: np.abs(part.energy - part.target))
    if not len(error):
        return []
    kinds = {
        "adsorbate": labeled(lambda part: part.adsorbate),
        "slab": labeled(lambda part: part.slab),
        "natoms": size_ranges(labeled(lambda part: part.natoms)),
    }
    counts = [int(part.labeled.sum()) for part in found.values()]
    return errors_by_group(error, kinds, "mae_eV", np.repeat([*found], counts))


def errors_by_group(
    error: NDArray[np.float64],
    kinds: Mapping[str, NDArray[np.str_]],
    metric: str,
    split: NDArray[np.str_] | None = None,
) -> list[dict[str, Any]]:
    """Computes errors by group, as rows of errors_by_group.csv.

    Args:
        error: (systems,), absolute errors.
        kinds: names of the group of each system, of shape (systems,), by kind. Groups of the kind
            "natoms" are sorted by size, other groups by number of systems, largest first.
        metric: name of the column of mean errors.
        split: (systems,), names of splits; by default all systems form one split.

    Returns:
        The groups of each split and, under the name "all", of all systems.
    """
    masks = {} if split is None else {str(name): split == name for name in dict.fromkeys(split)}
    masks["all"] = np.full(len(error), True)
    groups = []
    for part, mask in masks.items():
        for kind, names in kinds.items():
            unique, index, n = np.unique(names[mask], return_inverse=True, return_counts=True)
            mae = np.bincount(index, error[mask]) / n
            cells = zip(unique.tolist(), n.tolist(), mae.tolist(), strict=True)
            of_kind = {"split": part, "kind": kind}
            rows = [{**of_kind, "group": name, "n": k, metric: mean} for name, k, mean in cells]
            if kind == "natoms":
                groups += sorted(rows, key=lambda row: int(row["group"].partition("-")[0]))
            else:
                groups += sorted(rows, key=lambda row: (-row["n"], row["group"]))
    return groups


def size_ranges(natoms: NDArray[np.int64]) -> NDArray[np.str_]:
    """Returns the range of sizes of each system, such as "20-34".

    The ranges contain similar numbers of systems.
    """
    edges = np.unique(np.quantile(natoms, np.linspace(0, 1, _SIZE_RANGES + 1)).astype(int))
    # Each range includes its start; the last range also includes its end.
    last = [*(edges[1:-1] - 1), edges[-1]]
    pairs = zip(edges.tolist(), last, strict=False)
    names = [f"{low}-{high}" if high > low else f"{low}" for low, high in pairs]
    return np.array(names)[np.searchsorted(edges[1:-1], natoms, side="right")]


def _group_tables(groups: Sequence[Mapping[str, Any]]) -> str:
    """Formats a table of errors over all splits for each kind of group, with up to 12 groups."""
    tables = []
    for kind, title in {"adsorbate": "adsorbate", "slab": "slab", "natoms": "atoms"}.items():
        of_kind = [row for row in groups if (row["split"], row["kind"]) == ("all", kind)]
        rows = {row["group"]: row for row in of_kind[:_PRINTED]}
        tables.append(results_table(title, rows, n=("systems", 0)))
        if more := len(of_kind) - len(rows):
            tables[-1] += f"\n({more} more in errors_by_group.csv)"
    return "\n\n".join(tables)


def _draw(
    out: Path,
    found: Mapping[str, Predictions],
    model: nn.Module,
    datasets: Mapping[str, Structures],
) -> None:
    panels, names = {}, {}  # by split
    for split, part in found.items():
        if part.labeled.any():
            energy, target = part.only_labeled()
            panels[split] = target, energy
            names[split] = [
                f"sid {datasets[split].name(i, part.sid[i])} {part.adsorbate[i]} on {part.slab[i]}"
                for i in np.flatnonzero(part.labeled).tolist()
            ]
    if panels:
        plots.parity(panels, out / "parity.png", names)
    encoding = getattr(model, "encoding", None)
    if plots.has_bias(getattr(encoding, "position", None)):
        plots.rpe_profiles(encoding, out / "encoding.png")


def _write_arrays(path: Path, found: Mapping[str, Predictions]) -> None:
    """Writes SPLIT_ids and SPLIT_energy (in eV); OC20's test splits get the leaderboard's names."""
    arrays: dict[str, NDArray[np.generic]] = {}
    submission = set(found) == set(TEST_SPLITS)
    for split, part in found.items():
        name = split
        if submission:
            name, count = split.removeprefix("test_"), OC20_FILES[f"all/{split}"].records
            if len(part.sid) != count:
                warn(f"{split}: {len(part.sid):,} of {count:,} systems; a submission needs all")
        arrays |= {f"{name}_ids": part.sid.astype(np.str_), f"{name}_energy": part.energy}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())
