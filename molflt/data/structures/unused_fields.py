"""Fields of a structure that change its energy and that no model of this package reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from molflt.data.structures.ase_labels import entries
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["unused_fields", "unused_warning"]

_WORDS = {"charge", "charges", "spin", "spins", "multiplicity", "mult", "magmom", "magmoms"}
_WORDS |= {"uhf", "nupdown", "magnetization", "magnetisation", "efield", "bfield", "nelect"}
_WORDS |= {"electrons", "unpaired", "mag", "oxidation", "cation", "anion", "electrode", "hubbard"}
_WORDS |= {"solvent", "excited"}
_RESULTS = {"nuclear", "born", "dipole", "quadrupole", "inertia"}
_KINDS = {"electric", "external", "magnetic", "applied", "electrostatic", "e", "b"}
_MULTIPLICITY = {"spin", "spins", "multiplicity", "mult"}


def unused_fields(atoms: Atoms) -> dict[str, str]:
    """Charge, spin, magnetic moments and external field of a structure: name to value as text.

    Reads ``info``, the data of a database row, ``arrays`` and stored results. Zero values and the
    spin or multiplicity 1 are left out.
    """
    results = getattr(atoms.calc, "results", None) or {}
    fields = {**results, **atoms.arrays, **entries(atoms)}
    found = {name: _text(value, _words(name)) for name, value in fields.items()}
    return {name: text for name, text in found.items() if text}


def unused_warning(where: str, fields: Mapping[str, str]) -> str:
    """One line that names the fields of a structure, or of a file."""
    named = ", ".join(f"{name} ({text})" for name, text in fields.items())
    return f"{where}: {named} not used; models read elements, positions and cell only"


def _words(name: str) -> set[str]:
    """Words of "initial_charges", "totalCharge" or "Electric field", in lower case."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return set(re.split(r"[^a-z]+", apart.lower()))


def _text(value: object, words: set[str]) -> str:
    """Text for a field that changes the energy; "" for another one, or for a neutral value."""
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
