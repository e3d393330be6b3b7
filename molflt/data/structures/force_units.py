"""Sanity checks on the units and signs of energies, forces and stress, based on their values."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import Data
from molflt.data.structures.labels import point_fault

_Array = NDArray[np.float64]

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
        "expected eV/Å, minus the gradient; 1 Hartree/bohr is 51.4221, 1 kcal/mol/Å 0.0433641 eV/Å"
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


class _Frame(NamedTuple):
    """Structure with labels, in eV and Å if the units are correct."""

    pos: _Array  # (N, 3)
    cell: _Array  # (3, 3); zeros if no axis is periodic
    energy: float
    forces: _Array  # (N, 3); zeros if unknown
    stress: _Array  # (3, 3)


class _Pair(NamedTuple):
    """Two similar frames; sorting begins with the most similar ones."""

    distance: float  # mean square, in Å^2
    predicted: float  # change of the energy, in eV, if the label is in units of eV and Å
    actual: float  # change of the energy, in eV


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
            pairs.append(_Pair(float((step**2).mean()), predicted, b.energy - a.energy))
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
    return _Pair(square + float((strain**2).mean()), predicted, change)


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
    predicted = np.array([pair.predicted for pair in pairs])
    actual = np.array([pair.actual for pair in pairs])
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
        f"{label} in the wrong unit or with the wrong sign: in {len(pairs)} pairs of similar "
        f"frames, energies change by {slope:.3g} times the values that {label} in eV and Å "
        f"predict; expected 1; {_CONVENTIONS[label]}"
    )
