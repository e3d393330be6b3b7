"""Readers and checks of XYZ, CIF, PDB and POSCAR files, which refuse what ASE would misread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from itertools import islice
from typing import IO, TYPE_CHECKING

import numpy as np

from molflt.data.structures.ase_fields import atomic_number, is_element
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms
    from ase.io.cif import CIFBlock

__all__ = ["cif_frames", "expect_counts_of_poscar", "expect_elements_of_pdb", "xyz_frames"]

_READ = {name.lower(): name for name in ("Lattice", "pbc", "Properties")}
_READ |= dict.fromkeys(("periodic", "periodicity", "boundary"), "pbc")
_CELLS = ("cell", "unit_cell", "unitcell", "box", "lattice_vectors", "cell_vectors")
_NOT_ANGSTROM = re.compile(r"(?<![/\w])(cell\(|(bohr|fractional|atomic_unit|nm)\b)", re.I)
_WHOLE_SITES = {  # values of CIF fields which mean that all atoms of a site are listed
    "_atom_site_attached_hydrogens": {"0", ".", "?"},
    "_atom_site_calc_flag": {"d", "c", "calc", ".", "?"},
}


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

    _check_columns(_properties(lines[1]), lines[2:])
    (atoms,) = read_xyz(StringIO("".join(lines)), slice(None))
    return atoms


def _properties(comment: str) -> str:
    """Returns the columns that a comment line declares; refuses spellings that ASE ignores."""
    from ase.io.extxyz import key_val_str_to_dict

    if unit := _NOT_ANGSTROM.search(comment):
        raise ValueError(
            f"the comment line contains {shown(unit[0])}; expected Cartesian coordinates in Å and "
            "Lattice=...; convert the coordinates, or remove the word"
        )
    keys = key_val_str_to_dict(comment.strip()) if comment.strip() else {}
    axes = np.asarray(keys.get("pbc", True))
    if axes.dtype.kind not in "bi" or axes.size not in (1, 3) or not np.isin(axes, (0, 1)).all():
        raise ValueError(f'pbc is {shown(axes.tolist())}; expected booleans, as in pbc="T T F"')
    for key, value in keys.items():
        read = _READ.get(key.lower())
        if key.lower() in _CELLS and np.size(value) in (3, 6, 9):
            read = "Lattice"
        is_read = read in (None, key) or (read in keys and key.lower() != str(read).lower())
        if not is_read and f"{key}=" in comment.replace(" ", ""):
            raise ValueError(f"ASE ignores the key {key!r}; expected {read}=...; rename it")
    return str(keys.get("Properties", ""))


def _check_columns(properties: str, rows: list[str]) -> None:
    """Refuses ambiguous columns, and elements that differ between two columns."""
    names, _, widths = ((properties or "species:S:1:pos:R:3").split(":")[i::3] for i in range(3))
    ends = [0]
    for width in widths:
        ends.append(ends[-1] + int(width))
    start = dict(zip(names, ends, strict=False))
    found = [name for name in names if name in ("pos", "positions")]
    if len(found) != 1 or int(widths[names.index(found[0])]) != 3:
        raise ValueError(f"expected one column pos:R:3; got Properties={shown(properties)}")
    symbols = [start[name] for name in ("species", "symbols") if name in start]
    numbers = [start[name] for name in ("Z", "numbers") if name in start]
    if not symbols and not numbers:
        raise ValueError(f"expected a column species:S:1; got Properties={shown(properties)}")
    for atom, row in enumerate(rows):
        words = row.split()
        if len(words) < ends[-1] or (len(words) > ends[-1] and properties):
            raise ValueError(
                f"atom {atom} has {len(words)} columns; expected {ends[-1]}, as in Properties"
            )
        given = [atomic_number(words[column], atom) for column in symbols]
        given += [int(words[column]) for column in numbers]
        if len(set(given)) > 1:
            raise ValueError(
                f"atom {atom} is {words[(symbols + numbers)[0]]} in one column and "
                f"{words[(symbols + numbers)[-1]]} in another; expected one element; remove one"
            )


def cif_frames(file: IO[bytes]) -> Iterator[Callable[[], Atoms]]:
    """Yields, for each structure in a CIF, a function that reads it."""
    from ase.io.cif import parse_cif

    for block in parse_cif(file):
        if block.has_structure():
            yield partial(_cif_block, block)


def _cif_block(block: CIFBlock) -> Atoms:
    names = block.get("_atom_site_type_symbol") or block.get("_atom_site_label") or []
    for site, name in enumerate(names):
        letters = re.split("[^A-Za-z]", str(name))[0]
        if letters.isupper() and len(letters) == 2 and is_element(letters.title()):
            raise ValueError(
                f"site {site} is {shown(name, 20)}, which ASE reads as {letters[0]}; expected "
                f"_atom_site_type_symbol {letters.title()} or {letters[0]}; change it"
            )
        read = re.search("[A-Z][a-z]?", str(name))  # as in ASE
        if read is None or read[0] != "D":  # deuterium becomes H
            atomic_number(letters if read is None else read[0], site)
    for key, whole in _WHOLE_SITES.items():
        for site, value in enumerate(block.get(key) or []):
            if str(value) not in whole:
                raise ValueError(f"site {site} has {key} {shown(value)}; expected explicit atoms")
    groups = {str(one) for one in block.get("_atom_site_disorder_group") or []} - {".", "?", "0"}
    if len(groups) > 1:
        raise ValueError(
            f"sites have the disorder groups {sorted(groups)}; expected one; remove the others"
        )
    places = zip(*(block.get(f"_atom_site_fract_{axis}") or [] for axis in "xyz"), strict=False)
    known: dict[tuple[object, ...], object] = {}
    for site, (place, name) in enumerate(zip(places, names, strict=False)):
        if known.setdefault(place, name) != name and not block.get("_atom_site_occupancy"):
            raise ValueError(
                f"site {site}: {shown(name)} and {shown(known[place])} have the same position; "
                "expected one element on each site"
            )
    atoms: Atoms = block.get_atoms()
    return atoms


def expect_elements_of_pdb(file: IO[str]) -> None:
    """Refuses alternate locations, ambiguous atom names, and models without a cell."""
    cells = models = 0
    for number, line in enumerate(file, 1):
        cells, models = cells + line.startswith("CRYST1"), models + line.startswith("MODEL ")
        if not line.startswith(("ATOM", "HETATM")):
            continue
        if cells == 1 and models > 1:
            raise ValueError(
                f"line {number}: model {models} lacks CRYST1, which the first one has; expected "
                "the cell of each model; repeat the record"
            )
        name = line[12:16].strip()
        if line[16:17].strip() not in ("", "A"):
            raise ValueError(
                f"line {number}: atom {shown(name)} has the alternate location {line[16]!r}; "
                "expected one location for each atom; delete the others"
            )
        both = is_element(name[:1]) and is_element(name[:2].title())
        if both and len(name) > 1 and not line[76:78].strip():
            raise ValueError(
                f"line {number}: atom {shown(name)} may be {name[0]} or {name[:2].title()}; "
                "expected an element in columns 77 and 78; add it"
            )


def expect_counts_of_poscar(file: IO[str]) -> None:
    """Refuses a POSCAR in which the number of counts differs from the number of elements."""
    symbols, counts = (line.split() for line in islice(file, 5, 7))
    if not symbols[0].isdigit() and len(counts) != len(symbols):
        raise ValueError(
            f"line 7 has {len(counts)} counts for {len(symbols)} elements; expected one count each"
        )
