"""What keeps ASE's readers from taking all time or memory for what a small file claims."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["bounded", "check_counts", "check_poscar", "xyz_properties"]

_LONGEST = 100_000  # characters of a line of properties; ASE takes 4 us for each
_MOST_COLUMNS = 10_000
_COUNTS_OF_POSCAR = (5, 6)  # lines, from 0: with and without the names of elements above
_COPIES = 192  # of an atom, by the symmetry of a crystal, at most


def check_counts(path: Path, kind: str) -> None:
    """Refuses numbers of atoms for which a text file is too short; ASE would believe them.

    Args:
        path: the file.
        kind: ASE's name of its format.

    Raises:
        ValueError: saying what the file claims.
    """
    size = path.stat().st_size
    if kind == "vasp":
        with open(path, "rb") as file:
            lines = [file.readline(_LONGEST) for _ in range(max(_COUNTS_OF_POSCAR) + 1)]
        _check_counts_of_poscar(lines, size)
    elif kind == "extxyz":
        with open(path, "rb") as file:
            for frame, count in enumerate(iter(lambda: file.readline(_LONGEST).strip(), b"")):
                _check_count(_whole(count), size, f"frame {frame}")
                for _ in range(1 + _whole(count)):
                    file.readline()


def check_poscar(content: bytes) -> None:
    """Refuses a POSCAR that is too short for its atoms, or would have ASE look into other files.

    Raises:
        ValueError: saying what it claims, or that its sixth line names no elements.
    """
    lines = content.splitlines()[: max(_COUNTS_OF_POSCAR) + 1]
    lines += [b""] * (max(_COUNTS_OF_POSCAR) + 1 - len(lines))
    _check_counts_of_poscar(lines, len(content))
    names = lines[min(_COUNTS_OF_POSCAR)].split()
    if not names or not all(name.isalpha() and len(name) <= 2 for name in names):
        raise ValueError(f"line {min(_COUNTS_OF_POSCAR) + 1} names no elements")


def _check_counts_of_poscar(lines: list[bytes], size: int) -> None:
    for line in _COUNTS_OF_POSCAR:
        _check_count(sum(_whole(word) for word in lines[line].split()), size, f"line {line + 1}")


def _whole(word: bytes) -> int:
    """A number of a file; 0 for what is none, which ASE itself refuses or leaves alone."""
    return int(word[:40]) if word.isdigit() else 0


def _check_count(count: int, size: int, where: str) -> None:
    if count > size:
        raise ValueError(f"{where} says that there are {count} atoms; the file has {size} bytes")


def xyz_properties(line: str) -> dict[str, object]:
    """The properties that the second line of a frame in extended XYZ gives.

    Raises:
        ValueError: for a line, or a number of columns, that no file needs.
    """
    from ase.io.extxyz import key_val_str_to_dict

    if len(line) > _LONGEST:
        raise ValueError(f"a line of properties has {len(line)} characters, above {_LONGEST}")
    found: dict[str, object] = key_val_str_to_dict(line)
    columns = sum(int(count) for count in str(found.get("Properties", "")).split(":")[2::3])
    if columns > _MOST_COLUMNS:
        raise ValueError(f"Properties says that there are {columns} columns, above {_MOST_COLUMNS}")
    return found


@contextmanager
def bounded(path: Path, kind: str) -> Iterator[Callable[[Atoms], Atoms]]:
    """Bounds what ASE makes of a file by what the file holds.

    Within the block, ASE makes no array with more numbers than its text lists.

    Args:
        path: the file.
        kind: ASE's name of its format.

    Yields:
        To be called with each structure: raises a ValueError when they have more atoms than fit.
    """
    from ase.io import jsonio

    original, room = jsonio.create_ndarray, os.path.getsize(path)
    if kind == "cif":
        room *= _COPIES

    def listed(shape: list[int], dtype: str, data: object) -> np.ndarray:
        numbers = np.size(np.asarray(data)) // (2 if np.dtype(dtype).kind == "c" else 1)
        if math.prod(shape) != numbers:
            raise ValueError(f"an array of {math.prod(shape)} numbers lists {numbers}")
        array: np.ndarray = original(shape, dtype, data)
        return array

    def count(atoms: Atoms) -> Atoms:
        nonlocal room
        room -= len(atoms)
        if room < 0:
            raise ValueError(f"it has more atoms than its {os.path.getsize(path)} bytes can hold")
        return atoms

    jsonio.create_ndarray = listed
    try:
        yield count
    finally:
        jsonio.create_ndarray = original
