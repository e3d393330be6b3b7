"""Changes of a structure that must not change the results, or must change them in a known way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from ase import Atoms

from molflt.certify.case import BOX, IDENTITY, Case, Results, X, Y, Z, copied

Change = Callable[[Atoms], Iterable[Atoms]]
_TURN = np.linalg.qr(np.array([[1.0, 2, 3], [0, 1, 4], [5, 6, 0]]))[0]  # orthogonal


def error_after(
    case: Case,
    change: Change = lambda atoms: [atoms],
    on: Sequence[str] = (),
    through: Callable[[Any], Any] = lambda calculator: calculator,
    **functions: Callable[[Any], Any],
) -> float:
    """Returns the largest error after a change; `functions` map original to expected results."""
    errors = []
    for atoms in case.copies(*on):
        calculator = case.make()
        expected = Results(calculator, atoms)
        for name in functions.keys() & expected.keys():
            expected[name] = functions[name](expected[name])
        calculator = through(calculator)
        errors += [Results(calculator, changed).difference(expected) for changed in change(atoms)]
    return max(errors)


def _moved(*shifts: Any) -> Change:
    return lambda atoms: [copied(atoms, atoms.positions + shift) for shift in shifts]


def _cells(*factors: Any) -> Change:
    return lambda atoms: [copied(atoms, cell=factor @ atoms.cell.array) for factor in factors]


def _boxed(atoms: Atoms) -> list[Atoms]:
    return [copied(atoms, cell=box) for box in (IDENTITY, BOX, -BOX, np.diag([5.0, 5, 0]))]


def _unwrapped(atoms: Atoms) -> list[Atoms]:
    steps = np.random.default_rng(0).integers(-9, 10, (len(atoms), 3)) * atoms.pbc
    return [copied(atoms, atoms.positions + k * steps @ atoms.cell.array) for k in (1, -1)]


def _turned(turn: Any) -> dict[str, Any]:
    return {
        "change": lambda a: [copied(a, a.positions @ turn.T, a.cell @ turn.T)],
        "forces": lambda f: f @ turn.T,
        "stress": lambda s: turn @ s @ turn.T,
    }


_TWICE = {"energy": lambda e: 2 * e, "forces": lambda f: np.tile(f, (2, 1))}
_SKEWS = [IDENTITY + k * np.outer(X, Y) for k in (1, -3, 10)]
_THIRDS = [np.diag([1, 1, k]) for k in (2, 0, -1.5)] + [IDENTITY + 0.4 * np.outer(Z, X + Y)]
CHANGES: dict[str, dict[str, Any]] = {
    "translation": {"change": _moved([3.1, -2.7, 1.3])},
    "translation by 10,000 Å": {"change": _moved(*1e4 * IDENTITY)},
    "rotation": _turned(_TURN * np.linalg.det(_TURN)),
    "mirror image": _turned(-_TURN * np.linalg.det(_TURN)),
    "order of atoms": {"change": lambda a: [a[::-1]], "forces": lambda f: f[::-1]},
    "unwrapped atoms": {"on": ("crystal", "slab"), "change": _unwrapped},
    "left-handed cell": {"on": ("crystal", "slab"), "change": _cells(IDENTITY[[1, 0, 2]])},
    "skewed cell": {"on": ("crystal", "slab"), "change": _cells(*_SKEWS)},
    "supercell along a": {"on": ("crystal", "slab"), "change": lambda a: [a * (2, 1, 1)], **_TWICE},
    "supercell along b": {"on": ("crystal", "slab"), "change": lambda a: [a * (1, 2, 1)], **_TWICE},
    "third cell vector of a slab": {"on": ("slab",), "change": _cells(*_THIRDS)},
    "box around a molecule": {"on": ("molecule",), "change": _boxed},
    "ten runs": {"change": lambda a: [a] * 9},
    "deepcopy": {"through": copy.deepcopy},
    "pickle": {"through": lambda c: pickle.loads(pickle.dumps(c))},
}
"""name of the check -> arguments of `error_after`"""
