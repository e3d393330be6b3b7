"""Results of jobs as rows, a table and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.pictures import curves, legend
from kit.rows import Row, Rows, markdown, mean_sd, names, pick, write_csv

from molflt.metrics import EWT_THRESHOLD
from molflt.plots.figure import GREY, SERIES, picture, plain_numbers
from peers_kit.differences import Results, differences
from peers_kit.models import FITS
from peers_kit.pool import Jobs, read


def results_of(jobs: Jobs) -> Results:
    """Results of all finished jobs."""
    return [read(path) for path in jobs if path.exists()]


def rows_of(results: Results) -> Rows:
    """One row per job and split."""
    return [
        {
            "model": result["job"]["model"],
            "fraction": result["job"]["fraction"],
            "seed": result["job"]["seed"],
            "split": split,
            "mae_eV": found["mae_eV"],
            "ewt_percent": found["ewt_percent"],
            "n": found["n"],
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
    """A line per model, best first, for each share of the training set.

    Args:
        rows: of `rows_of`.
        tried: learning rates that were tried, by model.
    """
    splits = names(rows, "split")
    head = ["model", "seeds", "parameters", "lr (tried)", "steps", "CPU min", "peak MB"]
    head += [f"{split} MAE, eV" for split in splits] + [f"{split} EwT, %" for split in splits]
    parts = []
    for fraction in sorted(names(rows, "fraction"), reverse=True):
        own = pick(rows, fraction=fraction)
        order = sorted(names(own, "model"), key=lambda model: _mean(own, model, splits[0]))
        lines = [_line(pick(own, model=model), splits, tried.get(model, 1)) for model in order]
        text = f"{fraction:.0%} of the training set" if fraction < 1 else "All of the training set"
        parts.append(f"{text}\n\n{markdown(head, lines)}")
    last = (
        f"Mean ± standard deviation over seeds; EwT: errors below {EWT_THRESHOLD} eV. Steps, CPU "
        "minutes and memory of the process (with evaluation) are means. –: diverged or no labels."
    )
    return "\n\n".join([*parts, last])


def _line(own: Rows, splits: Sequence[str], tried: int) -> list[object]:
    """Results of one model."""
    first, jobs = own[0], pick(own, split=splits[0])
    steps = [row["steps"] for row in jobs if row["steps"] is not None]
    rate = "–" if first["lr"] is None else f"{first['lr']:g} ({tried})"
    return [
        first["model"],
        len(jobs),
        "–" if first["parameters"] is None else f"{first['parameters']:,}",
        rate,
        f"{statistics.fmean(steps):,.0f}" if steps else "–",
        f"{statistics.fmean(row['cpu_minutes'] for row in jobs):.2f}",
        f"{statistics.fmean(row['peak_memory_MB'] for row in jobs):,.0f}",
        *(_cell(pick(own, split=split), "mae_eV", 4) for split in splits),
        *(_cell(pick(own, split=split), "ewt_percent", 1) for split in splits),
    ]


def _cell(rows: Rows, measure: str, digits: int) -> str:
    """Nothing if it is missing for one seed: a mean of the others would mislead."""
    found = [row[measure] for row in rows]
    return "–" if None in found else mean_sd(found, digits)


def _mean(rows: Rows, model: str, split: str) -> float:
    found = [row["mae_eV"] for row in pick(rows, model=model, split=split)]
    return float("inf") if None in found else statistics.fmean(found)


def write(
    out: Path,
    results: Results,
    tried: Mapping[str, int],
    against: str | None = None,
    alike: Sequence[str] = (),
) -> str:
    """Writes comparison.csv, .md and the pictures; returns the table.

    Args:
        out: folder.
        results: of `results_of`.
        tried: learning rates that were tried, by model.
        against: model from which differences are given, see `differences`.
        alike: columns of systems.csv for them.
    """
    rows = rows_of(results)
    write_csv(out / "comparison.csv", rows)
    text = table(rows, tried)
    if against is not None:
        text += "\n\n" + differences(results, against, alike)
    (out / "comparison.md").write_text(f"{text}\n")
    split = names(rows, "split")[0]
    draw_time(out / "error-cpu.png", results, split)
    if len(names(rows, "fraction")) > 1:
        draw_size(out / "error-size.png", rows, split)
    return text


def draw_time(png: Path, results: Results, split: str) -> None:
    """Mean error over seeds against CPU time, of the largest share of the training set.

    What is not trained step by step has one point; the median is a line across. A model that has
    diverged with one seed has no line, as it has no mean in the table.
    """
    most = max(result["job"]["fraction"] for result in results)
    own = [result for result in results if result["job"]["fraction"] == most]
    diverged = {result["job"]["model"] for result in own if not result["curve"]}
    own = [result for result in own if result["job"]["model"] not in diverged]
    points: dict[str, list[tuple[float, float]]] = {}
    for model in dict.fromkeys(result["job"]["model"] for result in own):
        found = [result["curve"] for result in own if result["job"]["model"] == model]
        # as many points as the shortest curve: slow models may jump over one
        points[model] = [
            (
                statistics.fmean(point["cpu_seconds"] for point in same) / 60,
                statistics.fmean(point["mae_eV"] for point in same),
            )
            for same in zip(*found, strict=False)
        ]
    median = points.pop("median", None)
    with picture(png, figsize=(7.2, 4.8)) as figure:
        axes = figure.subplots()
        labels = {"xlabel": "CPU time of training / minutes", "ylabel": f"{split} MAE / eV"}
        _draw(axes, points, labels)
        if median:
            axes.axhline(median[0][1], color=GREY, linestyle=":", label="median")
        legend(figure, axes)


def draw_size(png: Path, rows: Rows, split: str) -> None:
    """Mean error over seeds against the share of the training set."""
    points: dict[str, list[tuple[float, float]]] = {}
    for model in names(rows, "model"):
        own = pick(rows, model=model, split=split)
        means = [(share, _mean(pick(own, fraction=share), model, split)) for share in _shares(own)]
        points[model] = [point for point in means if point[1] < float("inf")]
    with picture(png, figsize=(7.2, 4.8)) as figure:
        axes = figure.subplots()
        labels = {"xlabel": "share of the training set", "ylabel": f"{split} MAE / eV"}
        _draw(axes, points, labels)
        legend(figure, axes)


def _draw(
    axes: Any, points: Mapping[str, Sequence[tuple[float, float]]], labels: Mapping[str, str]
) -> None:
    """Curves with 0.2 in place of 2e-1 at the axes."""
    curves(axes, points, _styles(points), **labels)
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis, wide=False)


def _shares(rows: Sequence[Row]) -> list[float]:
    return sorted({row["fraction"] for row in rows})


def _styles(models: Sequence[str] | Mapping[str, object]) -> dict[str, tuple[int, str]]:
    """Colors and lines: dashes from the second round of colors on."""
    order = [model for model in models if model not in FITS]
    order += [model for model in models if model in FITS]
    count = len(SERIES)
    return {model: (i % count, "-" if i < count else "--") for i, model in enumerate(order)}
