"""``molflt compare``: compares runs in a table, as JSON and in pictures."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from molflt.evaluation.results import align
from molflt.evaluation.runs import (
    Run,
    differences,
    measures_of,
    notes,
    read_runs,
    standard_error,
)
from molflt.files import shown, write_atomically
from molflt.metrics import Metric
from molflt.plots import further_formats, intervals, overlaid_curves

__all__ = ["compare"]

_WIDEST = 28  # characters of a cell


def compare(
    runs: list[Path],
    out: Path | None = None,
    json: bool = False,
    pictures: list[Literal["svg", "pdf"]] | None = None,
) -> None:
    """Compares runs: differences between their configurations, sizes, times and metrics.

    Metrics come from results.json. They are shown by split, with the standard error of the mean
    over the systems where it is known. A star marks the best value of a row.

    Args:
        runs: folders of two or more training runs.
        out: folder for comparison.json, curves.png (training curves) and metrics.png (the metric
            that chooses the best weights, by split); by default nothing is written.
        json: print JSON instead of a table.
        pictures: additional formats for the pictures.
    """
    if pictures and out is None:
        raise ValueError("--pictures: expected --out FOLDER to write them to; got none; give one")
    found = read_runs(runs)
    text = json_format.dumps(_as_json(found), indent=2, allow_nan=False)
    print(text if json else _as_table(found))
    if out is not None:
        written = [out / "comparison.json"]
        write_atomically(written[0], f"{text}\n".encode())
        with further_formats(pictures or []) as more:
            written += _draw(found, out)
        written += more
        if not json:
            print(f"\nwritten: {', '.join(map(str, written))}")


def _as_json(runs: Sequence[Run]) -> dict[str, object]:
    return {
        "runs": {
            run.name: {
                "path": str(run.path),
                "recipe": run.config["recipe"],
                "parameters": run.parameters,
                "steps": run.step,
                "seconds": run.seconds,
                "measure": f"val_{run.measure}",
                "best": run.best[0] if run.best else None,
                "best_step": run.best[1] if run.best else None,
                "results": run.results,
                "standard_errors": {
                    split: {
                        name: error
                        for name in row
                        if (error := standard_error(run, split, name)) is not None
                    }
                    for split, row in run.results.items()
                },
            }
            for run in runs
        },
        "differences": {
            key: dict(zip((run.name for run in runs), values, strict=True))
            for key, values in differences(runs).items()
        },
        "notes": notes(runs),
    }


def _as_table(runs: Sequence[Run]) -> str:
    """Returns a table with a column per run and a row per metric and per option that differs."""
    rows: list[list[str]] = [["", *(run.name for run in runs)]]
    for key, own in differences(runs).items():
        rows.append([key, *("-" if value is None else _plain(value) for value in own)])
    rows.append(["parameters", *(f"{run.parameters:,}" for run in runs)])
    rows.append(["steps", *("-" if run.step is None else f"{run.step:,}" for run in runs)])
    rows.append(["time", *(run.time for run in runs)])
    for measure in dict.fromkeys(run.measure for run in runs):
        best: list[tuple[float, int] | None]
        best = [run.best if run.measure == measure else None for run in runs]
        metric = next(run.metrics[measure] for run in runs if run.measure == measure)
        values: list[float | None] = [None if one is None else one[0] for one in best]
        cells = _marked(values, _formatter(metric), metric)
        steps = ["" if one is None else f" at {one[1]:,}" for one in best]
        rows.append([f"val {measure}, best", *(c + s for c, s in zip(cells, steps, strict=True))])
    rows += [_metric_row(runs, split, name) for split, name in measures_of(runs)]
    text = align([[_cut(cell) for cell in row] for row in rows], text_columns=len(rows[0]))
    return "\n".join([text, "* best of the row; ± standard error over the systems", *notes(runs)])


def _metric_row(runs: Sequence[Run], split: str, name: str) -> list[str]:
    metrics = [run.metrics[name] for run in runs if name in run.metrics]
    metric = metrics[0] if metrics else None
    values = [run.results.get(split, {}).get(name) for run in runs]
    cells = _marked(values, _formatter(metric), metric)
    for place, run in enumerate(runs):
        error = standard_error(run, split, name) if split in run.results else None
        if error is not None:
            cells[place] += f" ± {_formatter(metric)(error)}"
    return [f"{split} {name}", *cells]


def _formatter(metric: Metric | None) -> Callable[[float], str]:
    if metric is None:
        return lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    digits = metric.digits + (metric.digits > 2)  # as in evaluations
    return lambda value: f"{value:.{digits}f}"


def _marked(
    values: Sequence[float | None], form: Callable[[float], str], metric: Metric | None
) -> list[str]:
    """Returns the cells of a row, with a star at the best of several values."""
    known = [value for value in values if value is not None]
    best = None
    if metric is not None and len(known) > 1:
        best = max(known) if metric.largest_is_best else min(known)
    return ["-" if value is None else form(value) + "*" * (value == best) for value in values]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def _cut(cell: str) -> str:
    """Returns the end of a long cell, because paths differ at their ends."""
    return cell if len(cell) <= _WIDEST else f"…{cell[1 - _WIDEST :]}"


def _draw(runs: Sequence[Run], out: Path) -> list[Path]:
    """Draws the curves of all runs, and the main metric of the first run by split."""
    measure, metrics = runs[0].measure, runs[0].metrics
    validated = metrics[measure]._replace(label=f"validation {metrics[measure].label}")
    panels = {"train_loss": Metric("training loss", scale="log"), f"val_{measure}": validated}
    written = []
    curves = {run.name: run.columns for run in runs if "step" in run.columns}
    if any(column in columns for columns in curves.values() for column in panels):
        overlaid_curves(curves, panels, out / "curves.png")
        written.append(out / "curves.png")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for run in runs:
        for split, row in run.results.items():
            value = row.get(measure)
            if value is not None and math.isfinite(value):
                error = standard_error(run, split, measure) or 0.0
                count = f", n = {row['n']:,}" if row.get("n") else ""
                label = f"{split}{count}\n{metrics[measure].axis} ± standard error, where known"
                found.setdefault(label, {})[run.name] = (value, error)
    if found:
        intervals(found, out / "metrics.png", metrics[measure].largest_is_best)
        written.append(out / "metrics.png")
    return written
