"""Names of systems in systems.csv, next to the stores of a data set."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

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
    rows = csv_rows((folder / SYSTEMS).read_text(encoding="utf-8"))
    found = ([row[field] for field in System._fields] for row in rows)
    return {int(sid): System(int(sid), *others) for sid, *others in found}
