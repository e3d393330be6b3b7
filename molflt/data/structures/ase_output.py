"""Output of structures with new labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["drop_labels_", "not_held"]

_LABELS = ("energy", "free_energy", "forces", "stress")
_IN_EXTXYZ = {"FixAtoms", "FixCartesian"}
_IN_TRAJ = {"numbers", "positions", "tags", "momenta", "masses", "initial_magmoms"}
_IN_TRAJ |= {"initial_charges"}


def drop_labels_(atoms: Atoms) -> None:
    """Removes energies, forces and stress, in place."""
    for name in _LABELS:
        atoms.info.pop(name, None)
        atoms.arrays.pop(name, None)


def not_held(atoms: Atoms, suffix: str) -> list[str]:
    """Describes what a file with this ending cannot hold: constraints, or arrays.

    Args:
        atoms: structure to write.
        suffix: .extxyz or .traj.
    """
    if suffix == ".traj":
        lost, whole = {f"array {name}" for name in atoms.arrays.keys() - _IN_TRAJ}, ".extxyz"
    else:
        lost, whole = {type(one).__name__ for one in atoms.constraints} - _IN_EXTXYZ, ".traj"
    return [f"{kind} cannot be held by {suffix}; write {whole} to keep it" for kind in sorted(lost)]
