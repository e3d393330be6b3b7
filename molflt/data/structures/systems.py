"""systems.csv: names of the systems of a data set, next to its stores."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from molflt.files import shown, write_atomically

__all__ = ["SYSTEMS", "System", "read_systems", "write_systems"]

SYSTEMS = "systems.csv"
_LARGEST = 2**27  # bytes; a row has about 40


class System(NamedTuple):
    """Names of a system and of the groups that it belongs to."""

    sid: int
    """sid in the stores"""
    name: str
    molecule: str
    """name of the adsorbate in the data set"""
    family: str
    """family of the molecule"""
    metal: str
    """symbol of the element of the surface"""


def write_systems(folder: Path, splits: Iterable[tuple[str, Iterable[System]]]) -> None:
    """Writes systems.csv: sid, name, molecule, family, metal, split.

    Args:
        folder: folder of the data set.
        splits: names of splits and their systems.

    Raises:
        OSError: if the file cannot be written.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*System._fields, "split"])
    for split, systems in splits:
        writer.writerows([*system, split] for system in systems)
    write_atomically(folder / SYSTEMS, buffer.getvalue().encode())


def read_systems(folder: Path) -> dict[int, System]:
    """Reads the systems of a data set, by sid.

    Args:
        folder: folder of the data set.

    Raises:
        FileNotFoundError: if systems.csv does not exist.
        ValueError: names the line that is not a system, or repeats a sid.
    """
    path = folder / SYSTEMS
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected the names of the systems; "
            "scripts/game_net.py of the repository writes it"
        )
    if (size := path.stat().st_size) > _LARGEST:
        raise ValueError(f"{path}: expected at most {_LARGEST:,} bytes; got {size:,}")
    found: dict[int, System] = {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            for row in rows:
                system = _system(row, f"{path}: line {rows.line_num}")
                if system.sid in found:
                    raise ValueError(
                        f"{path}: line {rows.line_num}: sid {system.sid} comes twice; expected "
                        "each once; convert the data set again"
                    )
                found[system.sid] = system
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a table in CSV; {error}; convert it again") from None
    return found


def _system(row: dict[str, str], where: str) -> System:
    words = [row.get(key) for key in System._fields]
    sid, *names = words
    if sid is None or not (sid.isascii() and sid.isdigit() and len(sid) < 19) or None in names:
        raise ValueError(
            f"{where}: expected {', '.join(System._fields)}, the first a whole number; got "
            f"{shown(words)}; convert the data set again"
        )
    return System(int(sid), *(name or "" for name in names))
