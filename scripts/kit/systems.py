"""Names of systems in systems.csv, next to the stores of a data set, and arrays of npz files."""

import csv
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from molflt.files import csv_rows, csv_text, write_atomically

SYSTEMS = "systems.csv"


class System(NamedTuple):
    """Names of a system and of the groups to which it belongs."""

    sid: int
    name: str
    molecule: str
    """name of the adsorbate in the data set"""
    family: str
    metal: str
    """symbol of the surface element"""


def write_systems(folder: Path, splits: Iterable[tuple[str, Iterable[System]]]) -> None:
    """Writes systems.csv, with a column for each field and a column for the split."""
    rows = [system._asdict() | {"split": split} for split, systems in splits for system in systems]
    text = csv_text(rows, [*System._fields, "split"])
    write_atomically(folder / SYSTEMS, text.encode())


def read_systems(folder: Path) -> dict[int, System]:
    """Returns the systems of the data set in a folder, keyed by sid."""
    path = folder / SYSTEMS
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected names of systems, as scripts/game_net.py writes them"
        )
    try:
        rows = csv_rows(path.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: expected CSV; {error}; write it again") from None
    found = ([row[field] for field in System._fields] for row in rows)
    return {int(sid): System(int(sid), *others) for sid, *others in found}


def read_arrays(path: Path, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """Reads all arrays of an npz file by name, without unpickling."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path}: expected an npz file with arrays; {error}") from None
    if absent := sorted({*wanted} - arrays.keys()):
        raise ValueError(f"{path}: expected arrays {', '.join(wanted)}; {absent[0]} is missing")
    return arrays
