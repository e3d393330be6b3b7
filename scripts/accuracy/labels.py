"""Adsorption energies of a potential compared with DFT, for structures relaxed with DFT.

The input is an ASE file whose structures have `name`, `adsorbate`, `y_relaxed` (in eV), `fixed` and
tags (2 for adsorbates of H, C and O). An example is the set of small adsorbates on metals and
alloys by Deimel et al. (ACS Catal. 10, 13729, 2020). The slab is relaxed with and without the
adsorbate. As in that set, the reference molecules are H2, H2O and CH4.
"""

import math
import time
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from ase.io import read
from kit.rows import Rows, choose, markdown, names, pick
from making.calculators import CALCULATORS, adsorption_energy, molecule_energies, relax
from numpy.typing import NDArray
from tqdm import tqdm

QUICK = {"systems": 3}
TOLERANCE = 0.05  # eV/Å
STEPS = 200


def binding(atoms: Atoms, calculator: str, elements: dict[str, float]) -> tuple[float, bool]:
    """Returns the adsorption energy in eV, and True if both relaxations converged, else False."""
    atoms = atoms.copy()
    atoms.pbc = True
    fixed = atoms.arrays["fixed"].astype(bool)
    if not fixed.any():  # fix the lower half of the slab
        metal = atoms.get_tags() != 2
        fixed = metal & (atoms.positions[:, 2] < np.median(atoms.positions[metal, 2]))
    atoms.set_constraint(FixAtoms(mask=fixed))
    slab = atoms[atoms.get_tags() != 2]
    clean, whole = (relax(one, calculator, TOLERANCE, STEPS) for one in (slab, atoms))
    symbols = atoms[atoms.get_tags() == 2].symbols
    energy = adsorption_energy(whole.after, clean.after, symbols, elements)
    return energy, clean.converged and whole.converged


def measure(
    file: Path, calculator: str = "chgnet", systems: int = 40, atoms: int = 50, seed: int = 0
) -> Rows:
    """Returns rows of `systems` random systems with up to `atoms` atoms."""
    choose([calculator], CALCULATORS, "calculator")
    small = [one for one in read(file, ":") if len(one) <= atoms]
    order = np.random.default_rng(seed).permutation(len(small))[:systems]
    gas = molecule_energies(calculator, ("H2", "H2O", "CH4"), TOLERANCE)
    elements = {"H": gas["H2"] / 2, "O": gas["H2O"] - gas["H2"], "C": gas["CH4"] - 2 * gas["H2"]}
    rows = []
    for one in tqdm([small[i] for i in order], leave=False):
        start = time.process_time()
        energy, converged = binding(one, calculator, elements)
        about = {"name": str(one.info["name"]), "potential": CALCULATORS[calculator].describe()}
        about["adsorbate"] = str(one.info["adsorbate"])
        found = {"dft": float(one.info["y_relaxed"]), "energy": energy, "converged": converged}
        rows.append({**about, **found, "seconds": time.process_time() - start})
    return rows


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Computes Pearson's r; returns nan for fewer than three values, or if an array is constant."""
    known = len(a) > 2 and min(a.std(), b.std()) > 1e-9
    return float(np.corrcoef(a, b)[0, 1]) if known else math.nan


def agreement(rows: Rows) -> dict[str, float]:
    """Computes correlations and errors in eV, also after subtracting the mean of each adsorbate."""
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
    """Formats the agreement of all systems whose relaxations converged.

    The table has a line for each adsorbate with at least three systems, a line for all other
    adsorbates, and a line for all systems.
    """
    rows = pick(rows, converged=True)
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
