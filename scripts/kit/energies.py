"""Energies that runs have predicted, from their files."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from molflt.metrics import EWT_THRESHOLD


def read_energies(run: Path, split: str) -> dict[int, tuple[float, float]]:
    """Predicted energy and label of the systems of a split, by sid, eV; NaN without a label."""
    with open(run / "predictions.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    found = ((row["sid"], row["energy_eV"], row["target_eV"] or "nan") for row in rows)
    return {int(sid): (float(energy), float(target)) for sid, energy, target in found}


def errors_of_mean(runs: Sequence[Path], split: str) -> tuple[float, float] | None:
    """MAE, eV, and EwT, %, of the mean of the energies of several runs on the same systems.

    Only systems with a label count; None if there is none.
    """
    found = [read_energies(run, split) for run in runs]
    systems = sorted(sid for sid, (_, target) in found[0].items() if math.isfinite(target))
    if not systems:
        return None
    energy = np.array([[own[sid][0] for sid in systems] for own in found]).mean(axis=0)
    error = np.abs(energy - [found[0][sid][1] for sid in systems])
    return float(error.mean()), float(100 * (error < EWT_THRESHOLD).mean())
