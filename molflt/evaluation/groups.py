"""Errors of energies by what structures have in common: adsorbate and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.predictions import Predictions
from molflt.evaluation.report import align
from molflt.plots import GroupError

_SIZE_BINS = 6
_PRINTED = 12


def _errors_by_group(
    found: Mapping[str, Predictions],
) -> dict[str, dict[str, list[GroupError]]]:
    """Errors by adsorbate, most systems first, and by size, smallest first.

    Args:
        found: split -> predictions; systems without a label do not count.

    Returns:
        split, or "all" for all splits together -> "adsorbate" or "natoms" -> groups. Ranges of
        sizes hold about equally many systems of all splits.
    """
    parts: dict[str, tuple[NDArray[np.float64], NDArray[np.str_], NDArray[np.int64]]] = {}
    for split, part in found.items():
        error = np.abs(part.energy - part.target)[part.labeled]
        if len(error):
            adsorbate = np.array(part.adsorbate)[part.labeled]
            parts[split] = (error, adsorbate, part.natoms[part.labeled])
    if not parts:
        return {}
    errors, adsorbates, sizes = zip(*parts.values(), strict=True)
    parts["all"] = (np.concatenate(errors), np.concatenate(adsorbates), np.concatenate(sizes))
    edges = np.unique(np.quantile(parts["all"][2], np.linspace(0, 1, _SIZE_BINS + 1)).astype(int))
    groups = {}
    for split, (error, adsorbate, natoms) in parts.items():
        # the first edge is the smallest size; each bin begins at its edge, the last also ends at it
        bins = np.searchsorted(edges[1:-1], natoms, side="right")
        by_size = [
            _group(_size_label(edges, i), error[bins == i])
            for i in range(max(1, len(edges) - 1))
            if (bins == i).any()
        ]
        by_name = [_group(str(name), error[adsorbate == name]) for name in np.unique(adsorbate)]
        by_name.sort(key=lambda group: (-group.n, group.group))
        groups[split] = {"adsorbate": by_name, "natoms": by_size}
    return groups


def _group(name: str, error: NDArray[np.float64]) -> GroupError:
    return GroupError(name, len(error), float(error.mean()))


def _size_label(edges: NDArray[np.int64], i: int) -> str:
    """Range of the sizes in bin i, ends included."""
    low = int(edges[i])
    high = int(edges[-1] if i + 2 >= len(edges) else edges[i + 1] - 1)
    return f"{low}-{high}" if high > low else f"{low}"


def _group_tables(groups: Mapping[str, Sequence[GroupError]]) -> str:
    """Errors over all splits by adsorbate, the largest groups, and by size, in plain text."""
    names = {"adsorbate": "adsorbate", "natoms": "atoms"}
    tables = []
    for kind, title in names.items():
        shown = groups[kind][:_PRINTED]
        rows = [[group.group, f"{group.n:,}", f"{group.mae:.4f}"] for group in shown]
        text = align([[title, "systems", "MAE / eV"], *rows])
        if len(shown) < len(groups[kind]):
            text += f"\n({len(groups[kind]) - len(shown)} more in errors_by_group.csv)"
        tables.append(text)
    return "\n\n".join(tables)
