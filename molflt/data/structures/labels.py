"""Energy kinds, invalid labels, and reference energies of elements."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import MAX_ATOMIC_NUMBER, Data, Tag, symbol
from molflt.data.structures.base import Structures, with_bar
from molflt.data.structures.molecules import adsorbates
from molflt.data.structures.tags import open_axes
from molflt.files import shown

EnergyKind = Literal["adsorption", "total", "unknown"]

# OC20 limits relaxed adsorption energies to 10 eV. An energy beyond twice this limit for each
# adsorbate is a total energy or comes from a failed calculation.
MOST_ADSORPTION = 20.0  # eV
MOST_FORCE = 1e3
"""Largest plausible force, in eV/Å. Forces in organic molecules at 1,200 K stay below 12 eV/Å. In
the repulsive potential of Ziegler, Biersack and Littmark, MOST_FORCE is the force between two
carbon atoms at a distance of 0.43 Å, or between two copper atoms at a distance of 0.87 Å."""
MOST_STRESS = 10.0
"""Largest plausible stress, in eV/Å^3: 1.6 TPa, five times the pressure at the Earth's center."""

# Limit on the median magnitude. Adsorption energies stay small in large systems, below 0.1 eV per
# atom on slabs. Total energies are 2 to 15 eV per atom, and far larger with all electrons.
_TOTAL_PER_ATOM = 1.0  # eV
# Relative to the largest label: far above float64 rounding, and below the accuracy of any method
_ROUNDING = 1e-12
_BLOCK = 10_000  # structures
_NEGLIGIBLE = 1e-10  # smallest singular value, relative to the largest


def per_atom(energies: NDArray[np.float64], natoms: NDArray[np.int64]) -> float:
    """Returns the median magnitude of the known energies, in eV per atom."""
    known = np.isfinite(energies)
    return float(np.median(np.abs(energies[known]) / natoms[known]))


def energy_kind(energies: NDArray[np.float64], natoms: NDArray[np.int64]) -> EnergyKind:
    """Returns the kind of energies ("adsorption", "total" or "unknown"), judged by magnitude."""
    known = np.isfinite(energies)
    if not known.any():
        return "unknown"
    if per_atom(energies, natoms) > _TOTAL_PER_ATOM:
        return "total"
    return "adsorption" if np.median(np.abs(energies[known])) <= MOST_ADSORPTION else "unknown"


def other_kind(
    energies: NDArray[np.float64], natoms: NDArray[np.int64], learned: EnergyKind
) -> str:
    """Returns a description of energies that differ in kind from the training energies, or ""."""
    kind = energy_kind(energies, natoms)
    if {kind, learned} != {"adsorption", "total"}:
        return ""
    return (
        f"its energies look like {kind} energies; the model predicts {learned} energies, as in "
        "training; do not compare them"
    )


def beyond_rounding(spread: float, energies: NDArray[np.float64]) -> float:
    """Returns `spread`, the standard deviation of energies in eV; 0 if it is a rounding error."""
    return spread if spread > _ROUNDING * float(np.abs(energies).max()) else 0.0


def most_adsorption(record: Data) -> float:
    """Returns the largest plausible magnitude of an adsorption energy: 20 eV per adsorbate.

    To save time, adsorbates are counted only if necessary. The result is 20 eV for smaller and
    unknown energies, infinite for untagged crystals, and 20 eV per adsorbate atom above that.
    """
    if not abs(float(record.y_relaxed)) > MOST_ADSORPTION:  # also for NaN
        return MOST_ADSORPTION
    if not record.tags.any() and not open_axes(record):
        return float("inf")
    upper_bound = MOST_ADSORPTION * max(1, int((record.tags == Tag.ADSORBATE).sum()))
    if abs(float(record.y_relaxed)) > upper_bound:
        return upper_bound
    return MOST_ADSORPTION * max(1, int(adsorbates(record).max()) + 1)


def limit_in(dataset: Structures, index: int) -> float:
    """Returns `most_adsorption` of a structure in a data set."""
    return most_adsorption(dataset[index])


def label_faults(
    energies: NDArray[np.float64],
    natoms: NDArray[np.int64],
    required: bool,
    at_pos: bool = False,
    kind: EnergyKind | None = None,
    limits: Callable[[int], float] = lambda index: MOST_ADSORPTION,
) -> dict[int, str]:
    """Describes invalid labels by index: missing labels, and implausible adsorption energies.

    Args:
        energies: labels in eV, of shape (systems,); NaN if missing.
        natoms: number of atoms in each system, of shape (systems,).
        required: treat missing labels as invalid.
        at_pos: True for single-point energies and other quantities, which have no limit.
        kind: kind of the energies; None to determine it from the energies.
        limits: returns the largest plausible magnitude, in eV, of the adsorption energy of a system
            beyond 20 eV; see `most_adsorption`.
    """
    missing = np.flatnonzero(~np.isfinite(energies)).tolist() if required else []
    faults = dict.fromkeys(missing, "the label must be a finite energy in eV; got none")
    if not at_pos and (kind or energy_kind(energies, natoms)) == "adsorption":
        for index in np.flatnonzero(np.abs(energies) > MOST_ADSORPTION).tolist():
            if abs(energies[index]) > (limit := limits(index)):
                faults[index] = (
                    f"the label is {energies[index]:.3f} eV; expected at most {limit:g} eV in "
                    "magnitude, because the other labels look like adsorption energies"
                )
    return dict(sorted(faults.items()))


