"""References of total energies: an energy for each element, by least squares or given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import MAX_ATOMIC_NUMBER
from molflt.data.structures.base import Structures
from molflt.data.structures.labels import beyond_rounding
from molflt.files import shown

__all__ = ["ElementEnergies", "expect_elements", "fit_element_energies", "read_element_energies"]

_MOST_BYTES = 100_000
_NEGLIGIBLE = 1e-10  # of the largest singular value


class ElementEnergies(NamedTuple):
    """Energies of elements, and statistics of the residual labels.

    Attributes:
        energies: by atomic number, (119,), eV; 0 for elements that no structure has.
        present: by atomic number, (119,) bool, elements with an energy.
        undetermined: how many combinations of elements the compositions leave open, in which the
            energies are then as small as they can be.
        mean: of the residual labels, eV.
        std: its standard deviation, eV; 0 where that is rounding.
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
) -> ElementEnergies:
    """Fits y_relaxed = sum over atoms of the energy of their element.

    Least squares of smallest norm, from the triangle of a QR decomposition that takes structures in
    blocks: exact in float64 also where energies are 1e5 eV, in memory that does not grow.

    Args:
        dataset: structures with labels, all of them finite.
        given: energies by atomic number, eV, to use instead of a fit.
        of_adsorbates: sum over adsorbate atoms only.
    """
    columns = MAX_ATOMIC_NUMBER + 1
    labels, count = dataset.y_relaxed, len(dataset)
    present = np.zeros(columns, dtype=bool)
    triangle = np.zeros((0, columns + 2))  # of compositions, ones and labels
    for indices, atoms in dataset.composition_blocks(of_adsorbates):
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
    # an orthogonal matrix times the residuals, and times ones: their products stay the same
    left, ones = triangle[:, -1] - triangle[:, :-2] @ energies, triangle[:, -2]
    mean = float(left @ ones / count)
    spread = float(np.linalg.norm(left - mean * ones) / np.sqrt(count))
    return ElementEnergies(energies, present, undetermined, mean, beyond_rounding(spread, labels))


def expect_elements(name: str, present: NDArray[np.bool_], given: Mapping[int, float]) -> None:
    """Raises ValueError for elements without a reference energy."""
    from ase.data import chemical_symbols

    if missing := [chemical_symbols[z] for z in np.flatnonzero(present) if z not in given]:
        raise ValueError(
            f"{name}: no reference energy of {', '.join(missing)}; add them to the file of "
            "--task.references, or take --task.references fit"
        )


def read_element_energies(path: Path) -> dict[int, float]:
    """Energies, eV, by atomic number, from a JSON or YAML file of energies by symbol."""
    import yaml
    from ase.data import atomic_numbers

    expected = f"{path}: expected symbols of elements and their energies in eV, as H: -13.6"
    if not path.is_file():
        raise ValueError(f"task.references must be none, fit or a file; got {path}: no such file")
    try:
        text = path.read_bytes()[:_MOST_BYTES].decode()
        content = None if "&" in text else yaml.safe_load(text)  # no anchors, which can explode
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{expected}; {shown(str(error), 80)}") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{expected}; got {shown(content)}")
    found = {}
    for key, value in content.items():
        symbol = "No" if key is False else key  # YAML takes nobelium for a boolean
        try:
            number, energy = atomic_numbers[symbol], float(value)
        except (KeyError, TypeError, ValueError):
            number, energy = 0, float("nan")
        if not 0 < number <= MAX_ATOMIC_NUMBER or not np.isfinite(energy) or value is True:
            raise ValueError(f"{expected}; got {shown(key)}: {shown(value)}")
        found[number] = energy
    return found
