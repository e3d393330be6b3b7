"""Errors of groups of structures: by adsorbate, metal, element and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.results import results_table, write_csv

_SIZE_RANGES = 6
_PRINTED = 12  # groups in a printed table; the CSV file contains all


class GroupError(NamedTuple):
    """Error of a group of systems, such as all systems with the same adsorbate."""

    split: str
    kind: str
    group: str
    n: int
    mae: float  # in the unit of the prediction


def errors_by_group(
    error: NDArray[np.float64],
    kinds: Mapping[str, NDArray[np.str_]],
    split: NDArray[np.str_] | None = None,
) -> list[GroupError]:
    """Computes errors by group.

    Args:
        error: (systems,), absolute errors.
        kinds: names of the group of each system, of shape (systems,), by kind. Groups of the kind
            "natoms" are sorted by size, other groups by number of systems, largest first.
        split: (systems,), names of splits; by default all systems form one split.

    Returns:
        The groups of each split and, under the name "all", of all systems.
    """
    masks = {} if split is None else {str(name): split == name for name in dict.fromkeys(split)}
    masks["all"] = np.full(len(error), True)
    groups = []
    for part, mask in masks.items():
        for kind, names in kinds.items():
            unique, index, n = np.unique(names[mask], return_inverse=True, return_counts=True)
            mae = np.bincount(index, error[mask]) / n
            rows = zip(unique.tolist(), n.tolist(), mae.tolist(), strict=True)
            errors = [GroupError(part, kind, *row) for row in rows]
            if kind == "natoms":
                groups += sorted(errors, key=lambda group: int(group.group.partition("-")[0]))
            else:
                groups += sorted(errors, key=lambda group: (-group.n, group.group))
    return groups


def size_ranges(natoms: NDArray[np.int64]) -> NDArray[np.str_]:
    """Returns the range of sizes of each system, such as "20-34".

    The ranges contain similar numbers of systems.
    """
    edges = np.unique(np.quantile(natoms, np.linspace(0, 1, _SIZE_RANGES + 1)).astype(int))
    # Each range includes its start; the last range also includes its end.
    last = [*(edges[1:-1] - 1), edges[-1]]
    pairs = zip(edges.tolist(), last, strict=False)
    names = [f"{low}-{high}" if high > low else f"{low}" for low, high in pairs]
    return np.array(names)[np.searchsorted(edges[1:-1], natoms, side="right")]


def write_groups(out: Path, groups: Sequence[GroupError], metric: str) -> None:
    """Writes errors_by_group.csv; `metric` is the name of the MAE column."""
    rows = [group._asdict() for group in groups]
    for row in rows:
        row[metric] = row.pop("mae")
    write_csv(out / "errors_by_group.csv", rows)


def group_tables(groups: Sequence[GroupError]) -> str:
    """Formats a table of errors over all splits for each kind of group, with up to 12 groups."""
    tables = []
    for kind, title in {"adsorbate": "adsorbate", "slab": "slab", "natoms": "atoms"}.items():
        of_kind = [group for group in groups if (group.split, group.kind) == ("all", kind)]
        rows = {each.group: {"n": each.n, "mae_eV": each.mae} for each in of_kind[:_PRINTED]}
        tables.append(results_table(title, rows, n=("systems", 0)))
        if more := len(of_kind) - len(rows):
            tables[-1] += f"\n({more} more in errors_by_group.csv)"
    return "\n\n".join(tables)