def point_fault(record: Data) -> str:
    """Returns a description of implausible forces or stress of a structure, or ""."""
    forces = record.forces.double().norm(dim=1)
    stress = float(record.stress.abs().max())
    if bool((forces > MOST_FORCE).any()):  # False for NaN
        return (
            f"the force on atom {int(forces.argmax())} is {float(forces.max()):.4g} eV/Å; expected "
            f"at most {MOST_FORCE:g} eV/Å, which no dynamics or strained structure exceeds"
        )
    if stress > MOST_STRESS:
        return (
            f"a stress of {stress:.4g} eV/Å^3, which is {160.21766 * stress:.4g} GPa; expected at "
            f"most {MOST_STRESS:g} eV/Å^3; values in kbar are 1602.18 times as large, in GPa "
            "160.218 times; VASP's sign is opposite to ASE's; a virial is -volume times the stress"
        )
    return ""


class ElementEnergies(NamedTuple):
    """Energies of elements, and statistics of the residual labels.

    Attributes:
        energies: energies (119,) in eV, by atomic number; 0 for elements that do not occur.
        present: mask (119,), by atomic number; True for elements with an energy.
        undetermined: number of independent combinations of the energies that the compositions do
            not determine; of all best fits, `energies` has the smallest norm.
        mean: mean of the residual labels, in eV.
        std: standard deviation of the residual labels, in eV; 0 if it is only a rounding error.
    """

    energies: NDArray[np.float64]
    present: NDArray[np.bool_]
    undetermined: int
    mean: float
    std: float


def fit_element_energies(
    dataset: Structures,
    given: Mapping[int, float] | None = None,
    of_adsorbates: bool = False,
    labels: NDArray[np.float64] | None = None,
) -> ElementEnergies:
    """Fits element energies, whose sums over the atoms approximate the labels.

    The fit is the least-squares solution of smallest norm. A QR decomposition is updated in blocks
    of structures, which needs constant memory and is accurate even for energies of 1e5 eV.

    Args:
        dataset: structures with finite labels.
        given: energies in eV, by atomic number, which replace the fit.
        of_adsorbates: sum over adsorbate atoms only.
        labels: energies in eV, of shape (structures,); by default y_relaxed.
    """
    columns = MAX_ATOMIC_NUMBER + 1
    labels, count = dataset.y_relaxed if labels is None else labels, len(dataset)
    present = np.zeros(columns, dtype=bool)
    triangle = np.zeros((0, columns + 2))  # R factor of compositions, ones and labels
    for first in with_bar(range(0, count, _BLOCK), "reading elements"):
        indices = np.arange(first, min(first + _BLOCK, count))
        atoms = dataset.compositions(indices, of_adsorbates)
        present |= atoms.any(axis=0)
        block = np.column_stack([atoms, np.ones(len(indices)), labels[indices]])
        triangle = np.asarray(np.linalg.qr(np.vstack([triangle, block]), mode="r"))
    energies, undetermined = np.zeros(columns), 0
    if given is None:
        matrix, target = triangle[:, :-2][:, present], triangle[:, -1]
        energies[present], _, rank, _ = np.linalg.lstsq(matrix, target, _NEGLIGIBLE)
        undetermined = int(present.sum() - rank)
    else:
        energies[[*given]] = [*given.values()]
        expect_elements(str(dataset.path), present, given)
        present[[*given]] = True
    # rotated residuals and ones; the rotation preserves their products
    residuals, ones = triangle[:, -1] - triangle[:, :-2] @ energies, triangle[:, -2]
    mean = float(residuals @ ones / count)
    spread = float(np.linalg.norm(residuals - mean * ones) / np.sqrt(count))
    return ElementEnergies(energies, present, undetermined, mean, beyond_rounding(spread, labels))


def expect_elements(name: str, present: NDArray[np.bool_], given: Mapping[int, float]) -> None:
    """Raises ValueError for elements without a reference energy."""
    if missing := [symbol(z) for z in np.flatnonzero(present) if z not in given]:
        raise ValueError(
            f"{name}: no reference energies for {', '.join(missing)}; add them to the file of "
            "--task.references, or use --task.references fit"
        )


def read_element_energies(path: Path) -> dict[int, float]:
    """Returns element energies, in eV, keyed by atomic number, from a JSON or YAML file."""
    import yaml
    from ase.data import atomic_numbers

    if not path.is_file():
        raise ValueError(f"task.references must be none, fit, adapt or a file; got {path}")
    energies = {}
    try:
        for symbol, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            number, energy = atomic_numbers[symbol], float(value)
            if number < 1 or not np.isfinite(energy):
                raise ValueError(f"got {shown(symbol)}: {shown(value)}")
            energies[number] = energy
    except (ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path}: expected symbols of elements and their energies in eV, such as H: -13.6; "
            f"{type(error).__name__}: {shown(str(error))}"
        ) from None
    return energies
