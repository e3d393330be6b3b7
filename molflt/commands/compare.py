"""``molflt compare``: compares runs in a table, as JSON and in figures."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from molflt.evaluation.results import align, number_format
from molflt.evaluation.runs import Run, differences, measures_of, notes, read_runs, standard_error
from molflt.files import shown, write_atomically
from molflt.metrics import Metric
from molflt.plots import further_formats, overlaid_curves

_WIDEST = 28  # maximum number of characters in a cell
# Metrics that only `molflt evaluate` computes, by the value that is best
_LARGEST = [f"{name}_percent" for name in ("f1", "glue", "matthews", "pearson", "spearman")]
_LARGEST += ["adwt_percent", "bleu", "chrf", "residue_accuracy_percent"]
_SMALLEST = ("final_loss", "position_error_A", "residue_perplexity")


def compare(
    runs: list[Path],
    out: Path | None = None,
    json: bool = False,
    pictures: list[Literal["svg", "pdf"]] | None = None,
) -> None:
    """Compares configurations, sizes, times and metrics of runs.

    Metrics come from results.json and are shown by split. Energy MAEs of `is2re`, EwT, and
    accuracies of sentences and images are followed by their standard errors over the items of the
    split. A star marks the best value of a row.

    Args:
        runs: folders of two or more training runs.
        out: folder for comparison.json and curves.png (training loss, and the metric that selects
            the best weights); by default nothing is written.
        json: print JSON instead of a table.
        pictures: additional formats for the figures.
    """
    if pictures and out is None:
        raise ValueError("--pictures: expected --out FOLDER for the figures; got none")
    contents = read_runs(runs)
    text = json_format.dumps(_as_json(contents), indent=2, allow_nan=False)
    print(text if json else _as_table(contents))
    if out is not None:
        written = [out / "comparison.json"]
        write_atomically(written[0], f"{text}\n".encode())
        with further_formats(pictures or []) as more:
            written += _draw(contents, out)
        written += more
        if not json:
            print(f"\nwritten: {', '.join(map(str, written))}")


def _as_json(runs: Sequence[Run]) -> dict[str, object]:
    by_name = {}
    for run in runs:
        errors: dict[str, dict[str, float]] = {split: {} for split in run.results}
        for split, row in run.results.items():
            for name in row:
                if (error := standard_error(run, split, name)) is not None:
                    errors[split][name] = error
        by_name[run.name] = {
            "path": str(run.path),
            "recipe": run.config["recipe"],
            "parameters": run.parameters,
            "steps": run.step,
            "seconds": run.seconds,
            "measure": f"val_{run.measure}",
            "best": run.best.value if run.best else None,
            "best_step": run.best.step if run.best else None,
            "results": run.results,
            "standard_errors": errors,
        }
    different = differences(runs).items()
    return {
        "runs": by_name,
        "differences": {key: dict(zip(by_name, values, strict=True)) for key, values in different},
        "notes": notes(runs),
    }


def _as_table(runs: Sequence[Run]) -> str:
    rows: list[list[str]] = [["", *(run.name for run in runs)]]
    rows += [[key, *map(_cell, values)] for key, values in differences(runs).items()]
    rows.append(["parameters", *(f"{run.parameters:,}" for run in runs)])
    rows.append(["steps", *("-" if run.step is None else f"{run.step:,}" for run in runs)])
    rows.append(["time", *(run.time for run in runs)])
    for measure in dict.fromkeys(run.measure for run in runs):
        bests = [run.best if run.measure == measure else None for run in runs]
        ends = [f" at {best.step:,}" if best else "" for best in bests]
        values = [best.value if best else None for best in bests]
        rows.append([f"val {measure}, best", *_marked(runs, measure, values, ends)])
    for split, name in measures_of(runs):
        form = number_format(name, _metric(runs, name))
        errors = [standard_error(run, split, name) for run in runs]
        ends = ["" if error is None else f" ± {error:{form}}" for error in errors]
        values = [run.results.get(split, {}).get(name) for run in runs]
        rows.append([f"{split} {name}", *_marked(runs, name, values, ends)])
    text = align([[row[0], *map(_cell, row[1:])] for row in rows], text_columns=len(rows[0]))
    stars = "* best of the row" + ("; ± standard error" if " ± " in text else "")
    return "\n".join([text, stars, *notes(runs)])


def _metric(runs: Sequence[Run], name: str) -> Metric | None:
    return next((run.metrics[name] for run in runs if name in run.metrics), None)


def _marked(
    runs: Sequence[Run], name: str, values: Sequence[float | None], ends: Sequence[str]
) -> list[str]:
    """Formats a row of values followed by `ends`; a star marks the best of several values."""
    metric, known = _metric(runs, name), [value for value in values if value is not None]
    largest = name in _LARGEST if metric is None else metric.largest_is_best
    best = None
    if len(known) > 1 and (largest or metric is not None or name in _SMALLEST):
        best = max(known) if largest else min(known)
    form = "," if all(isinstance(value, int) for value in known) else number_format(name, metric)
    return [
        "-" if value is None else f"{value:{form}}{'*' if value == best else ''}{end}"
        for value, end in zip(values, ends, strict=True)
    ]


def _cell(value: object) -> str:
    """Formats a value; keeps only the end of a long text, because paths differ at the end."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else shown(value)
    return text if len(text) <= _WIDEST else f"…{text[1 - _WIDEST :]}"


def _draw(runs: Sequence[Run], out: Path) -> list[Path]:
    measure, metrics = runs[0].measure, runs[0].metrics
    validated = metrics[measure]._replace(label=f"validation {metrics[measure].label}")
    panels = {"train_loss": Metric("training loss", scale="log"), f"val_{measure}": validated}
    curves = {run.name: run.columns for run in runs if "step" in run.columns}
    file = out / "curves.png"
    return [file] if overlaid_curves(curves, panels, file) else []
