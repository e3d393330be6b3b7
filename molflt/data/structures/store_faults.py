"""Faults of the structures of a compact store, found by columns."""

from __future__ import annotations

import numpy as np

from molflt.atoms import FARTHEST, LOWEST, MAX_ATOMIC_NUMBER, Tag, lattice_heights


def _structure_faults(maps: dict[str, np.ndarray]) -> dict[int, str]:
    """Returns faults of cells, axes and labels by index of the structure."""
    cell, pbc = maps["cell"], maps["pbc"]
    finite = np.isfinite(cell).all(axis=(1, 2))
    heights = lattice_heights(np.where(finite[:, None, None], cell, 0.0).astype(float), pbc)
    wrong = {
        "cell must be finite": ~finite,
        "pbc must be 0 or 1": (pbc.view(np.uint8) > 1).any(axis=1),
        "periodic axes need linearly independent lattice vectors, whose planes are at least "
        f"{LOWEST} Å apart": finite & (heights.min(axis=1) < LOWEST),
        "y_init must be finite": np.isinf(maps["y_init"]),
        "y_relaxed must be finite": np.isinf(maps["y_relaxed"]),
    }
    for name in {"energy", "charge"} & maps.keys():
        wrong[f"{name} must be finite"] = np.isinf(maps[name])
    if "stress" in maps:
        parts = maps["stress"].reshape(-1, 9)
        wrong["stress must be finite, or NaN in all parts"] = ~(
            np.isfinite(parts).all(axis=1) | np.isnan(parts).all(axis=1)
        )
    faults: dict[int, str] = {}
    for reason, mask in wrong.items():
        for index in np.flatnonzero(mask):
            faults.setdefault(int(index), reason)
    return dict(sorted(faults.items()))


def _atom_faults(maps: dict[str, np.ndarray], first: int, last: int) -> dict[int, str]:
    """Returns faults of atoms of structures `first` to `last` - 1, by index of the structure."""
    offsets = maps["offsets"][first : last + 1]
    columns: dict[str, np.ndarray] = {
        name: maps[name][offsets[0] : offsets[-1]]
        for name in ("pos", "pos_relaxed", "forces", "atomic_numbers", "tags", "fixed")
        if name in maps
    }
    starts = offsets[:-1] - offsets[0]
    numbers, fixed = columns["atomic_numbers"], columns["fixed"].view(np.uint8)
    wrong = {
        ("pos", f"finite and within {FARTHEST:g} Å"): _far(columns["pos"]),
        ("atomic_numbers", f"1 to {MAX_ATOMIC_NUMBER}"): (numbers < 1)
        | (numbers > MAX_ATOMIC_NUMBER),
        ("tags", f"0 to {max(Tag):d}"): columns["tags"] > max(Tag),
        ("fixed", "0 or 1"): fixed > 1,
    }
    for name, within, bad in (
        ("pos_relaxed", f" and within {FARTHEST:g} Å", _far),
        ("forces", "", _not_finite),
    ):
        if name in columns:
            unknown = np.isnan(columns[name]).all(axis=1)
            none = np.logical_and.reduceat(unknown, starts)
            known = ~np.repeat(none, np.diff(offsets))
            wrong[name, f"finite{within}, or NaN for all atoms"] = bad(columns[name]) & known
    faults: dict[int, str] = {}
    columns["fixed"] = fixed
    for (name, expected), mask in wrong.items():
        for atom in np.flatnonzero(mask):
            index = int(np.searchsorted(starts, atom, side="right")) - 1
            got = f"got {columns[name][atom].tolist()} for atom {atom - starts[index]}"
            faults.setdefault(first + index, f"{name} must be {expected}; {got}")
    return faults


def _far(pos: np.ndarray) -> np.ndarray:
    """Returns a mask of positions (atoms, 3) that are too far away or not finite."""
    return ~(np.abs(pos) <= FARTHEST).all(axis=1)


def _not_finite(vectors: np.ndarray) -> np.ndarray:
    """Returns a mask of (atoms, 3) values that are not finite."""
    return ~np.isfinite(vectors).all(axis=1)
