"""Pairs of molecules at growing distances: train-id*.xyz and test-id*.xyz of the LODE dimers.

Huguenin-Dumittan et al., J. Phys. Chem. Lett. 14, 9612, 2023; from the cace-lr-fit repository, CC
BY-NC 4.0.
"""

import statistics
from pathlib import Path
from typing import Any

from kit.rows import Rows, markdown, names, pick


def frames_of(folder: Path, split: str, limit: int | None = None) -> list[list[Any]]:
    """Structures of each file of a split; `indexB` is the first atom of the second molecule."""
    from ase.io import read

    files = sorted(folder.glob(f"{split}-id*.xyz"))[:limit]
    if not files:
        raise FileNotFoundError(f"{folder}: no {split}-id*.xyz; see --help")
    return [read(file, ":") for file in files]


def errors(rows: Rows) -> dict[str, float]:
    """Mean absolute errors by class, meV; "all" is the mean over classes. Empty without rows."""
    found = {
        label: statistics.fmean(
            1000 * abs(row["predicted_eV"] - row["energy_eV"])
            for row in pick(rows, **{"class": label})
        )
        for label in sorted(names(rows, "class"))
    }
    return {"all": statistics.fmean(found.values())} | found if found else {}


def errors_table(lines: list[list[object]], rows: Rows) -> str:
    """Markdown: a line per model with its training error and its test errors by class."""
    labels = sorted(names(rows, "class"))
    return markdown(["model", "train", "test", *(f"test {label}" for label in labels)], lines)
