"""ASE databases in LMDB files (``.aselmdb``), as ase-db-backends writes them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molflt.data.structures.lmdb_file import LmdbFile

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["rows_of_aselmdb"]

_MOST = 2**28  # most bytes of a decompressed row


def rows_of_aselmdb(path: Path) -> Iterator[tuple[int, Callable[[], Atoms]]]:
    """Yields the id of each row and a function that reads it.

    Missing rows that were not deleted raise a ValueError when they are read.
    """
    file = LmdbFile(path)
    there = {int(key) for key in file if key.isdigit() and key == b"%d" % int(key)}
    next_id, deleted = _entry(file, "nextid"), _entry(file, "deleted_ids")
    gone = set() if deleted is None else {int(number) for number in deleted}
    if next_id is None and not there:
        raise ValueError("has neither rows nor 'nextid'; expected an ASE database")
    expected = range(1, int(next_id or max(there) + 1))
    for number in sorted({*expected, *there} - gone):
        yield number, partial(_atoms, file, number)


def _atoms(file: LmdbFile, number: int) -> Atoms:
    from ase.calculators.calculator import all_properties
    from ase.db.row import AtomsRow

    fields = _entry(file, str(number))
    if not isinstance(fields, dict):
        problem = "is missing" if fields is None else "lacks fields"
        raise ValueError(f"row {number} {problem}; get the file again, or leave it out (skip_bad)")
    fields |= {name: np.array(fields[name]) for name in all_properties if name in fields}
    atoms: Atoms = AtomsRow(fields | {"id": number}).toatoms(add_additional_information=True)
    return atoms


def _entry(file: LmdbFile, key: str) -> Any:
    """Returns the decoded value of a key, or None."""
    from ase.io.jsonio import decode

    content = file.get(key.encode())
    if content is None:
        return None
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(content, _MOST)
    except zlib.error as error:
        raise ValueError(f"key {key!r} is damaged: {error}; get the file again") from None
    if not unpacker.eof:
        raise ValueError(f"key {key!r} is truncated or larger than {_MOST:,} bytes unpacked")
    return decode(text.decode())
