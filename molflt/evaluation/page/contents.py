"""Contents of a run folder, and a record of what is missing or damaged."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.results import RESULTS, Results, given_data, run_weights, why_of_others
from molflt.evaluation.runs import Run, read_errors, read_results
from molflt.files import shown, verify_tensors
from molflt.plots.training import read_columns
from molflt.training.checkpoint import Checkpoint, count_parameters, read_checkpoint
from molflt.training.config import Config, read_config
from molflt.training.outcome import steps_of
from molflt.training.run_folder import read_versions

__all__ = ["OF_STRUCTURES", "Contents", "Row", "read_contents"]

Row = Mapping[str, str]

OF_STRUCTURES = ("is2re", "potential")
"""Recipes whose predictions.csv has a row per structure."""

_Found = TypeVar("_Found")


@dataclass
class Contents:
    """Contents of a run folder; empty where files are missing or damaged.

    Attributes:
        path: the folder.
        run: the run, read as for comparisons; None without a configuration.
        columns: columns of metrics.csv.
        results: content of results.json.
        predictions: rows of predictions.csv.
        groups: rows of errors_by_group.csv.
        versions: content of versions.json.
        unmeasured: reason why the results in the folder do not belong to the run.
        evaluated: True if there are results of the run, readable or not.
        given: value of --data in the evaluation, or None.
        missing: a line for each missing or damaged part.
    """

    path: Path
    run: Run | None = None
    columns: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    results: Results = field(default_factory=dict)
    predictions: Sequence[Row] = ()
    groups: Sequence[Row] = ()
    versions: Mapping[str, object] = field(default_factory=dict)
    unmeasured: str = ""
    evaluated: bool = False
    given: str | None = None
    missing: list[str] = field(default_factory=list)

    def attempt(self, read: Callable[[], _Found], otherwise: _Found) -> _Found:
        """Calls `read`; if it fails, adds the reason to `missing` and returns `otherwise`."""
        try:
            return read()
        except KeyError as error:
            self.missing.append(f"{self.path}: a table lacks the column {shown(error.args[0])}")
        except (ValueError, OSError, ArithmeticError, csv.Error) as error:
            line = " ".join(str(error).split())
            if line not in self.missing:
                self.missing.append(line)
        return otherwise


def read_contents(path: Path) -> Contents:
    """Reads the folder of a run."""
    path = Path(path)
    last = path / "checkpoints" / "last.ckpt"
    if not any(one.is_file() for one in (path / "config.yaml", last, path / "metrics.csv")):
        raise FileNotFoundError(
            f"{path}: expected the folder of a training run, with config.yaml; got "
            f"{'another folder' if path.is_dir() else 'no such folder'}; name the folder of "
            "molflt train --run"
        )
    found = Contents(path)
    state: Checkpoint = {}
    if last.is_file():
        state = found.attempt(lambda: read_checkpoint(last), state)
    else:
        found.missing.append(f"{last}: missing; time and data of the training are unknown")
    best = path / "checkpoints" / "best.safetensors"
    if best.is_file():
        found.attempt(lambda: verify_tensors(best), False)
    own = state.get("molflt", {})
    config: Config | None = found.attempt(lambda: read_config(path), own.get("config"))
    table = path / "metrics.csv"
    if table.is_file():
        columns: dict[str, NDArray[np.float64]] = found.attempt(lambda: read_columns(table), {})
        known = np.isfinite(columns.get("step", np.zeros(0)))  # skips a row of units
        found.columns = {name: values[known] for name, values in columns.items()}
    else:
        found.missing.append(f"{table}: missing; curves are not shown")
    found.unmeasured = found.attempt(lambda: why_of_others(path, run_weights(path)), "")
    if found.unmeasured:
        found.missing.append(f"{found.unmeasured}; not shown; run molflt evaluate RUN")
    found.versions = found.attempt(lambda: read_versions(path), {})
    if not found.versions and not any("versions.json" in line for line in found.missing):
        found.missing.append(f"{path / 'versions.json'}: missing; versions are unknown")
    # without results, other files may be left over from a failed evaluation
    found.evaluated = not found.unmeasured and (path / RESULTS).is_file()
    if found.evaluated:
        found.results = found.attempt(lambda: read_results(path / RESULTS), {})
        found.given = found.attempt(lambda: given_data(path), None)
        found.predictions = found.attempt(lambda: _rows(path / "predictions.csv"), [])
        found.groups = found.attempt(lambda: _rows(path / "errors_by_group.csv"), [])
    if config is not None:
        found.run = _run(found, config, state)
        _record_missing(found, found.run, "stopped" in own)
    return found


def _run(found: Contents, config: Config, state: Checkpoint) -> Run:
    path, own = found.path, state.get("molflt", {})
    steps = state.get("global_step")
    if steps is None:
        steps = found.attempt(lambda: steps_of(path), 0) or None
    return Run(
        path.resolve().name,
        path,
        config,
        found.attempt(lambda: count_parameters(path, config), 0),
        steps,
        own.get("seconds"),
        own.get("data", {}),
        found.columns,
        found.results,
        found.attempt(lambda: read_errors(path / "predictions.csv"), {}) if found.results else {},
    )


def _record_missing(found: Contents, run: Run, stopped: bool) -> None:
    """Records the missing parts of a run that is not finished or not evaluated."""
    most = int(str(run.config["trainer"]["max_steps"]))
    if run.step is not None and run.step < most and not stopped:
        found.missing.append(
            f"{found.path}: {run.step:,} of {most:,} steps are done; resume with molflt train "
            "--resume"
        )
    if found.columns and run.best is None:
        found.missing.append(f"{found.path / 'metrics.csv'}: not yet validated")
    best = found.path / "checkpoints" / "best.safetensors"
    if run.best is not None and not best.is_file():
        found.missing.append(f"{best}: missing; the weights of the run are lost")
    if found.unmeasured:
        return
    if not found.results:
        found.missing.append(f"{found.path}: not evaluated; run molflt evaluate RUN")
    elif run.config["recipe"] in OF_STRUCTURES and not found.predictions:
        found.missing.append(
            f"{found.path / 'predictions.csv'}: missing or empty; parity is not shown"
        )


def _rows(path: Path) -> list[Row]:
    """Returns the rows of a CSV file; empty if the file is missing."""
    if not path.is_file():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("rows of different lengths")
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: expected CSV; {shown(str(error))}; evaluate again") from None
    return cast("list[Row]", rows)
