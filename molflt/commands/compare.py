"""``molflt compare``: contents of run folders, compared in a table, as JSON and in figures."""

import json as json_format
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.results import Results, align, number_format, own_results, read_rows
from molflt.files import shown, write_atomically
from molflt.metrics import Metric
from molflt.plots import further_formats, overlaid_curves
from molflt.plots.training import read_columns
from molflt.training.checkpoint import count_parameters, read_checkpoint
from molflt.training.config import read_config
from molflt.training.recipes import Recipe
from molflt.training.run_folder import Best, best_of, duration

_WIDEST = 28  # maximum number of characters in a cell
# Metrics that only `molflt evaluate` computes, by the value that is best
_LARGEST = [f"{name}_percent" for name in ("f1", "glue", "matthews", "pearson", "spearman")]
_LARGEST += ["adwt_percent", "bleu", "chrf", "residue_accuracy_percent"]
_SMALLEST = ("final_loss", "position_error_A", "residue_perplexity")

_Columns = Mapping[str, NDArray[np.float64]]


class Run:
    """Contents of a run folder; parts whose files are missing are empty.

    Attributes:
        name: short, unique name.
        measure: name of the metric that selects the best weights.
        parameters: number of parameters, including frozen parameters.
        provenance: entries of molflt in the last checkpoint, such as "seconds" and "data".
        seconds: time of training and validation; None in runs from earlier versions.
        unmeasured: reason why the results in the folder do not belong to the run; empty if they do.
        errors: |error| of the systems in eV, by split, if known.
    """

    def __init__(self, path: Path, name: str) -> None:
        attempt = self.attempt
        self.path, self.name, self.config = path, name, read_config(path)
        last, table = path / "checkpoints/last.ckpt", path / "metrics.csv"
        predictions = path / "predictions.csv"
        task: Any = Recipe.of(self.config).load("task")
        self.best: Best | None = attempt(lambda: best_of(path), None)
        self.metrics: Mapping[str, Metric] = task.metrics
        self.measure: str = task.best if self.best is None else self.best.metric
        self.parameters: int = attempt(lambda: count_parameters(path, self.config), 0)
        state = attempt(lambda: read_checkpoint(last), {}) if last.is_file() else {}
        self.step: int | None = state.get("global_step")
        self.provenance: Mapping[str, Any] = state.get("molflt", {})
        self.seconds: float | None = self.provenance.get("seconds")
        self.time = "-" if self.seconds is None else duration(self.seconds)
        self.columns: _Columns = attempt(lambda: read_columns(table), {}) if table.is_file() else {}
        files = [path / f"checkpoints/{kind}.safetensors" for kind in ("best", "last")]
        weights = [file for file in files if file.is_file()][:1]
        self.results: Results
        self.unmeasured: str
        self.results, self.unmeasured = attempt(lambda: own_results(path, weights), ({}, ""))
        self.predictions: Sequence[Mapping[str, str]] = []
        if self.results:
            self.predictions = attempt(lambda: read_rows(predictions), [])
        self.errors: _Columns = attempt(lambda: _errors(self.predictions), {})

    def attempt(self, read: Callable[[], Any], otherwise: Any) -> Any:
        """Returns `read()`; subclasses may return `otherwise` if a file is damaged."""
        return read()


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
        runs: folders of training runs.
        out: folder for comparison.json and curves.png (training loss, and the metric that selects
            the best weights); by default nothing is written.
        json: print JSON instead of a table.
        pictures: additional formats for the figures.
    """
    if pictures and out is None:
        raise ValueError("--pictures: expected --out FOLDER for the figures; got none")
    paths = {Path(os.path.abspath(path)): path for path in runs}  # repeated paths count once
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    contents = [Run(path, key.relative_to(parent).as_posix()) for key, path in paths.items()]
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
        errors = {
            split: {name: x for name in row if (x := standard_error(run, split, name)) is not None}
            for split, row in run.results.items()
        }
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
    measures = [(split, name) for run in runs for split, row in run.results.items() for name in row]
    splits = list(dict.fromkeys(split for split, _ in measures))
    for split, name in sorted(dict.fromkeys(measures), key=lambda pair: splits.index(pair[0])):
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


def _errors(rows: Sequence[Mapping[str, str]]) -> dict[str, NDArray[np.float64]]:
    """Returns |error_eV| by split, or an empty dictionary if this column is missing."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.get("error_eV"):
            errors.setdefault(row["split"], []).append(abs(float(row["error_eV"])))
    return {split: np.array(values) for split, values in errors.items()}


def standard_error(run: Run, split: str, name: str) -> float | None:
    """Returns the standard error of a metric over the systems of a split; None if unknown.

    The standard error of a percentage is unknown if the percentage is 0 or 100.
    """
    row = run.results.get(split, {})
    value, count = row.get(name), row.get("n")
    if value is None or not count or count < 0:
        return None
    errors = run.errors.get(split, np.zeros(0))
    if name == "mae_eV" and len(errors) == count > 1:
        return float(errors.std(ddof=1) / math.sqrt(count))
    if name in run.metrics and run.metrics[name].unit == "%":
        return math.sqrt(max(0.0, value * (100.0 - value)) / count) or None
    return None


def differences(runs: Sequence[Run]) -> dict[str, list[object]]:
    """Returns the values of the runs for each option that differs; None if an option is missing."""
    configs = [dict(flat_options(run.config)) for run in runs]
    different = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key) for config in configs]
        if key != "run" and any(value != values[0] for value in values):
            different[key] = values
    return different


def flat_options(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted keys of a configuration and their values."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def notes(runs: Sequence[Run]) -> list[str]:
    """Returns lines describing differences that make the runs hard to compare."""
    lines = []
    recipes = dict.fromkeys(run.config["recipe"] for run in runs)
    if len(recipes) > 1:
        lines.append(f"different recipes ({', '.join(recipes)}): their metrics are not comparable")
    for part, verb in (("train", "trained"), ("val", "validated")):
        groups: dict[str, list[str]] = {}  # names of runs by description of their data
        for run in runs:
            data = run.provenance.get("data", {})
            if part in data:
                key = json_format.dumps(data[part], sort_keys=True)
                groups.setdefault(key, []).append(run.name)
        if len(groups) > 1:
            sides = " | ".join(", ".join(names) for names in groups.values())
            lines.append(f"different data: {sides} were {verb} on different items")
    lines += [f"omitted: {run.unmeasured}" for run in runs if run.unmeasured]
    if missing := [str(run.path) for run in runs if not run.results]:
        lines.append(f"not evaluated: {', '.join(missing)}; run molflt evaluate RUN")
    return lines
