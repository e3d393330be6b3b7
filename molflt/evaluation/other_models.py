"""Comparison of a run with published predictions of other models, system by system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt import plots
from molflt.data.structures.systems import System, read_systems
from molflt.evaluation.predictions import Predictions
from molflt.evaluation.results import align, write_csv
from molflt.files import read_arrays, shown

__all__ = ["Published", "common_systems", "compare", "read_published"]

_OURS = "this run"
_RESERVED = (_OURS, "energy", "target")  # published.csv has energy_eV and target_eV of the run
_Array = NDArray[np.float64]


class Published(NamedTuple):
    """Published energies of other models."""

    path: Path  # file of the energies
    rows: dict[str, int]  # name of a system -> its row
    models: dict[str, _Array]  # name -> (systems, trainings), eV
    systems: dict[int, System]  # sid -> system of the evaluated data set


class _Common(NamedTuple):
    """A system that all models predicted."""

    split: str
    system: System
    target: float
    energies: _Array  # (trainings,), eV
    row: int


def read_published(path: Path, root: Path) -> Published:
    """Reads an npz file with ``name``, (n,), and the energies of each model, (n,) or (n, k), eV.

    Arrays of integers are ignored. The data set in `root` has a systems.csv with the names.
    """
    arrays = read_arrays(path, ("name",))
    names = arrays["name"]
    if names.dtype.kind != "U" or names.ndim != 1 or len(set(names.tolist())) != len(names):
        raise ValueError(
            f"{path}: name: expected a text for each system, all different; got {names.dtype} "
            f"{names.shape}"
        )
    models = {key: array for key, array in arrays.items() if array.dtype.kind == "f"}
    for key, array in models.items():
        if key in _RESERVED:
            raise ValueError(
                f"{path}: {shown(key)}: expected the name of another model; got one that is "
                "reserved for this run and its labels; rename the array"
            )
        if array.ndim not in (1, 2) or len(array) != len(names):
            raise ValueError(
                f"{path}: {shown(key)}: expected energies ({len(names)},) or ({len(names)}, k) in "
                f"eV; got {array.shape}"
            )
        models[key] = array.astype(np.float64).reshape(len(names), -1)
    if not models:
        raise ValueError(f"{path}: expected energies of at least one model; got {sorted(arrays)}")
    rows = {name: row for row, name in enumerate(names.tolist())}
    return Published(path, rows, models, read_systems(root))


def compare(
    published: Published, common: list[_Common], found: Mapping[str, Predictions], out: Path
) -> str:
    """Compares models over the systems that all of them predicted and that have a label.

    Writes published.csv, published_errors.csv and published.png into `out`; returns tables.
    """
    total = sum(len(part.energy) for part in found.values())
    target = np.array([one.target for one in common])
    energies = {_OURS: np.array([one.energies for one in common])}
    places = [one.row for one in common]
    energies |= {name: array[places] for name, array in published.models.items()}
    errors = {name: array - target[:, None] for name, array in energies.items()}
    groups = {
        "split": [one.split for one in common],
        "family": [one.system.family for one in common],
        "metal": [one.system.metal for one in common],
    }
    rows = list(_error_rows(errors, groups))
    write_csv(out / "published_errors.csv", rows)
    names = {name: f"{'energy' if name == _OURS else name}_eV" for name in energies}
    systems = [
        {
            "split": one.split,
            **one.system._asdict(),
            "target_eV": one.target,
            **{names[name]: float(array[i].mean()) for name, array in energies.items()},
        }
        for i, one in enumerate(common)
    ]
    write_csv(out / "published.csv", systems)
    panels = {}
    for name, array in energies.items():
        several = f", mean of {array.shape[1]}" if array.shape[1] > 1 else ""
        panels[f"{name}{several}"] = (target, array.mean(1))
    plots.parity(panels, out / "published.png")
    heading = (
        f"compared with {published.path.name}: MAE / eV over the {len(common):,} of {total:,} "
        "systems that all models predicted\n"
    )
    tables = [_table(rows, kind) for kind in groups]
    return heading + "\n\n".join(tables)


def common_systems(published: Published, found: Mapping[str, Predictions]) -> list[_Common]:
    """Returns the systems that all models predicted and that have a label."""
    finite = np.all([np.isfinite(array).all(1) for array in published.models.values()], axis=0)
    common = []
    for split, part in found.items():
        for sid, ours, target in zip(part.sid, part.by_training, part.target, strict=True):
            system = published.systems.get(int(sid))
            row = None if system is None else published.rows.get(system.name)
            if system is not None and row is not None and finite[row] and np.isfinite(target):
                common.append(_Common(split, system, float(target), ours, row))
    if not common:
        total = sum(len(part.energy) for part in found.values())
        raise ValueError(
            f"{published.path}: expected predictions of some of the {total} systems; got none "
            "with a label; compare the names in systems.csv with those in the file"
        )
    return common


def _error_rows(
    errors: Mapping[str, _Array], groups: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    """Yields errors by group and model: the mean MAE of trainings and the MAE of their mean."""
    for kind, names in groups.items():
        where = {name: np.array(names) == name for name in dict.fromkeys(names)}
        if kind == "split" and len(where) > 1:
            where["all"] = np.ones(len(names), dtype=bool)
        for group in where if kind == "split" else sorted(where):
            chosen = where[group]
            for model, error in errors.items():
                yield {
                    "kind": kind,
                    "group": group,
                    "n": int(chosen.sum()),
                    "model": model,
                    "trainings": error.shape[1],
                    "mae_eV": float(np.abs(error[chosen]).mean()),
                    "mae_of_mean_eV": float(np.abs(error[chosen].mean(1)).mean()),
                }


def _table(rows: list[dict[str, Any]], kind: str) -> str:
    columns: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    for row in rows:
        if row["kind"] == kind:
            group, model = row["group"], row["model"]
            counts[group] = row["n"]
            columns.setdefault(model, {})[group] = row["mae_eV"]
            if kind == "split" and row["trainings"] != 1:
                mean = columns.setdefault(f"{model}, mean of {row['trainings']}", {})
                mean[group] = row["mae_of_mean_eV"]
    lines = [[kind, "systems", *columns]]
    for group, count in counts.items():
        cells = [f"{column[group]:.4f}" for column in columns.values()]
        lines.append([group, f"{count:,}", *cells])
    return align(lines)
