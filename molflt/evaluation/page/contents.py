"""What lies in the folder of a run, as far as it can be read, and what does not."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.output import Results
from molflt.evaluation.results import RESULTS, given_data, run_weights, why_of_others
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
"""Recipes whose predictions.csv has a row for each structure."""

_MOST_BYTES = 200_000_000  # of a table
_Found = TypeVar("_Found")


@dataclass
class Contents:
    """A run folder.

    Attributes:
        path: of the folder.
        run: what comparisons know of it; None without a configuration.
        columns: of metrics.csv; empty if there is none.
        results: of results.json.
        predictions: rows of predictions.csv.
        groups: rows of errors_by_group.csv.
        versions: of versions.json.
        unmeasured: why there are no results, where those that there are belong to others.
        evaluated: whether the run has results, readable or not.
        given: what --data was in that evaluation; None if it was left out.
        missing: a line for everything that is not there or damaged.
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
        """What can be read or made; if it cannot, the reason is among what is missing."""
        try:
            return read()
        except KeyError as error:
            self.missing.append(f"{self.path}: a table without the column {shown(error.args[0])}")
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
            f"{'another folder' if path.is_dir() else 'no such folder'}; name the folder that "
            "molflt train wrote"
        )
    found = Contents(path)
    state: Checkpoint = {}
    if last.is_file():
        state = found.attempt(lambda: read_checkpoint(last), state)
    else:
        found.missing.append(f"{last}: not there; time and data of the training are unknown")
    best = path / "checkpoints" / "best.safetensors"
    if best.is_file():
        found.attempt(lambda: verify_tensors(best), False)
    own = state.get("molflt", {})
    config: Config | None = found.attempt(lambda: read_config(path), own.get("config"))
    table = path / "metrics.csv"
    if table.is_file():
        columns: dict[str, NDArray[np.float64]] = found.attempt(lambda: read_columns(table), {})
        known = np.isfinite(columns.get("step", np.zeros(0)))  # a row of units has no step
        found.columns = {name: values[known] for name, values in columns.items()}
    else:
        found.missing.append(f"{table}: not there; no curves")
    found.unmeasured = found.attempt(lambda: why_of_others(path, run_weights(path)), "")
    if found.unmeasured:
        found.missing.append(f"{found.unmeasured}; left out; molflt evaluate RUN makes those of it")
    found.versions = found.attempt(lambda: read_versions(path), {})
    if not found.versions and not any("versions.json" in line for line in found.missing):
        found.missing.append(f"{path / 'versions.json'}: not there; versions are unknown")
    # without the results, what lies there may be of an evaluation that has failed
    found.evaluated = not found.unmeasured and (path / RESULTS).is_file()
    if found.evaluated:
        found.results = found.attempt(lambda: read_results(path / RESULTS), {})
        found.given = found.attempt(lambda: given_data(path), None)
        found.predictions = found.attempt(lambda: _rows(path / "predictions.csv"), [])
        found.groups = found.attempt(lambda: _rows(path / "errors_by_group.csv"), [])
    if config is not None:
        found.run = _run(found, config, state)
        _say_what_lacks(found, found.run, "stopped" in own)
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


def _say_what_lacks(found: Contents, run: Run, stopped: bool) -> None:
    """Adds what an ended and evaluated run has and this one has not."""
    most = int(str(run.config["trainer"]["max_steps"]))
    if run.step is not None and run.step < most and not stopped:
        found.missing.append(
            f"{found.path}: {run.step:,} of {most:,} steps are done; molflt train --resume goes on"
        )
    if found.columns and run.best is None:
        found.missing.append(f"{found.path / 'metrics.csv'}: no validation yet")
    best = found.path / "checkpoints" / "best.safetensors"
    if run.best is not None and not best.is_file():
        found.missing.append(f"{best}: not there; the weights of the run are lost")
    if found.unmeasured:
        return
    if not found.results:
        found.missing.append(f"{found.path}: not evaluated; molflt evaluate RUN does it")
    elif run.config["recipe"] in OF_STRUCTURES and not found.predictions:
        found.missing.append(f"{found.path / 'predictions.csv'}: not there or empty; no parity")


def _rows(path: Path) -> list[Row]:
    """Rows of a CSV file; empty without the file."""
    if not path.is_file():
        return []
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("rows of different lengths")
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: expected CSV; {shown(str(error))}; evaluate again") from None
    return cast("list[Row]", rows)
