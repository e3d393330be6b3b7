"""Differences between errors of models, with standard errors."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kit.rows import markdown
from numpy.typing import NDArray

from molflt.data.structures import Structures
from molflt.data.structures.sources import split_path
from molflt.data.structures.systems import SYSTEMS
from molflt.evaluation.predictions import open_structures

Results = Sequence[Mapping[str, Any]]
_Array = NDArray[np.float64]
_Groups = list[NDArray[np.int64]]


def differences(results: Results, first: str, alike: Sequence[str] = ()) -> str:
    """Differences of other models to one, by split, with the whole training set.

    Errors are averaged over the seeds of a model and compared system by system. The standard error
    is sqrt(V + sd_a^2 / seeds_a + sd_b^2 / seeds_b), where V is of the mean over systems; see
    `variance_of_mean`. A second table says how much of the errors is common to both: Pearson's r of
    their signed errors over systems, the mean over pairs of seeds; that of the one with itself is
    between its seeds.

    Args:
        results: of jobs.
        first: model that others are compared with.
        alike: at most two columns of systems.csv beside the data, such as molecule and metal:
            systems that have one of them in common are not independent.

    Raises:
        OSError, ValueError: as `expect_alike`.
    """
    most = max(result["job"]["fraction"] for result in results)
    own = [result for result in results if result["job"]["fraction"] == most]
    models = list(dict.fromkeys(result["job"]["model"] for result in own))
    root, splits = Path(own[0]["job"]["data"]), own[0]["job"]["splits"]
    cells: dict[str, list[object]] = {model: [model] for model in models if model != first}
    common: dict[str, list[object]] = {model: [model] for model in (first, *cells)}
    grouping = _Grouping(root / SYSTEMS, alike)
    for split in splits:
        dataset = open_structures(split_path(root, split), False)
        labels = dataset.y_relaxed
        known = np.isfinite(labels)
        groups = [numbers[known] for numbers in grouping.of(dataset)]
        errors = {model: _errors(own, model, split, labels[known], known) for model in models}
        for model, cell in cells.items():
            cell.append(_difference(errors[model], errors[first], groups))
        for model, cell in common.items():
            cell.append(_correlation(errors[model], errors[first], model == first))
    text = f"Mean ± standard error{' by ' + ' and '.join(alike) if alike else ''}"
    table = markdown([f"MAE - MAE of {first}, eV", *splits], list(cells.values()))
    shared = markdown([f"r with errors of {first}", *splits], list(common.values()))
    return f"{text}\n\n{table}\n\n{shared}"


def expect_alike(root: Path, splits: Sequence[str], alike: Sequence[str]) -> None:
    """Refuses columns that `differences` would not find, before anything is trained.

    Raises:
        FileNotFoundError: if there is no systems.csv.
        ValueError: if it lacks a column or a system.
    """
    grouping = _Grouping(root / SYSTEMS, alike)
    for split in splits:
        grouping.of(open_structures(split_path(root, split), False))


class _Grouping:
    """Groups of systems by columns of a table of their names; reads it once."""

    def __init__(self, table: Path, columns: Sequence[str]) -> None:
        self.table, self.columns = table, columns
        self.rows: dict[str | None, dict[str, str]] = {}
        if columns and not table.is_file():
            raise FileNotFoundError(
                f"{table}: no such file; expected what systems are called; leave --alike out, or "
                "make the data anew"
            )
        if columns:
            with table.open(newline="") as file:
                self.rows = {row.get("sid"): row for row in csv.DictReader(file)}

    def of(self, dataset: Structures) -> _Groups:
        """Numbers of the groups that its systems belong to, (n,) for each column."""
        found = []
        sids = [int(record.sid) for record in dataset] if self.columns else []
        for column in self.columns:
            words = [self.rows.get(str(sid), {}).get(column) for sid in sids]
            if None in words:
                sid = sids[words.index(None)]
                known = ", ".join(next(iter(self.rows.values()), {}))
                raise ValueError(
                    f"{self.table}: no {column} of sid {sid}; choose --alike among its columns, "
                    f"{known}, or make the data anew"
                )
            found.append(np.unique(np.array(words), return_inverse=True)[1])
        return found


def variance_of_mean(values: _Array, groups: _Groups) -> float:
    """Standard error of the mean of values (n,) that are independent only between groups.

    Without groups it is s^2 / n. With one grouping it is the sum over its G groups of the squared
    sums of x - mean, times G / (G - 1) / n^2; with two it is V_1 + V_2 - V_12, with 12 the pairs of
    both (Cameron, Gelbach and Miller, J. Bus. Econ. Stat. 29, 238, 2011), but at least the larger
    of V_1 and V_2. Few groups make it too small; one makes it unknown, nan.
    """
    away = values - values.mean()

    def by(numbers: NDArray[np.int64]) -> float:
        count = int(numbers.max()) + 1
        sums = np.bincount(numbers, weights=away)
        return float(count / (count - 1) * (sums**2).sum()) if count > 1 else float("nan")

    if not groups:
        groups = [np.arange(len(values))]
    each = [by(numbers) for numbers in groups]
    both = np.unique(np.stack(groups), axis=1, return_inverse=True)[1].ravel()
    total = max(sum(each) - by(both), *each) if len(each) > 1 else each[0]
    return total / len(values) ** 2


def _errors(
    results: Results, model: str, split: str, labels: _Array, known: NDArray[np.bool_]
) -> _Array | None:
    """Prediction - label, (seeds, labeled systems), eV; None if the model has diverged."""
    found = [r["splits"][split]["energy_eV"] for r in results if r["job"]["model"] == model]
    return None if None in found else np.array(found)[:, known] - labels


def _difference(errors: _Array | None, others: _Array | None, groups: _Groups) -> str:
    if errors is None or others is None or not errors.size:
        return "–"
    errors, others = np.abs(errors), np.abs(others)
    by_system = errors.mean(axis=0) - others.mean(axis=0)
    variance = variance_of_mean(by_system, groups)
    for one in (errors, others):
        variance += one.mean(axis=1).var(ddof=1) / len(one) if len(one) > 1 else 0.0
    return f"{by_system.mean():.3f} ± {variance**0.5:.3f}"


def _correlation(errors: _Array | None, others: _Array | None, itself: bool) -> str:
    if errors is None or others is None or errors.shape[-1] < 2 or (itself and len(errors) < 2):
        return "–"
    r = np.corrcoef(errors, others)[: len(errors), len(errors) :]
    return f"{(r[np.triu_indices(len(r), 1)] if itself else r).mean():.2f}"
