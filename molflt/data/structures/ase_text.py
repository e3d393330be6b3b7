"""Readers and checks for XYZ, CIF and POSCAR files; they reject what ASE would misread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from itertools import islice
from typing import IO, TYPE_CHECKING

import numpy as np

from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms
    from ase.io.cif import CIFBlock

__all__ = ["cif_frames", "expect_counts_of_poscar", "xyz_frames"]

_READ = {name.lower(): name for name in ("Lattice", "pbc", "Properties")}
_CELLS = ("cell", "unit_cell", "unitcell", "box", "lattice_vectors", "cell_vectors")
_NOT_ANGSTROM = re.compile(r"(?<![/\w])(cell\(|(bohr|fractional|atomic_unit|nm)\b)", re.I)


def xyz_frames(file: IO[str]) -> Iterator[Callable[[], Atoms]]:
    """Yields, for each frame of a plain or extended XYZ file, a function that parses it."""
    for line in file:
        if line.isspace():  # between frames
            continue
        if not line.strip().isdigit():
            raise ValueError(f"expected a number of atoms; got {shown(line.strip(), 40)}")
        count = int(line)
        lines = [line, *islice(file, count + 1)]
        if len(lines) < count + 2:
            raise ValueError(f"{max(0, len(lines) - 2)} of {count} atoms; the file is truncated")
        yield partial(_xyz_frame, lines)


def _xyz_frame(lines: list[str]) -> Atoms:
    from ase.io.extxyz import read_xyz

    columns = _columns(lines[1])
    width = sum(map(int, columns.split(":")[2::3]))
    for atom, row in enumerate(lines[2:] if columns else ()):
        if (found := len(row.split())) != width:
            raise ValueError(f"atom {atom} has {found} columns; expected {width}, as in Properties")
    if re.search(r"\b(Z|numbers):I:1", lines[1]):
        # ASE ignores symbols if there are numbers; under another name, they become an array.
        lines[1] = re.sub(r"\b(species|symbols):S:1", "named:S:1", lines[1])
    (atoms,) = read_xyz(StringIO("".join(lines)), slice(None))
    symbols = np.array(atoms.get_chemical_symbols())
    for wrong in np.flatnonzero(atoms.arrays.pop("named", symbols) != symbols):
        raise ValueError(f"atom {wrong} has two elements, one of them {symbols[wrong]}; remove one")
    return atoms


def _columns(comment: str) -> str:
    """Returns the columns that a comment line declares, such as species:S:1:pos:R:3.

    Rejects units, and spellings of the cell, periodic axes and positions, that ASE would ignore.
    """
    from ase.io.extxyz import key_val_str_to_dict

    if unit := _NOT_ANGSTROM.search(comment):
        raise ValueError(
            f"the comment line contains {shown(unit[0])}; expected Cartesian coordinates in Å and "
            "Lattice=...; convert the coordinates, or remove the word"
        )
    keys = key_val_str_to_dict(comment.strip()) if comment.strip() else {}
    axes, columns = np.asarray(keys.get("pbc", True)), str(keys.get("Properties", ""))
    if axes.dtype.kind not in "bi":
        raise ValueError(f'pbc is {shown(axes.tolist())}; expected booleans, as in pbc="T T F"')
    if columns and not re.search(r"(^|:)pos:R:3(:|$)", columns):
        raise ValueError(f"expected a column pos:R:3; got Properties={shown(columns)}")
    for key, value in keys.items():
        is_cell = key.lower() in _CELLS and np.size(value) in (3, 6, 9)
        read = "Lattice" if is_cell else _READ.get(key.lower(), key)
        if key != read and read not in keys and f"{key}=" in comment.replace(" ", ""):
            raise ValueError(f"ASE ignores the key {key!r}; expected {read}=...; rename it")
    return columns


def cif_frames(file: IO[bytes]) -> Iterator[Callable[[], Atoms]]:
    """Yields, for each structure in a CIF file, a function that reads it."""
    from ase.io.cif import parse_cif

    for block in parse_cif(file):
        if block.has_structure():
            yield partial(_cif_block, block)


def _cif_block(block: CIFBlock) -> Atoms:
    from ase.data import atomic_numbers

    names = block.get("_atom_site_type_symbol") or block.get("_atom_site_label") or []
    for site, name in enumerate(names):
        letters = re.split("[^A-Za-z]", str(name))[0]
        if letters.isupper() and len(letters) == 2 and letters.title() in atomic_numbers:
            raise ValueError(
                f"site {site} is {shown(name, 20)}, which ASE reads as {letters[0]}; expected "
                f"_atom_site_type_symbol {letters.title()} or {letters[0]}; change it"
            )
    atoms: Atoms = block.get_atoms()
    return atoms


def expect_counts_of_poscar(file: IO[str]) -> None:
    """Rejects a POSCAR in which the number of counts differs from the number of elements."""
    symbols, counts = (line.split() for line in islice(file, 5, 7))
    if not symbols[0].isdigit() and len(counts) != len(symbols):
        raise ValueError(
            f"line 7 has {len(counts)} counts for {len(symbols)} elements; expected one count each"
        )
