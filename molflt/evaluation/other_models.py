"""Comparison of a run with published predictions of other models on the same systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt import plots
from molflt.data.structures.systems import System, read_systems
from molflt.evaluation.predictions import Predictions
from molflt.evaluation.results import results_table, write_csv
from molflt.files import read_arrays, shown

__all__ = ["Published", "compare", "read_published"]

_OURS = "this run"
_Array = NDArray[np.float64]


class Published(NamedTuple):
    """Published energies of other models."""

    path: Path  # file with the energies
    rows: dict[str, int]  # row of each system, by name
    models: dict[str, _Array]  # energies (systems, training runs) in eV, by model name
    systems: dict[int, System]  # systems of the evaluated data set, by sid


def read_published(path: Path, root: Path) -> Published:
    """Reads published energies from an npz file.

    The file contains the array ``name`` (n,), with the names of n systems, and an array for each
    model, with predicted energies in eV: (n,), or (n, k) for k training runs. Arrays that are not
    floating point are ignored. The file systems.csv in the data set `root` contains the same names.
    """
    arrays = read_arrays(path, ("name",))
    names = arrays["name"]
    if names.dtype.kind != "U" or names.ndim != 1 or len(set(names.tolist())) != len(names):
        raise ValueError(
            f"{path}: name: expected a unique name for each system, as text; got "
            f"{names.dtype} {names.shape}"
        )
    found = {key: array for key, array in arrays.items() if array.dtype.kind == "f"}
    for key, array in found.items():
        if array.ndim not in (1, 2) or len(array) != len(names):
            raise ValueError(
                f"{path}: {shown(key)}: expected energies ({len(names)},) or ({len(names)}, k) in "
                f"eV; got {array.shape}"
            )
    if not found:
        raise ValueError(f"{path}: expected energies of at least one model; got {sorted(arrays)}")
    models = {k: array.astype(np.float64).reshape(len(names), -1) for k, array in found.items()}
    rows = {name: row for row, name in enumerate(names.tolist())}
    return Published(path, rows, models, read_systems(root))


def compare(published: Published, found: Mapping[str, Predictions], out: Path) -> str:
    """Compares models on the systems that all of them predicted, and returns tables.

    Writes published.csv, published_errors.csv and published.png to `out`.
    """
    systems, energies = _common(published, found)
    total = sum(len(part.energy) for part in found.values())
    target = np.array([one["target_eV"] for one in systems])
    errors = {name: array - target[:, None] for name, array in energies.items()}
    groups = {kind: [str(one[kind]) for one in systems] for kind in ("split", "family", "metal")}
    rows = list(_error_rows(errors, groups))
    write_csv(out / "published_errors.csv", rows)
    means = {name: array.mean(axis=1).tolist() for name, array in energies.items()}
    columns = {"energy_eV" if name == _OURS else f"{name}_eV": means[name] for name in means}
    more = ({name: values[i] for name, values in columns.items()} for i in range(len(systems)))
    write_csv(out / "published.csv", [a | b for a, b in zip(systems, more, strict=True)])
    panels = {}
    for name, array in energies.items():
        several = f", mean of {array.shape[1]}" if array.shape[1] > 1 else ""
        panels[f"{name}{several}"] = (target, array.mean(1))
    plots.parity(panels, out / "published.png")
    heading = (
        f"compared with {published.path.name}: MAE / eV over the {len(systems):,} of {total:,} "
        "systems that all models predicted\n"
    )
    return heading + "\n\n".join(_table(rows, kind) for kind in groups)


def _common(
    published: Published, found: Mapping[str, Predictions]
) -> tuple[list[dict[str, Any]], dict[str, _Array]]:
    """Returns rows of the labeled systems that all models predicted, and energies by model.

    The energies are in eV, of shape (systems, training runs).
    """
    finite = np.all([np.isfinite(array).all(1) for array in published.models.values()], axis=0)
    systems, ours, rows = [], [], []
    for split, part in found.items():
        for sid, energies, target in zip(part.sid, part.members, part.target, strict=True):
            system = published.systems.get(int(sid))
            row = None if system is None else published.rows.get(system.name)
            if system is not None and row is not None and finite[row] and np.isfinite(target):
                systems.append({"split": split, **system._asdict(), "target_eV": float(target)})
                ours.append(energies)
                rows.append(row)
    if not systems:
        total = sum(len(part.energy) for part in found.values())
        raise ValueError(
            f"{published.path}: no predictions of labeled systems among these {total}; compare the "
            "names in systems.csv with those in the file"
        )
    others = {name: array[rows] for name, array in published.models.items()}
    return systems, {_OURS: np.array(ours), **others}


def _error_rows(
    errors: Mapping[str, _Array], groups: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    """Yields rows with the mean MAE of the training runs and the MAE of their mean prediction."""
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
    columns = {"n": ("systems", 0)}
    groups: dict[str, dict[str, float | None]] = {}
    for row in rows:
        if row["kind"] == kind:
            model, mean = row["model"], f"{row['model']}, mean of {row['trainings']}"
            cells = {"n": row["n"], model: row["mae_eV"]}
            if kind == "split" and row["trainings"] != 1:
                cells[mean] = row["mae_of_mean_eV"]
            columns |= {name: (name, 4) for name in cells if name != "n"}
            groups.setdefault(row["group"], {}).update(cells)
    return results_table(kind, columns, groups)
