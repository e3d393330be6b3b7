"""Fields of a structure that change its energy: total charge, and fields that are not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from molflt.data.structures.ase_labels import entries
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["total_charge", "unused_fields", "unused_warning"]

_WORDS = {"charge", "charges", "spin", "spins", "multiplicity", "mult", "magmom", "magmoms"}
_WORDS |= {"uhf", "nupdown", "magnetization", "magnetisation", "efield", "bfield", "nelect"}
_WORDS |= {"electrons", "unpaired", "mag", "oxidation", "cation", "anion", "electrode", "hubbard"}
_WORDS |= {"solvent", "excited"}
_RESULTS = {"nuclear", "born", "dipole", "quadrupole", "inertia"}
_KINDS = {"electric", "external", "magnetic", "applied", "electrostatic", "e", "b"}
_MULTIPLICITY = {"spin", "spins", "multiplicity", "mult"}


def total_charge(atoms: Atoms) -> float | None:
    """Returns the total charge in ``info`` or in the data of a database row, e; None if unknown.

    Its name is charge, total_charge or net_charge in any spelling.

    Raises:
        ValueError: no number, two different charges, or a multiplicity other than 1.
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
    """Returns charges, spin, magnetic moments and fields of a structure by name, as text.

    It reads ``info``, the data of a database row, ``arrays`` and stored results. It leaves out
    zeros, a spin or multiplicity of 1, and the total charge.
    """
    results = getattr(atoms.calc, "results", None) or {}
    own = {name: each for name, each in entries(atoms).items() if not _is_total(name, each)}
    fields = {**results, **atoms.arrays, **own}
    found = {name: _text(value, _words(name)) for name, value in fields.items()}
    return {name: text for name, text in found.items() if text}


def unused_warning(where: str, fields: Mapping[str, str]) -> str:
    """Returns a line that names the fields of a structure, or of a file."""
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
    """Returns text for a field that changes the energy; "" for others, or for a neutral value."""
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
