"""Rows, tables and figures of job results."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kit.pictures import curves
from kit.rows import Rows, markdown, mean_sd, names, pick, write_csv
from kit.runs import publish
from kit.systems import SYSTEMS
from numpy.typing import NDArray

from molflt.data.structures import Structures
from molflt.data.structures.sources import split_path
from molflt.evaluation.predictions import open_structures
from molflt.evaluation.results import read_rows
from molflt.metrics import EWT_THRESHOLD
from molflt.plots.figure import GREY, legend_outside, picture, plain_numbers
from peers_kit.models import FITS

Results = Sequence[Mapping[str, Any]]
Curves = dict[str, list[tuple[float, float]]]
_Array = NDArray[np.float64]


def rows_of(results: Results) -> Rows:
    """Returns one row per job and split."""
    return [
        {
            **{key: result["job"][key] for key in ("model", "fraction", "seed")},
            "split": split,
            **{key: found[key] for key in ("mae_eV", "ewt_percent", "n")},
            "parameters": result["parameters"],
            "lr": result["chosen"].get("lr"),
            "steps": result["steps"],
            "cpu_minutes": result["cpu_seconds"] / 60,
            "peak_memory_MB": result["peak_memory_MB"],
        }
        for result in results
        for split, found in result["splits"].items()
    ]


def table(rows: Rows, tried: Mapping[str, int]) -> str:
    """Formats the results for each fraction of the training set, with the best model first."""
    splits = names(rows, "split")
    head = ["model", "seeds", "parameters", "lr (tried)", "steps", "CPU min", "peak MB"]
    head += [f"{split} MAE, eV" for split in splits] + [f"{split} EwT, %" for split in splits]
    parts = []
    for fraction in sorted(names(rows, "fraction"), reverse=True):
        own = pick(rows, fraction=fraction)
        order = sorted(names(own, "model"), key=lambda model: _mean(own, model, splits[0]))
        lines = [_line(pick(own, model=model), splits, tried.get(model, 1)) for model in order]
        text = f"{fraction:.0%} of the training set" if fraction < 1 else "The whole training set"
        parts.append(f"{text}\n\n{markdown(head, lines)}")
    last = (
        f"Values are mean ± standard deviation over seeds. EwT is the share of errors below "
        f"{EWT_THRESHOLD} eV. Steps and CPU minutes of training and the peak memory of the process "
        "are means. In errors, a dash means that a model diverged or that labels are missing."
    )
    return "\n\n".join([*parts, last])


def _line(own: Rows, splits: Sequence[str], tried: int) -> list[object]:
    """Returns the results of one model as a line of the table."""
    first, jobs = own[0], pick(own, split=splits[0])
    steps = [row["steps"] for row in jobs if row["steps"] is not None]
    return [
        first["model"],
        len(jobs),
        "–" if first["parameters"] is None else f"{first['parameters']:,}",
        "–" if first["lr"] is None else f"{first['lr']:g} ({tried})",
        f"{statistics.fmean(steps):,.0f}" if steps else "–",
        f"{statistics.fmean(row['cpu_minutes'] for row in jobs):.2f}",
        f"{statistics.fmean(row['peak_memory_MB'] for row in jobs):,.0f}",
        *(_cell(pick(own, split=split), "mae_eV", 4) for split in splits),
        *(_cell(pick(own, split=split), "ewt_percent", 1) for split in splits),
    ]


def _cell(rows: Rows, measure: str, digits: int) -> str:
    """Formats the mean and the spread; returns a dash if the value of a seed is missing."""
    found = [row[measure] for row in rows]
    return "–" if None in found else mean_sd(found, digits)


def _mean(rows: Rows, model: str, split: str) -> float:
    found = [row["mae_eV"] for row in pick(rows, model=model, split=split)]
    return float("inf") if None in found else statistics.fmean(found)


def write(
    out: Path, results: Results, tried: Mapping[str, int], against: str | None, alike: Sequence[str]
) -> None:
    """Writes comparison.csv, comparison.md and the figures, and prints the table."""
    rows = rows_of(results)
    write_csv(out / "comparison.csv", rows)
    text = table(rows, tried)
    if against is not None:
        text += "\n\n" + differences(results, against, alike)
    split = names(rows, "split")[0]
    points, median = error_by_time(whole(results))
    _draw(out / "error-cpu.png", points, "CPU time of training / minutes", split, median)
    if len(names(rows, "fraction")) > 1:
        points = error_by_size(rows, split)
        _draw(out / "error-size.png", points, "share of the training set", split)
    publish(out / "comparison.md", text)


def whole(results: Results) -> Results:
    """Returns the results for the largest fraction of the training set."""
    most = max(result["job"]["fraction"] for result in results)
    return [result for result in results if result["job"]["fraction"] == most]


def error_by_time(results: Results) -> tuple[Curves, float | None]:
    """Returns the curve of each model, and the error of the model "median".

    Points of a curve are (CPU minutes, error), averaged over seeds. Models that diverged with any
    seed have no curve. Slow models may skip points. The average of curves of different lengths has
    the length of the shortest curve.
    """
    diverged = {result["job"]["model"] for result in results if not result["curve"]}
    points: Curves = {}
    for model in dict.fromkeys(result["job"]["model"] for result in results):
        if model not in diverged:
            found = [result["curve"] for result in results if result["job"]["model"] == model]
            points[model] = [
                (
                    statistics.fmean(point["cpu_seconds"] for point in same) / 60,
                    statistics.fmean(point["mae_eV"] for point in same),
                )
                for same in zip(*found, strict=False)
            ]
    median = points.pop("median", None)
    return points, median[0][1] if median else None


def error_by_size(rows: Rows, split: str) -> Curves:
    """Returns points (fraction of the training set, error averaged over seeds) for each model."""
    points: Curves = {}
    for model in names(rows, "model"):
        own = pick(rows, model=model, split=split)
        shares = sorted(names(own, "fraction"))
        means = [(share, _mean(pick(own, fraction=share), model, split)) for share in shares]
        points[model] = [point for point in means if point[1] < float("inf")]
    return points


def _draw(png: Path, points: Curves, xlabel: str, split: str, median: float | None = None) -> None:
    """Draws a curve for each model, with networks first."""
    points = {model: points[model] for model in sorted(points, key=FITS.__contains__)}
    with picture(png, figsize=(7.2, 4.8)) as figure:
        axes = figure.subplots()
        curves(axes, points, xlabel=xlabel, ylabel=f"{split} MAE / eV")
        for axis in (axes.xaxis, axes.yaxis):
            plain_numbers(axis, wide=False)
        if median is not None:
            axes.axhline(median, color=GREY, linestyle=":", label="median")
        legend_outside(figure, axes, "lower", 4, fontsize="small")


def differences(results: Results, first: str, alike: Sequence[str] = ()) -> str:
    """Formats the differences in error between `first` and all other models.

    Only models trained on the largest fraction of the training set are compared.

    Errors are averaged over the seeds of a model and compared for each system. The standard error
    is sqrt(V + sd_a^2 / seeds_a + sd_b^2 / seeds_b), where V is the `variance_of_mean` over
    systems. A second table lists Pearson's r between the signed errors of both models, averaged
    over pairs of seeds. Systems with the same value in one of the columns `alike` of systems.csv
    (up to two columns) are not treated as independent.
    """
    own = whole(results)
    models = list(dict.fromkeys(result["job"]["model"] for result in own))
    root, splits = Path(own[0]["job"]["data"]), own[0]["job"]["splits"]
    cells: dict[str, list[object]] = {model: [model] for model in models if model != first}
    common: dict[str, list[object]] = {model: [model] for model in (first, *cells)}
    for split in splits:
        dataset = open_structures(split_path(root, split), False)
        labels = dataset.y_relaxed
        known = np.isfinite(labels)
        groups = [numbers[known] for numbers in groups_of(root, dataset, alike)]
        errors = {model: _errors(own, model, split, labels[known], known) for model in models}
        for model, cell in cells.items():
            cell.append(_difference(errors[model], errors[first], groups))
        for model, cell in common.items():
            cell.append(_correlation(errors[model], errors[first], model == first))
    text = f"Mean ± standard error{' by ' + ' and '.join(alike) if alike else ''}"
    table = markdown([f"MAE - MAE of {first}, eV", *splits], list(cells.values()))
    shared = markdown([f"r with errors of {first}", *splits], list(common.values()))
    return f"{text}\n\n{table}\n\n{shared}"


def groups_of(root: Path, dataset: Structures, columns: Sequence[str]) -> list[NDArray[np.int64]]:
    """Returns, for each of the `columns` of systems.csv, the group numbers (n,) of the systems."""
    if not columns:
        return []
    rows = {row["sid"]: row for row in read_rows(root / SYSTEMS)}
    own = [rows.get(str(int(record.sid)), {}) for record in dataset]
    return [np.unique([row[name] for row in own], return_inverse=True)[1] for name in columns]


def variance_of_mean(values: _Array, groups: Sequence[NDArray[np.int64]]) -> float:
    """Estimates the variance of the mean of values (n,), which may be correlated within groups.

    Without groups, it is s^2 / n. With one grouping into G groups, it is G / (G - 1) / n^2 times
    the sum over groups of S_g^2, where S_g is the sum of x - mean in group g. With two groupings,
    it is V_1 + V_2 - V_12, where 12 denotes groups that agree in both (Cameron, Gelbach and Miller,
    J. Bus. Econ. Stat. 29, 238, 2011), but at least the larger of V_1 and V_2. The estimate is too
    small for few groups and nan for a single group.
    """
    away = values - values.mean()

    def by(numbers: NDArray[np.int64]) -> float:
        count = int(numbers.max()) + 1
        sums = np.bincount(numbers, weights=away)
        return float(count / (count - 1) * (sums**2).sum()) if count > 1 else float("nan")

    groups = groups or [np.arange(len(values))]
    each = [by(numbers) for numbers in groups]
    both = np.unique(np.stack(groups), axis=1, return_inverse=True)[1].ravel()
    total = max(sum(each) - by(both), *each) if len(each) > 1 else each[0]
    return total / len(values) ** 2


def _errors(
    results: Results, model: str, split: str, labels: _Array, known: NDArray[np.bool_]
) -> _Array | None:
    """Returns signed errors (seeds, labeled systems) in eV, or None if a seed diverged."""
    found = [r["splits"][split]["energy_eV"] for r in results if r["job"]["model"] == model]
    return None if None in found else np.array(found)[:, known] - labels


def _difference(
    errors: _Array | None, others: _Array | None, groups: Sequence[NDArray[np.int64]]
) -> str:
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
