"""Fixed atoms and other constraints of an ASE structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["fixed_atoms", "other_constraints"]


def fixed_atoms(atoms: Atoms) -> NDArray[np.bool_]:
    """Atoms held in all three directions, (N,)."""
    held, _ = _held(atoms)
    return np.logical_and.reduce(held, axis=1)


def other_constraints(atoms: Atoms) -> set[str]:
    """Kinds of constraints other than atoms held in all three directions."""
    held, others = _held(atoms)
    some = held.any(axis=1) & ~held.all(axis=1)
    return others | ({"FixCartesian"} if bool(some.any()) else set())


def _held(atoms: Atoms) -> tuple[NDArray[np.bool_], set[str]]:
    """Returns the axes along which each atom is held, (N, 3), and kinds of other constraints."""
    from ase.constraints import FixAtoms, FixCartesian, FixScaled

    held, others = np.zeros((len(atoms), 3), dtype=bool), set()
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms | FixCartesian | FixScaled):
            mask = np.asarray(getattr(constraint, "mask", True))
            if isinstance(constraint, FixScaled) and mask.any() and not mask.all():
                others.add("FixScaled")  # along lattice vectors
                continue
            index = np.asarray(constraint.index)
            if index.size and not -len(atoms) <= index.min() <= index.max() < len(atoms):
                raise ValueError(
                    f"a constraint holds atom {index.max()}; expected one of 0..{len(atoms) - 1}; "
                    "the file is damaged"
                )
            held[index] |= mask
        else:
            others.add(type(constraint).__name__)
    return held, others
