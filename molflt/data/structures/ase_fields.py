"""Fields of ASE structures: checks, constraints, total charge, unused fields, and output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molflt.data.structures.ase_labels import entries
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["atomic_number", "check_fields", "drop_labels_", "fixed_atoms", "is_element", "not_held"]
__all__ += ["other_constraints", "total_charge", "unused_fields", "unused_warning"]

_ISOTOPES = {"D": "H", "T": "H"}
_NEAR_ONE = 1e-3
_OCCUPANCY = re.compile(r"(site_?)?occ(upanc(y|ies))?", re.I)
_DENSEST = 1.0  # Å^3 per atom; metallic hydrogen at 500 GPa has 1.3
_LABELS = ("energy", "free_energy", "forces", "stress")
_IN_EXTXYZ = {"FixAtoms", "FixCartesian"}
_IN_TRAJ = {"numbers", "positions", "tags", "momenta", "masses", "initial_magmoms"}
_IN_TRAJ |= {"initial_charges"}
_WORDS = {"charge", "charges", "spin", "spins", "multiplicity", "mult", "magmom", "magmoms"}
_WORDS |= {"uhf", "nupdown", "magnetization", "magnetisation", "efield", "bfield", "nelect"}
_WORDS |= {"electrons", "unpaired", "mag", "oxidation", "cation", "anion", "electrode", "hubbard"}
_WORDS |= {"solvent", "excited"}
_RESULTS = {"nuclear", "born", "dipole", "quadrupole", "inertia"}
_KINDS = {"electric", "external", "magnetic", "applied", "electrostatic", "e", "b"}
_MULTIPLICITY = {"spin", "spins", "multiplicity", "mult"}


def is_element(symbol: str) -> bool:
    """Returns True for the symbol of an element with a capital first letter."""
    from ase.data import atomic_numbers

    return atomic_numbers.get(symbol, 0) > 0


def atomic_number(symbol: str, atom: int) -> int:
    """Returns the atomic number of a symbol; refuses isotopes, dummy atoms and other text."""
    from ase.data import atomic_numbers

    number = atomic_numbers.get(symbol.capitalize(), 0)
    if number == 0:
        what = (
            f"write {_ISOTOPES[symbol]}, whose energies are the same"
            if symbol in _ISOTOPES
            else "rename or remove it"
        )
        raise ValueError(f"atom {atom} is {shown(symbol, 20)}; expected an element; {what}")
    return number


def check_fields(atoms: Atoms) -> None:
    """Refuses dummy atoms, partially occupied sites, and cells too small for their atoms."""
    dummies = np.flatnonzero(atoms.numbers == 0)
    if len(dummies):
        raise ValueError(
            f"atom {dummies[0]} is 'X', a dummy atom or a vacancy; expected an element; remove it"
        )
    if partial := _partial_site(atoms):
        raise ValueError(
            f"{partial}; expected sites with one atom each; write an ordered structure, such as "
            "a supercell with one element on each site"
        )
    volume = atoms.cell.volume / max(1, len(atoms))
    if atoms.pbc.all() and 0 < volume < _DENSEST:
        raise ValueError(
            f"the cell has {volume:.2g} Å^3 per atom; expected at least {_DENSEST:g}; give the "
            "cell in Å, or leave out a cell that is a placeholder"
        )


def _partial_site(atoms: Atoms) -> str:
    """Describes the first site with an occupancy other than 1; "" if all sites are full."""
    given = [*atoms.info.items(), *atoms.arrays.items()]
    named = [(name, value) for name, value in given if _OCCUPANCY.fullmatch(str(name))]
    sites = atoms.info.get("occupancy")
    if isinstance(sites, Mapping):  # in a CIF: kind of site -> symbol -> occupancy
        for site, shares in sites.items():
            own = shares if isinstance(shares, Mapping) else {"it": shares}
            if len(own) > 1 or any(_is_partial(share) for share in own.values()):
                listed = ", ".join(f"{symbol} {share}" for symbol, share in own.items())
                return f"site {site} has the occupancy {listed}"
    for name, values in named:
        rows = np.atleast_1d(np.asarray(values))
        if isinstance(values, Mapping) or rows.dtype.kind not in "fiub" or not rows.any():
            continue  # all 0 means not given
        for atom, value in enumerate(rows):
            if part := next(filter(_is_partial, np.ravel(value)), None):
                return f"atom {atom} has the {name} {part:g}"
    return ""


def _is_partial(share: object) -> bool:
    try:
        return abs(float(share) - 1) > _NEAR_ONE  # type: ignore[arg-type]
    except (TypeError, ValueError):  # "?" and "." in a CIF mean unknown
        return False


def fixed_atoms(atoms: Atoms) -> NDArray[np.bool_]:
    """Returns the mask of atoms held in all three directions, (N,)."""
    held, _ = _held(atoms)
    return np.logical_and.reduce(held, axis=1)


def other_constraints(atoms: Atoms) -> set[str]:
    """Returns the kinds of constraints except those that hold atoms in all three directions."""
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


def total_charge(atoms: Atoms) -> float | None:
    """Returns the total charge (e) in ``info`` or in the data of a database row; None if unknown.

    The name of the entry is charge, total_charge or net_charge, in any spelling.
    """
    found: dict[str, float] = {}
    for name, value in entries(atoms).items():
        multiple = bool(_words(name) & {"multiplicity", "mult"})
        if not (multiple or _is_total(name, value)):
            continue
        try:
            number = float(np.asarray(value, dtype=np.float64).item())
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be one number; got {shown(value, 40)}") from None
        if multiple and number not in (0, 1):
            raise ValueError(
                f"{name} must be 1, as no model reads another one; got {number:g}; leave the "
                "structure out, or the entry"
            )
        if not multiple and not np.isnan(number):
            found[name] = number
    if len(set(found.values())) > 1:
        raise ValueError(f"expected one total charge; got {found}; leave one out")
    return next(iter(found.values()), None)


def unused_fields(atoms: Atoms) -> dict[str, str]:
    """Returns the charges, spin, magnetic moments and fields of a structure by name, as text.

    They are read from ``info``, the data of a database row, ``arrays`` and stored results. Zeros, a
    spin or multiplicity of 1, and the total charge are left out.
    """
    results = getattr(atoms.calc, "results", None) or {}
    own = {name: each for name, each in entries(atoms).items() if not _is_total(name, each)}
    fields = {**results, **atoms.arrays, **own}
    found = {name: _text(value, _words(name)) for name, value in fields.items()}
    return {name: text for name, text in found.items() if text}


def unused_warning(where: str, fields: Mapping[str, str]) -> str:
    """Returns a warning that names the unused fields of a structure or of a file."""
    named = ", ".join(f"{name} ({text})" for name, text in fields.items())
    return f"{where}: {named} not used; models read elements, positions, cell and total charge"


def _is_total(name: str, value: Any) -> bool:
    """Returns True if an entry is the total charge."""
    named = "charge" in (words := _words(name)) and words <= {"charge", "total", "net"}
    return named and value is not None and np.size(value) == 1


def _words(name: str) -> set[str]:
    """Splits "initial_charges", "totalCharge" or "Electric field" into words in lower case."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return set(re.split(r"[^a-z]+", apart.lower()))


