"""Contents of run folders, and comparison of runs: configurations, times and results."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.results import RESULTS, Results, run_weights, why_of_others
from molflt.files import csv_rows, read_json, shown
from molflt.metrics import Metric
from molflt.plots.training import read_columns
from molflt.training.checkpoint import count_parameters, read_checkpoint
from molflt.training.config import read_config
from molflt.training.recipes import Recipe
from molflt.training.run_folder import Best, best_of, duration

Row = Mapping[str, str]
_Columns = Mapping[str, NDArray[np.float64]]


class Run:
    """Contents of a run folder; parts whose files are missing are empty.

    Args:
        path: folder of the run.
        name: short, unique name.
        attempt: function that is called as attempt(read, otherwise) and returns `otherwise` if
            `read` fails because a file is damaged; by default, errors are raised.

    Attributes:
        metrics: metrics of the task.
        measure: name of the metric that selects the best weights.
        best: the best validation; None without best weights.
        parameters: number of parameters, including frozen parameters.
        step: number of steps; None without a last checkpoint.
        provenance: entries of molflt in the last checkpoint, such as "seconds" and "data".
        seconds: time of training and validation; None in runs from earlier versions.
        time: `seconds` as text.
        columns: columns of metrics.csv.
        unmeasured: reason why the results in the folder do not belong to the run; empty if they do.
        results: content of results.json if it belongs to the run.
        predictions: rows of predictions.csv if results exist.
        errors: |error| of the systems in eV, by split, if known.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        attempt: Callable[[Callable[[], Any], Any], Any] = lambda read, otherwise: read(),
    ) -> None:
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
        self.unmeasured: str = attempt(lambda: why_of_others(path, run_weights(path)), "")
        self.results: Results = {}
        self.predictions: Sequence[Row] = []
        if not self.unmeasured:
            self.results = attempt(lambda: read_results(path / RESULTS), {})
        if self.results:
            self.predictions = attempt(lambda: read_rows(predictions), [])
        self.errors: _Columns = attempt(lambda: _errors(self.predictions), {})


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads the folders of runs; repeated paths count once."""
    absolute = {Path(os.path.abspath(path)): Path(path) for path in paths}
    parent = Path(os.path.commonpath([path.parent for path in absolute]))
    return [Run(path, key.relative_to(parent).as_posix()) for key, path in absolute.items()]


def read_results(path: Path) -> Results:
    """Reads results.json; the result is empty if the file does not exist."""
    if not path.is_file():
        return {}
    results: Any = read_json(path, "metrics by split in JSON", "evaluate the run again")
    return results


def read_rows(path: Path) -> Sequence[Row]:
    """Returns the rows of a CSV file of an evaluation, or an empty list if it is missing."""
    if not path.is_file():
        return []
    try:
        return csv_rows(path.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: expected CSV; {shown(str(error))}; evaluate again") from None


def _errors(rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
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


def measures_of(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Returns a pair (split, name) for each metric in the results of the runs, ordered by split."""
    pairs = [(split, name) for run in runs for split, row in run.results.items() for name in row]
    splits = list(dict.fromkeys(split for run in runs for split in run.results))
    return sorted(dict.fromkeys(pairs), key=lambda pair: splits.index(pair[0]))


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
                groups.setdefault(json.dumps(data[part], sort_keys=True), []).append(run.name)
        if len(groups) > 1:
            sides = " | ".join(", ".join(names) for names in groups.values())
            lines.append(f"different data: {sides} were {verb} on different items")
    lines += [f"omitted: {run.unmeasured}" for run in runs if run.unmeasured]
    if missing := [str(run.path) for run in runs if not run.results]:
        lines.append(f"not evaluated: {', '.join(missing)}; run molflt evaluate RUN")
    return lines
