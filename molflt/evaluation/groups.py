"""Errors by what structures have in common: adsorbate, metal and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from molflt.evaluation.predictions import UNKNOWN, Predictions
from molflt.evaluation.report import align
from molflt.plots import GroupError

if TYPE_CHECKING:
    from molflt.evaluation.points import Points

_KINDS = ("adsorbate", "slab", "natoms")
_SIZE_BINS = 6
_PRINTED = 12


def _errors_by_group(
    found: Mapping[str, Predictions],
) -> dict[str, dict[str, list[GroupError]]]:
    """Errors by adsorbate and by metal, most systems first, and by size, smallest first.

    Args:
        found: split -> predictions; systems without a label do not count.

    Returns:
        split, or "all" for all splits together -> "adsorbate", "slab" (its elements) or "natoms" ->
        groups. Ranges of sizes hold about equally many systems of all splits.
    """
    parts: dict[str, tuple[NDArray[np.float64], list[NDArray[np.str_]], NDArray[np.int64]]] = {}
    for split, part in found.items():
        error = np.abs(part.energy - part.target)[part.labeled]
        if len(error):
            slab = part.slab or [UNKNOWN] * len(part.natoms)
            named = [np.array(names)[part.labeled] for names in (part.adsorbate, slab)]
            parts[split] = (error, named, part.natoms[part.labeled])
    if not parts:
        return {}
    errors, names, sizes = zip(*parts.values(), strict=True)
    joined = [np.concatenate(own) for own in zip(*names, strict=True)]
    parts["all"] = (np.concatenate(errors), joined, np.concatenate(sizes))
    edges = _size_edges(parts["all"][2])
    groups = {}
    for split, (error, named, natoms) in parts.items():
        by_size = _by_size(edges, natoms, error)
        by_name = [_by_name(names, error) for names in named]
        groups[split] = dict(zip(_KINDS, (*by_name, by_size), strict=True))
    return groups


def force_errors(found: Mapping[str, Points]) -> dict[str, list[GroupError]]:
    """Errors of forces over all splits, meV/Å: "element" of the atom, and "natoms".

    Args:
        found: split -> predictions; structures and atoms without labeled forces do not count.

    Returns:
        As `_errors_by_group`; n counts atoms by element, and structures by size, whose MAE is that
        of their own means.
    """
    from ase.data import chemical_symbols

    numbers = np.concatenate([part.elements for part in found.values()])
    forces = np.concatenate([part.forces for part in found.values()], axis=1)
    symbols = np.array([chemical_symbols[z] for z in numbers])
    by_atom = 1e3 * np.abs(forces[1] - forces[0]).mean(axis=1)
    natoms = np.concatenate([part.energies.natoms for part in found.values()])
    of_structure = 1e3 * np.concatenate([part.force_mae for part in found.values()])
    known = np.isfinite(of_structure)
    groups = {"element": _by_name(symbols, by_atom)}
    if known.any():
        edges = _size_edges(natoms[known])
        groups["natoms"] = _by_size(edges, natoms[known], of_structure[known])
    return groups


def without_compositions(
    formulas: Sequence[str],
    natoms: Sequence[int] | NDArray[np.int64],
    target: NDArray[np.float64],
    energy: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Labels and predictions, (structures,) eV each, less the mean label of their formula.

    Returns:
        Both in meV per atom.
    """
    groups = np.unique(np.array(formulas), return_inverse=True)[1]
    means = (np.bincount(groups, target) / np.bincount(groups))[groups]
    unit = np.asarray(natoms) / 1e3
    return (target - means) / unit, (energy - means) / unit


def _size_edges(natoms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where ranges of sizes begin, and the last one ends; each has about equally many systems."""
    return np.unique(np.quantile(natoms, np.linspace(0, 1, _SIZE_BINS + 1)).astype(int))


def _by_size(
    edges: NDArray[np.int64], natoms: NDArray[np.int64], error: NDArray[np.float64]
) -> list[GroupError]:
    # the first edge is the smallest size; each bin begins at its edge, the last also ends at it
    bins = np.searchsorted(edges[1:-1], natoms, side="right")
    return [
        _group(_size_label(edges, i), error[bins == i])
        for i in range(max(1, len(edges) - 1))
        if (bins == i).any()
    ]


def _by_name(names: NDArray[np.str_], error: NDArray[np.float64]) -> list[GroupError]:
    """Most systems first."""
    found = [_group(str(name), error[names == name]) for name in np.unique(names)]
    return sorted(found, key=lambda group: (-group.n, group.group))


def _group(name: str, error: NDArray[np.float64]) -> GroupError:
    return GroupError(name, len(error), float(error.mean()))


def _size_label(edges: NDArray[np.int64], i: int) -> str:
    """Range of the sizes in bin i, ends included."""
    low = int(edges[i])
    high = int(edges[-1] if i + 2 >= len(edges) else edges[i + 1] - 1)
    return f"{low}-{high}" if high > low else f"{low}"


def _group_tables(groups: Mapping[str, Sequence[GroupError]]) -> str:
    """Errors over all splits by adsorbate and metal, the largest groups, and size, as text."""
    names = {"adsorbate": "adsorbate", "slab": "slab", "natoms": "atoms"}
    tables = []
    for kind, title in names.items():
        shown = groups[kind][:_PRINTED]
        rows = [[group.group, f"{group.n:,}", f"{group.mae:.4f}"] for group in shown]
        text = align([[title, "systems", "MAE / eV"], *rows])
        if len(shown) < len(groups[kind]):
            text += f"\n({len(groups[kind]) - len(shown)} more in errors_by_group.csv)"
        tables.append(text)
    return "\n\n".join(tables)
