"""Refusal of ASE structures with fields that change their meaning, such as occupancies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["atomic_number", "check_fields", "is_element"]

_ISOTOPES = {"D": "H", "T": "H"}
_NEAR_ONE = 1e-3
_OCCUPANCY = re.compile(r"(site_?)?occ(upanc(y|ies))?", re.I)
_DENSEST = 1.0  # Å^3 per atom; metallic hydrogen at 500 GPa has 1.3


def is_element(symbol: str) -> bool:
    """True for the symbol of an element with a capital first letter."""
    from ase.data import atomic_numbers

    return atomic_numbers.get(symbol, 0) > 0


def atomic_number(symbol: str, atom: int) -> int:
    """Returns the atomic number of a symbol; ValueError for isotopes, dummy atoms and other
    text."""
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
    """Refuses dummy atoms, sites that are partly occupied, and cells too small for their atoms."""
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
            continue  # all 0: not given
        for atom, value in enumerate(rows):
            if part := next(filter(_is_partial, np.ravel(value)), None):
                return f"atom {atom} has the {name} {part:g}"
    return ""


def _is_partial(share: object) -> bool:
    try:
        return abs(float(share) - 1) > _NEAR_ONE  # type: ignore[arg-type]
    except (TypeError, ValueError):  # "?" and "." in a CIF mean unknown
        return False
