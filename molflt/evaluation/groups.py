"""Errors of groups of structures: by adsorbate, metal, element and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.predictions import Predictions
from molflt.evaluation.results import results_table, write_csv
from molflt.plots import GroupError

__all__ = ["errors_by_group", "group_tables", "groups_by_name", "groups_by_size", "size_edges"]
__all__ += ["write_groups"]

_SIZE_BINS = 6
_PRINTED = 12
_COLUMNS = {"n": ("systems", 0), "mae": ("MAE / eV", 4)}


def errors_by_group(found: Mapping[str, Predictions]) -> dict[str, dict[str, list[GroupError]]]:
    """Computes errors grouped by adsorbate, by metal and by size of the structures.

    Groups of adsorbates and metals are sorted by number of systems, largest first; size ranges are
    sorted by size and contain similar numbers of systems. Systems without a label are ignored.

    Returns:
        Groups by split ("all" for all splits together) and by kind: "adsorbate", "slab" (the
        elements of the slab) or "natoms".
    """
    parts = {}
    for split, part in found.items():
        if (known := part.labeled).any():
            error = np.abs(part.energy - part.target)
            columns = (error, part.adsorbate, part.slab, part.natoms)
            parts[split] = [np.array(one)[known] for one in columns]
    if not parts:
        return {}
    parts["all"] = [*map(np.concatenate, zip(*parts.values(), strict=True))]
    edges = size_edges(parts["all"][-1])
    return {
        split: {
            "adsorbate": groups_by_name(adsorbate, error),
            "slab": groups_by_name(slab, error),
            "natoms": groups_by_size(natoms, error, edges),
        }
        for split, (error, adsorbate, slab, natoms) in parts.items()
    }


def size_edges(natoms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Divides sizes at quantiles; returns the start of each range and the end of the last range."""
    return np.unique(np.quantile(natoms, np.linspace(0, 1, _SIZE_BINS + 1)).astype(int))


def groups_by_size(
    natoms: NDArray[np.int64], error: NDArray[np.float64], edges: NDArray[np.int64]
) -> list[GroupError]:
    """Returns the error of each nonempty size range; see `size_edges` for `edges`."""
    # Each range includes its start; the last range also includes its end.
    bins = np.searchsorted(edges[1:-1], natoms, side="right")
    groups = []
    for i in np.unique(bins):
        low, high = int(edges[i]), int(edges[-1] if i + 2 >= len(edges) else edges[i + 1] - 1)
        label = f"{low}-{high}" if high > low else f"{low}"
        groups.append(_group(label, error[bins == i]))
    return groups


def groups_by_name(names: NDArray[np.str_], error: NDArray[np.float64]) -> list[GroupError]:
    """Groups errors by name; returns the groups, largest first."""
    found = [_group(str(name), error[names == name]) for name in np.unique(names)]
    return sorted(found, key=lambda group: (-group.n, group.group))


def _group(name: str, error: NDArray[np.float64]) -> GroupError:
    return GroupError(name, len(error), float(error.mean()))


def write_groups(
    out: Path, groups: Mapping[str, Mapping[str, Sequence[GroupError]]], metric: str
) -> None:
    """Writes errors_by_group.csv; `metric` is the name of the MAE column."""
    rows = [
        {"split": split, "kind": kind, "group": one.group, "n": one.n, metric: one.mae}
        for split, kinds in groups.items()
        for kind, own in kinds.items()
        for one in own
    ]
    write_csv(out / "errors_by_group.csv", rows)


def group_tables(groups: Mapping[str, Sequence[GroupError]]) -> str:
    """Formats a table of errors for each kind of group; long tables are truncated."""
    tables = []
    for kind, title in {"adsorbate": "adsorbate", "slab": "slab", "natoms": "atoms"}.items():
        shown = groups[kind][:_PRINTED]
        rows = {group.group: {"n": group.n, "mae": group.mae} for group in shown}
        tables.append(results_table(title, _COLUMNS, rows))
        if more := len(groups[kind]) - len(shown):
            tables[-1] += f"\n({more} more in errors_by_group.csv)"
    return "\n\n".join(tables)
