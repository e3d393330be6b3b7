"""Energy kinds, implausible labels and units, and reference energies of elements."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import MAX_ATOMIC_NUMBER, Data, Tag, symbol
from molflt.data.structures.base import Structures, with_bar
from molflt.data.structures.geometry import adsorbates
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
    energies: NDArray[np.float64], natoms: NDArray[np.int64], learned: str, quantity: str = ""
) -> str:
    """Returns a description of labels that differ in kind from the training labels, or "".

    `learned` is the kind of the training energies or their quantity, such as gap; `quantity` is
    that of the labels, "" for energies.
    """
    kind = quantity or energy_kind(energies, natoms)
    if kind == learned or "unknown" in (kind, learned):
        return ""
    names = {"adsorption": "adsorption energies", "total": "total energies"}
    return (
        f"its labels look like {names.get(kind, kind)}; the model predicts "
        f"{names.get(learned, learned)}, as in training; do not compare them"
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


_THOMAS_FERMI = 20.92  # eV per Z^(7/3): upper bound for all electrons of an atom

MOST_FRAMES = 300
"""Maximum number of frames to compare; 300 frames of 1,000 atoms take 16 MB."""
_MOST_PAIRS = 50  # closest pairs only; the trapezoidal rule is more accurate for short paths
_MIN_CORRELATION = 0.5  # of energy differences with predictions of forces or stress
_MAX_DISTANCE = 0.5  # Å, largest root mean square distance between close frames
_MAX_STRAIN = 0.2  # largest component of the strain between two cells
# Ranges of correct slopes. The nearest units are eV/bohr (1.89) and eV/nm (0.1) for forces, and
# eV/bohr^3 (6.7) and a virial in a cell of 10 Å^3 (0.1) for stress.
_SLOPES = {"forces": (0.32, 1.37), "stress": (0.1, 5.0)}
_CONVENTIONS = {
    "forces": (
        "expected energies of all atoms in eV, and forces in eV/Å, minus the gradient; 1 "
        "Hartree/bohr is 51.4221, 1 kcal/mol/Å 0.0433641 eV/Å"
    ),
    "stress": (
        "expected eV/Å^3 with ASE's sign, negative for a compressed cell; 1 GPa is 0.00624151 "
        "eV/Å^3, 1 Hartree/bohr^3 is 183.632 eV/Å^3; VASP's values, in kbar, are -1602.18 times "
        "these; a virial is minus the volume times the stress"
    ),
}
# Lengths in Å. In one cell, the spread of the shear part of virials (eV) is a length times the
# forces (eV/Å) times the square root of the number of atoms. The length is 0.1 to 0.3 Å in crystals
# and slabs with EMT, and 0.3 to 0.8 Å in DFT dynamics of Cu, Li and Si.
_VIRIAL_LENGTHS = (0.01, 10.0)
# Mean square distance of two similar frames, in Å^2, and predicted and actual energy changes, in eV
_Pair = tuple[float, float, float]


class _Frame(NamedTuple):
    """Structure with labels, in eV and Å if the units are correct."""

    pos: NDArray[np.float64]  # (N, 3)
    cell: NDArray[np.float64]  # (3, 3); zeros if no axis is periodic
    energy: float
    forces: NDArray[np.float64]  # (N, 3); zeros if unknown
    stress: NDArray[np.float64]  # (3, 3)


def unit_fault(records: Iterable[Data]) -> str:
    """Returns the reason why labels are not in eV and Å; "" if they are, or if unknown.

    Uses the first 300 structures; ignores implausible labels unless most labels are implausible.
    """
    frames = list(islice(records, MOST_FRAMES))
    plausible = [record for record in frames if not point_fault(record)]
    frames = plausible if 2 * len(plausible) > len(frames) else frames
    return energy_unit_fault(frames) or force_unit_fault(frames) or stress_unit_fault(frames)


def energy_unit_fault(records: Sequence[Data]) -> str:
    """Describes energies that are too large to be in eV; "" if energies are plausible."""
    ratios = [
        float(-record.energy / (_THOMAS_FERMI * record.atomic_numbers.double() ** (7 / 3)).sum())
        for record in records
        if record.energy.isfinite()
    ]
    if not ratios or np.median(ratios) < 2:
        return ""
    return (
        f"energies are {np.median(ratios):.0f} times the all-electron energies of atoms; expected "
        "eV; 1 Hartree is 27.2114 eV, 1 eV is 23.0605 kcal/mol or 96.4853 kJ/mol"
    )


def force_unit_fault(records: Iterable[Data]) -> str:
    """Describes a wrong unit or sign of forces, inferred from energies; "" if correct or unknown.

    Between similar frames of one system, the energy changes by -(F_a + F_b) / 2 . (r_b - r_a), up
    to terms of third order. The first 300 structures are used.
    """
    pairs = list[_Pair]()
    for frames in _systems(records, ("energy", "forces")):
        for a, b in _closest_pairs(frames):
            step = b.pos - a.pos
            predicted = -float(((a.forces + b.forces) / 2 * step).sum())
            pairs.append((float((step**2).mean()), predicted, b.energy - a.energy))
    return _wrong_unit("forces", sorted(pairs)[:_MOST_PAIRS], 8)


def stress_unit_fault(records: Iterable[Data]) -> str:
    """Describes a wrong unit or sign of stress; "" if correct or unknown.

    Between similar frames of one system with different cells, the energy changes by the volume
    times stress : strain, plus the work of the forces. If the cell is constant, the unit is
    inferred from how much virials vary relative to the forces. The first 300 structures are used.
    """
    pairs, lengths = list[_Pair](), list[float]()
    for frames in _systems(records, ("energy", "stress")):
        pairs += filter(None, (_strained(a, b) for a, b in _closest_pairs(frames, strained=True)))
        by_cell: dict[bytes, list[_Frame]] = defaultdict(list)
        for frame in frames:
            by_cell[frame.cell.round(3).tobytes()].append(frame)
        lengths += filter(None, map(_virial_length, by_cell.values()))
    fault = _wrong_unit("stress", sorted(pairs)[:_MOST_PAIRS], 5)
    low, high = _VIRIAL_LENGTHS
    if fault or not lengths or low <= np.median(lengths) <= high:
        return fault
    return (
        f"stress is in the wrong unit: in one cell, its spread is {np.median(lengths):.2g} Å times "
        f"that of the forces; this ratio is usually {low:g} to {high:g} Å; "
        + _CONVENTIONS["stress"]
    )


def _systems(records: Iterable[Data], required: Iterable[str]) -> list[list[_Frame]]:
    """Groups frames that have the `required` labels by atoms, in the same order, and charge."""
    systems: dict[bytes, list[_Frame]] = defaultdict(list)
    for record in islice(records, MOST_FRAMES):
        if all(bool(record[name].isfinite().all()) for name in required):
            names = ("pos", "cell", "forces", "stress")
            pos, cell, forces, stress = (record[name].double().numpy() for name in names)
            if not record.pbc.any():
                cell = np.zeros_like(cell)  # a box around a molecule is arbitrary
            identity = record.atomic_numbers, record.pbc, record.charge.nan_to_num()
            key = b"".join(part.numpy().tobytes() for part in identity)
            frame = _Frame(pos, cell[0], float(record.energy), np.nan_to_num(forces), stress[0])
            systems[key].append(frame)
    return list(systems.values())


def _closest_pairs(frames: list[_Frame], strained: bool = False) -> Iterator[tuple[_Frame, _Frame]]:
    """Pairs each frame with the closest frame in the same cell, or, if `strained`, in another."""
    rows = [np.append(frame.pos, frame.cell if strained else ()) for frame in frames]
    points = np.stack(rows)  # (frames, 3 N), or (frames, 3 N + 9) with the cells
    centred = points - points.mean(axis=0)
    square = (centred**2).sum(axis=1)
    distance = square[:, None] + square - 2 * centred @ centred.T
    distance[distance <= 1e-9 * (1 + square)] = np.inf  # itself and copies
    cells = np.stack([frame.cell for frame in frames])
    difference = np.abs(cells[:, None] - cells).max((2, 3))
    # the work of a strain is not contained in the forces
    excluded = difference < 1e-4 if strained else difference > 1e-3 * np.abs(cells).max()
    distance[excluded] = np.inf
    nearest = distance.argmin(axis=1)
    limit = np.inf if strained else _MAX_DISTANCE**2 * points.shape[1] / 3
    for a in np.flatnonzero(distance[np.arange(len(frames)), nearest] < limit):
        yield frames[a], frames[nearest[a]]


def _strained(a: _Frame, b: _Frame) -> _Pair | None:
    """Compares frames in different cells; None if they differ too much or have no volume."""
    cell = (a.cell + b.cell) / 2
    volume = abs(float(np.linalg.det(cell)))
    if volume < 1:
        return None
    strain = np.linalg.solve(cell, b.cell - a.cell)
    steps = b.pos @ np.linalg.inv(b.cell) - a.pos @ np.linalg.inv(a.cell)
    steps = (steps - steps.round()) @ cell
    square = float((steps**2).mean())
    if np.abs(strain).max() > _MAX_STRAIN or square > _MAX_DISTANCE**2 / 3:
        return None
    change = b.energy - a.energy + float(((a.forces + b.forces) / 2 * steps).sum())
    predicted = volume * float(((a.stress + b.stress) / 2 * strain).sum())
    return square + float((strain**2).mean()), predicted, change


def _virial_length(frames: list[_Frame]) -> float | None:
    """Returns the spread of virials in one cell divided by the forces, in Å; None if unsure."""
    volume = abs(float(np.linalg.det(frames[0].cell)))
    positions = np.stack([frame.pos for frame in frames])
    forces = float(np.sqrt(np.mean([(frame.forces**2).mean() for frame in frames])))
    # different relaxed structures differ in the virial but not in forces
    min_forces = 0.1 if positions.var(axis=0).mean() < _MAX_DISTANCE**2 / 3 else 0.5  # eV/Å
    if len(frames) < 3 or volume < 1 or forces < min_forces:
        return None
    virials = volume * np.stack([frame.stress for frame in frames])
    virials -= virials.mean(axis=0)
    shear = virials - np.eye(3) * np.trace(virials, axis1=1, axis2=2)[:, None, None] / 3
    return float(np.sqrt((shear**2).mean())) / (len(frames[0].pos) ** 0.5 * forces)


def _wrong_unit(label: str, pairs: list[_Pair], min_pairs: int) -> str:
    """Describes a wrong unit from the slope of energy changes; "" if correct or undecided."""
    _, predicted, actual = np.array(pairs).reshape(-1, 3).T
    if len(pairs) < min_pairs or not predicted.any() or not actual.any():
        return ""
    # a few pairs may correlate by chance
    min_correlation = (
        max(_MIN_CORRELATION, 2.2 / len(pairs) ** 0.5) if label == "stress" else _MIN_CORRELATION
    )
    product, square = float(predicted @ actual), float(predicted @ predicted)
    correlation = abs(product) / np.sqrt(square * (actual @ actual))
    slope, (low, high) = product / square, _SLOPES[label]
    if correlation < min_correlation or low < slope < high:
        return ""
    return (
        f"{label} in the wrong unit or with the wrong sign, or energies in the wrong unit: in "
        f"{len(pairs)} pairs of similar frames, energies change by {slope:.3g} times the values "
        f"that {label} in eV and Å predict; expected 1; {_CONVENTIONS[label]}"
    )
