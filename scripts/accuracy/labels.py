"""Adsorption energies of a potential against DFT, on structures that DFT has relaxed.

Reads a file of ASE with `y_relaxed` (eV), `adsorbate`, tags (2 = adsorbate) and `fixed`, as the
public set of small adsorbates on metals and alloys of Deimel et al. (ACS Catal. 10, 13729, 2020).
Slab with and without adsorbate are relaxed from there; references are those of that set, H2, H2O
and CH4. What is relaxed is appended to a cache, from where the same command on the same file goes
on.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from kit.rows import Promise, Row, Rows, markdown, names, pick
from kit.runs import add_row, begin_rows, digest
from making.calculators import CALCULATORS, relax
from making.references import adsorption_energy
from numpy.typing import NDArray
from tqdm import tqdm

QUICK = {"systems": 3}
TOLERANCE = 0.05  # eV/Å
STEPS = 200
VACUUM = 8.0  # Å
PROMISES: tuple[Promise, ...] = ()


def references(calculator: str) -> dict[str, float]:
    """Energy of H, C and O in eV, from relaxed H2, H2O and CH4."""
    from ase.build import molecule

    found = {
        name: relax(molecule(name, vacuum=VACUUM, pbc=True), calculator, TOLERANCE).after
        for name in ("H2", "H2O", "CH4")
    }
    h2 = found["H2"]
    return {"H": h2 / 2, "O": found["H2O"] - h2, "C": found["CH4"] - 2 * h2}


def binding(atoms: Any, calculator: str, elements: dict[str, float]) -> tuple[float, bool]:
    """Adsorption energy in eV, and whether both relaxations converged."""
    from ase.constraints import FixAtoms

    atoms = atoms.copy()
    atoms.pbc = True
    fixed = atoms.arrays["fixed"].astype(bool)
    if not fixed.any():  # half of the slab, as in the others
        metal = atoms.get_tags() != 2
        fixed = metal & (atoms.positions[:, 2] < np.median(atoms.positions[metal, 2]))
    atoms.set_constraint(FixAtoms(mask=fixed))
    slab = atoms[atoms.get_tags() != 2]
    clean, whole = (relax(one, calculator, TOLERANCE, STEPS) for one in (slab, atoms))
    symbols = atoms[atoms.get_tags() == 2].symbols
    energy = adsorption_energy(whole.after, clean.after, symbols, elements)
    return energy, clean.converged and whole.converged


def measure(
    file: Path,
    calculator: str = "chgnet",
    systems: int = 40,
    atoms: int = 50,
    seed: int = 0,
    cache: Path = Path("runs/labels.jsonl"),
) -> Rows:
    """One row per system: DFT and potential, eV, of a random choice among those of few atoms."""
    from ase.io import read

    if calculator not in CALCULATORS:
        raise ValueError(f"calculator must be one of {', '.join(CALCULATORS)}; got {calculator}")
    potential = CALCULATORS[calculator].describe()
    small = [one for one in read(file, ":") if len(one) <= atoms]
    order = np.random.default_rng(seed).permutation(len(small))[:systems]
    same = {"potential": potential, "file": digest(file), "fmax": TOLERANCE, "steps": STEPS}
    known: dict[str, Row] = {
        row["name"]: {key: row[key] for key in row if key == "potential" or key not in same}
        for row in begin_rows(cache)
        if same.items() <= row.items()
    }
    elements: dict[str, float] = {}
    rows = []
    for one in tqdm([small[i] for i in order], leave=False):
        name = str(one.info["name"])
        if name not in known:
            elements = elements or references(calculator)
            start = time.process_time()
            energy, converged = binding(one, calculator, elements)
            known[name] = {
                "name": name,
                "potential": potential,
                "adsorbate": str(one.info["adsorbate"]),
                "dft": float(one.info["y_relaxed"]),
                "energy": energy,
                "converged": converged,
                "seconds": time.process_time() - start,
            }
            add_row(cache, known[name] | same)
        rows.append(known[name])
    return rows


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson's; nan of less than three systems, or where all of either kind are equal."""
    known = len(a) > 2 and min(a.std(), b.std()) > 1e-9
    return float(np.corrcoef(a, b)[0, 1]) if known else math.nan


def agreement(rows: Rows) -> dict[str, float]:
    """Correlation, mean absolute error and mean error, eV; also within adsorbates."""
    dft, energy = (np.array([float(row[key]) for row in rows]) for key in ("dft", "energy"))
    adsorbate = np.array([row["adsorbate"] for row in rows])
    apart = [
        values - np.array([values[adsorbate == name].mean() for name in adsorbate])
        for values in (dft, energy)
    ]
    return {
        "systems": len(rows),
        "r": correlation(dft, energy),
        "MAE": float(np.abs(energy - dft).mean()),
        "mean error": float((energy - dft).mean()),
        "r within": correlation(*apart),
        "MAE within": float(np.abs(apart[1] - apart[0]).mean()),
    }


def table(rows: Rows) -> str:
    """A line for each adsorbate of at least three systems, one for the others, and one for all."""
    rows = [row for row in rows if row["converged"] in (True, "True")]
    parts = {name: pick(rows, adsorbate=name) for name in sorted(names(rows, "adsorbate"))}
    several = {name: own for name, own in parts.items() if len(own) > 2}
    others = [row for name, own in parts.items() if name not in several for row in own]
    lines = []
    for name, own in (several | {"others": others, "all": rows}).items():
        if own:
            found = agreement(own)
            count = int(found.pop("systems"))
            cells = (f"{value:.2f}" if math.isfinite(value) else "–" for value in found.values())
            lines.append([name, count, *cells])
    head = ("adsorbate", "systems", "r", "MAE, eV", "mean error, eV")
    return markdown((*head, "r within adsorbates", "MAE within, eV"), lines)
