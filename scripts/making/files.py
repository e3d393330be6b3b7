"""Files of a made data set next to its stores: names, frames, notes of systems."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from molflt.data.structures.store import StructureStore
from molflt.files import shown, write_atomically

if TYPE_CHECKING:
    from ase import Atoms

_COLUMNS = ("sid", "split", "adsorbate", "catalyst", "facet", "site")
_AGAIN = "put the file back, or choose another folder"

_Row = dict[str, str]


class _Note(TypedDict):
    """Metadata of a system."""

    names: _Row
    rejected: dict[str, int]


def _note_of(store: StructureStore) -> _Note:
    """Raises ValueError if the part of a system does not say what `make` writes."""
    try:
        note: _Note = json.loads(store.source)
        names, rejected = note["names"], note["rejected"]
        sound = {"sid", "split", *names} == {*_COLUMNS} and _are_counts(rejected)
        sound = sound and all(isinstance(one, str) for one in names.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(f"{store.path}: expected a part of made data; got {shown(store.source)}")
    return note


def _are_counts(value: object) -> bool:
    """Returns True for numbers by reason."""
    return isinstance(value, dict) and all(type(one) is int and one >= 0 for one in value.values())


def _read_names(path: Path) -> list[_Row]:
    """Rows of systems.csv; ValueError if it is not what was written."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows: list[_Row] = list(csv.DictReader(file, strict=True))
        if any({*row} != {*_COLUMNS} or None in row.values() for row in rows):
            raise ValueError("other cells than columns")
        if len({int(row["sid"]) for row in rows}) < len(rows):
            raise ValueError("a sid that comes twice")
    except (ValueError, csv.Error) as error:
        why = shown(str(error), 100)
        raise ValueError(
            f"{path}: expected the columns {', '.join(_COLUMNS)}; got {why}; {_AGAIN}"
        ) from None
    return rows


def _write_names(path: Path, rows: list[_Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: int(row["sid"])))
    write_atomically(path, text.getvalue().encode())


def _read_frames(path: Path) -> dict[int, list[Atoms]]:
    """Frames of each system by its sid; ValueError if they are not what was written."""
    from ase.io import iread

    frames: dict[int, list[Atoms]] = {}
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected frames of each system; {_AGAIN}")
    try:
        for frame in iread(path, format="extxyz"):
            frames.setdefault(int(frame.info["sid"]), []).append(frame)
    except Exception as error:  # a damaged file makes ASE fail in any way
        why = shown(f"{type(error).__name__}: {error}", 100)
        raise ValueError(f"{path}: expected frames with a sid; got {why}; {_AGAIN}") from None
    return frames
