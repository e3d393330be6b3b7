"""Kinds of energies, and labels beyond belief."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = [
    "MOST_ADSORPTION",
    "MOST_FORCE",
    "MOST_STRESS",
    "EnergyKind",
    "beyond_rounding",
    "energy_kind",
    "label_faults",
    "other_kind",
    "per_atom",
    "point_fault",
]

EnergyKind = Literal["adsorption", "total", "unknown"]

# OC20 keeps adsorption energies within 10 eV of zero after relaxation; beyond twice that they are a
# failed calculation or a total energy.
MOST_ADSORPTION = 20.0  # eV
MOST_FORCE = 1e3
"""eV/Å. Organic molecules at 1,200 K stay below 12; by the repulsion of Ziegler, Biersack and
Littmark two carbon atoms would have to be within 0.43 Å, two of copper within 0.87 Å."""
MOST_STRESS = 10.0
"""eV/Å^3, 1.6 TPa: five times the pressure in the center of the earth."""

# Median magnitude: adsorption energies stay small however large the system is, below 0.1 eV per
# atom on slabs; total energies are 2 to 15 eV per atom, with all electrons far more.
_TOTAL_PER_ATOM = 1.0  # eV
# Of the largest label: thousands of times what float64 rounds, and below what any method resolves
_ROUNDING = 1e-12


def per_atom(energies: NDArray[np.float64], natoms: NDArray[np.int64]) -> float:
    """Median magnitude of the known energies, eV per atom."""
    known = np.isfinite(energies)
    return float(np.median(np.abs(energies[known]) / natoms[known]))


def energy_kind(energies: NDArray[np.float64], natoms: NDArray[np.int64]) -> EnergyKind:
    """Adsorption or total energies, by their magnitude; unknown without labels or in between."""
    known = np.isfinite(energies)
    if not known.any():
        return "unknown"
    if per_atom(energies, natoms) > _TOTAL_PER_ATOM:
        return "total"
    return "adsorption" if np.median(np.abs(energies[known])) <= MOST_ADSORPTION else "unknown"


def other_kind(
    energies: NDArray[np.float64], natoms: NDArray[np.int64], learned: EnergyKind
) -> str:
    """Text for energies of another kind than those of the training; "" for the same kind."""
    kind = energy_kind(energies, natoms)
    if {kind, learned} != {"adsorption", "total"}:
        return ""
    return (
        f"its energies look like {kind} energies; the model predicts {learned} energies, as in "
        "training; do not compare them"
    )


def beyond_rounding(spread: float, energies: NDArray[np.float64]) -> float:
    """A standard deviation of energies, eV; 0 if it is only rounding."""
    return spread if spread > _ROUNDING * float(np.abs(energies).max()) else 0.0


def label_faults(
    energies: NDArray[np.float64],
    natoms: NDArray[np.int64],
    required: bool,
    at_pos: bool = False,
    kind: EnergyKind | None = None,
) -> dict[int, str]:
    """Faults of labels by index of the system: missing ones, and adsorption energies beyond 20 eV.

    Args:
        energies: y_relaxed, (systems,), eV; NaN if missing.
        natoms: (systems,).
        required: a missing label is a fault.
        at_pos: energies of single points, which have no limit.
        kind: of these and of others that belong to them; None to judge by these.
    """
    faults: dict[int, str] = {}
    if required:
        for index in np.flatnonzero(~np.isfinite(energies)):
            faults[int(index)] = "y_relaxed must be a finite energy in eV; got none"
    if not at_pos and (kind or energy_kind(energies, natoms)) == "adsorption":
        for index in np.flatnonzero(np.abs(energies) > MOST_ADSORPTION):
            faults[int(index)] = (
                f"y_relaxed is {energies[index]:.3f} eV; expected at most {MOST_ADSORPTION:g} eV "
                "from 0, as the other labels look like adsorption energies"
            )
    return dict(sorted(faults.items()))


def point_fault(record: Data) -> str:
    """Why forces or stress of a structure are beyond belief; "" if they are not."""
    sizes = record.forces.double().norm(dim=1)
    stress = float(record.stress.abs().max())
    if bool((sizes > MOST_FORCE).any()):  # NaN is not
        return (
            f"the force on atom {int(sizes.argmax())} is {float(sizes.max()):.4g} eV/Å; expected "
            f"at most {MOST_FORCE:g} eV/Å, far beyond dynamics and strained structures"
        )
    if stress > MOST_STRESS:
        return (
            f"a stress of {stress:.4g} eV/Å^3, which is {160.21766 * stress:.4g} GPa; expected at "
            f"most {MOST_STRESS:g} eV/Å^3; stress in kbar is 1602.18 times, in GPa 160.218 times "
            "as large, VASP's sign is opposite to ASE's, a virial is minus the volume times it"
        )
    return ""