def _text(value: object, words: set[str]) -> str:
    """Describes a field that changes the energy; "" for other fields and for neutral values."""
    field = bool(words & {"field", "fields"}) and bool(words & _KINDS or len(words) == 1)
    moment = bool(words & {"moment", "moments"}) and bool("magnetic" in words or len(words) == 1)
    if not (words & _WORDS or field or moment) or words & _RESULTS or value is None:
        return ""
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return shown(value, 40)
    if numbers.size == 1 and words & _MULTIPLICITY and numbers == 1:
        return ""
    if not np.nan_to_num(numbers).any():
        return ""
    if numbers.size == 1:
        return f"{numbers.item():g}"
    return f"{np.nanmin(numbers):g} to {np.nanmax(numbers):g}"


def drop_labels_(atoms: Atoms) -> None:
    """Removes energies, forces and stress, in place."""
    for name in _LABELS:
        atoms.info.pop(name, None)
        atoms.arrays.pop(name, None)


def not_held(atoms: Atoms, suffix: str) -> list[str]:
    """Describes the constraints or arrays that a file with this extension cannot hold.

    Args:
        atoms: structure to write.
        suffix: .extxyz or .traj.
    """
    if suffix == ".traj":
        lost, whole = {f"array {name}" for name in atoms.arrays.keys() - _IN_TRAJ}, ".extxyz"
    else:
        lost, whole = {type(one).__name__ for one in atoms.constraints} - _IN_EXTXYZ, ".traj"
    return [f"{kind} cannot be held by {suffix}; write {whole} to keep it" for kind in sorted(lost)]
