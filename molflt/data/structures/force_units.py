"""Whether energies are in eV, by what electrons can give, and forces in eV/Å, by differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["energy_unit_fault", "force_unit_fault"]

_ATOM = 20.92  # eV, of Z^(7/3): all electrons of an atom by Thomas and Fermi, at most

_MOST_FRAMES = 300  # of which neighbors are sought; 300 of 1,000 atoms are 2 MB
_FEWEST_PAIRS = 8
_MOST_PAIRS = 50  # the nearest ones: a line is the fairer a path the shorter it is
_SURE = 0.5  # correlation of energy differences with what forces say, from which it counts
_FARTHEST = 0.5  # Å, root mean square distance of frames between which a line is a fair path
_UNITS = {  # eV/Å of one unit
    "eV/Å": 1.0,
    "kcal/mol/Å": 0.0433641,
    "kJ/mol/Å": 0.0103643,
    "Hartree/bohr": 51.422067,
    "Hartree/Å": 27.211386,
    "eV/bohr": 1.8897261,
    "meV/Å": 1e-3,
    "eV/nm": 0.1,
}


class _Slope(NamedTuple):
    """dE = factor * (what forces say), of `pairs` pairs, with this correlation."""

    factor: float
    correlation: float
    pairs: int


def force_unit_fault(records: Iterable[Data]) -> str:
    """What is wrong with the unit or the sign of forces; "" if nothing is, or nobody can say.

    Between near frames of one system the energy changes by -(F_a + F_b) / 2 . (r_b - r_a) up to
    the third order, if forces are in the unit of energy over Å.

    Args:
        records: structures with energies (eV) and forces; at most 300 of them are looked at.
    """
    found = _slope(records)
    if found is None or abs(found.correlation) < _SURE:
        return ""
    unit = min(_UNITS, key=lambda name: abs(np.log(abs(found.factor) / _UNITS[name])))
    sign = "" if found.factor > 0 else "minus "
    if unit == "eV/Å" and not sign:
        return ""
    what = f"{sign}{unit}" if unit != "eV/Å" else "gradients, minus the forces"
    return (
        f"forces look like {what}: between {found.pairs} pairs of near frames energies change by "
        f"{found.factor:.3g} of what forces in eV/Å would say; expected 1"
    )


def energy_unit_fault(energies: NDArray[np.float64], compositions: NDArray[np.float64]) -> str:
    """What is wrong with the unit of energies, "" if nothing is to be seen.

    Args:
        energies: (structures,), eV.
        compositions: atoms of each element, (structures, 119).
    """
    numbers = np.arange(compositions.shape[1], dtype=float)
    ratio = -energies / (compositions @ (_ATOM * numbers ** (7 / 3)))
    most = float(np.median(ratio))
    if most < 2:
        return ""
    return (
        f"energies are {most:.0f} times what all electrons of the atoms can give; expected eV; "
        "1 Hartree is 27.2114 eV, 1 eV is 23.0605 kcal/mol or 96.4853 kJ/mol"
    )


def _slope(records: Iterable[Data]) -> _Slope | None:
    """None where too few frames of one system are near each other."""
    systems: dict[bytes, list[Data]] = defaultdict(list)
    for count, record in enumerate(records):
        if count == _MOST_FRAMES:
            break
        if bool(record.energy.isfinite()) and bool(record.forces.isfinite().all()):
            systems[record.atomic_numbers.numpy().tobytes()].append(record)
    pairs: list[tuple[float, float, float]] = []
    for frames in systems.values():
        for a, b in _near_pairs(np.stack([frame.pos.numpy().ravel() for frame in frames])):
            step = (frames[b].pos - frames[a].pos).double()
            mean = (frames[a].forces + frames[b].forces).double() / 2
            change = float(frames[b].energy - frames[a].energy)
            pairs.append((float(step.square().mean()), -float((mean * step).sum()), change))
    nearest = np.array(sorted(pairs)[:_MOST_PAIRS]).reshape(-1, 3)
    x, y = nearest[:, 1], nearest[:, 2]
    if len(x) < _FEWEST_PAIRS or not x.any() or not y.any():
        return None
    product = float(x @ y)
    return _Slope(product / float(x @ x), product / float(np.sqrt((x @ x) * (y @ y))), len(x))


def _near_pairs(points: NDArray[np.float32]) -> list[tuple[int, int]]:
    """Each frame, (frames, 3 atoms), with its nearest one, if that is near."""
    if len(points) < 2:
        return []
    centred = points.astype(float) - points.mean(axis=0)
    square = (centred**2).sum(axis=1)
    distance = square[:, None] + square - 2 * centred @ centred.T
    np.fill_diagonal(distance, np.inf)
    nearest = distance.argmin(axis=1)
    limit = _FARTHEST**2 * points.shape[1] / 3
    near = distance[np.arange(len(points)), nearest] < limit
    return [(int(a), int(nearest[a])) for a in np.flatnonzero(near)]
