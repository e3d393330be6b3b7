"""Predictions in shards: each process predicts some batches, and the files are merged afterwards.

A shard has whole batches of all that one process would cut, so that its numbers are the same bits.
Each row of its file says which structure it is of, and how many rows the shard and the whole have:
what is lost or cut off is named.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from molflt.data.shards import MOST_SHARDS, Shard
from molflt.evaluation.report import csv_text
from molflt.files import shown, write_atomically

__all__ = ["ENDINGS", "merge_shards", "noted"]

_LARGEST = 2**32  # bytes of a file of one shard
_KEY = "shard"
_INDEX = re.compile(r"[0-9]{1,18}")

_Row = dict[str, object]


def noted(rows: int, total: int) -> dict[str, object]:
    """What each row of the file of a shard says beside its own: rows here, rows of all shards."""
    return {_KEY: f"{rows} of {total}"}


def _csv_rows(text: str) -> list[_Row]:
    rows: list[_Row] = list(csv.DictReader(io.StringIO(text), strict=True))
    if any(None in row or None in row.values() for row in rows):
        raise ValueError("a line has more or fewer cells than the first")
    return rows


def _json_rows(text: str) -> list[_Row]:
    rows = json.loads(text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it is no list of rows")
    return rows


_COUNT = re.compile(r"\d{1,9}\n")
_NOTED = re.compile(r' index=(\d+) shard="(\d+ of \d+)"(?=\s|$)')


def _frames(text: str) -> list[_Row]:
    """Structures of an extended XYZ file as they are written, without what says which they are."""
    lines = text.splitlines(keepends=True)
    rows: list[_Row] = []
    start = 0
    while start < len(lines):
        if not _COUNT.fullmatch(lines[start]):
            raise ValueError(f"line {start + 1} is no number of atoms")
        end = start + int(lines[start]) + 2
        found = _NOTED.search(lines[start + 1]) if end <= len(lines) else None
        if found is None:
            raise ValueError("a structure is cut off, or does not say which it is")
        head = _NOTED.sub("", lines[start + 1], count=1)
        frame = "".join([lines[start], head, *lines[start + 2 : end]])
        rows.append({"index": found[1], _KEY: found[2], "frame": frame})
        start = end
    return rows


def _json_text(rows: Sequence[Mapping[str, object]]) -> str:
    return json.dumps(rows, indent=1) + "\n"


def _frames_text(rows: Iterable[Mapping[str, object]]) -> str:
    return "".join(str(row["frame"]) for row in rows)


_FORMATS: dict[str, tuple[Callable[[str], list[_Row]], Callable[[list[_Row]], str]]] = {
    ".csv": (_csv_rows, csv_text),
    ".json": (_json_rows, _json_text),
    ".extxyz": (_frames, _frames_text),
}
ENDINGS = tuple(_FORMATS)


def merge_shards(out: Path) -> int:
    """Joins the files of all shards to the one that a single process would have written.

    Args:
        out: what `molflt predict` was given as --out, with each --shard.

    Returns:
        How many structures it holds.

    Raises:
        FileNotFoundError: if there are no shards of that name.
        ValueError: naming the shards that are missing, damaged, or of another division or data
            set, and how to repeat them; or if the ending is none of predictions in shards.
    """
    if out.suffix not in _FORMATS:
        raise ValueError(
            f"{out}: expected a name that ends in {', '.join(ENDINGS)}; got "
            f"{out.suffix or 'no ending'!r}"
        )
    read, write = _FORMATS[out.suffix]
    shards = _shards(out)
    parts: dict[Shard, list[_Row]] = {}
    faults = []
    for shard in shards:
        try:
            parts[shard] = _whole(read(_text(shard.path(out))))
        except (ValueError, KeyError, TypeError, csv.Error, RecursionError) as error:
            faults.append(f"{shard.path(out)}: damaged: {shown(str(error), 100)}; {_again(shard)}")
    if faults:
        raise ValueError("; ".join(faults))
    rows = [row for part in parts.values() for row in part]
    columns = [set(row) for row in rows]
    if unlike := set().union(*columns) - columns[0].intersection(*columns):
        raise ValueError(
            f"{out}: its shards do not all have {shown(sorted(unlike))}; expected the same columns "
            "in each; predict all shards again with the same options"
        )
    totals = {str(row.pop(_KEY)).rpartition(" ")[2] for row in rows}
    rows.sort(key=lambda row: int(str(row["index"])))
    places = {int(str(row["index"])) for row in rows}  # not of structures that were left out
    if totals != {str(len(rows))} or len(places) != len(rows):
        raise ValueError(
            f"{out}: its shards are not of one data set and batch size; expected each structure "
            f"once; got {len(rows):,} of {' or '.join(sorted(totals))}; predict all shards again "
            "with the same options"
        )
    write_atomically(out, write(rows).encode())
    return len(rows)


def _shards(out: Path) -> list[Shard]:
    """All shards of a file, none of which is missing."""
    name = re.compile(rf"{re.escape(out.stem)}\.(\d{{1,9}})-of-(\d{{1,9}}){re.escape(out.suffix)}")
    matches = [name.fullmatch(path.name) for path in out.parent.glob(f"*{out.suffix}")]
    found = {Shard(int(match[1]), int(match[2])) for match in matches if match is not None}
    counts = sorted({shard.total for shard in found})
    if not found:
        raise FileNotFoundError(
            f"{out}: no shards; expected {Shard(1, 8).path(out).name} and others, as molflt "
            "predict --shard 1/8 --out writes them"
        )
    if len(counts) > 1 or counts[0] > MOST_SHARDS:
        raise ValueError(
            f"{out}: shards of divisions by {', '.join(map(str, counts))}; expected one division; "
            "delete the files of the others"
        )
    everything = [Shard(number, counts[0]) for number in range(1, counts[0] + 1)]
    if missing := [shard for shard in everything if shard not in found]:
        raise ValueError(
            f"{out}: {len(missing)} of {counts[0]} shards missing: "
            f"{shown([shard.number for shard in missing])}; {_again(missing[0])}"
            + (", and so on" if len(missing) > 1 else "")
        )
    return everything


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > _LARGEST:
        raise ValueError(f"{size:,} bytes")
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise ValueError("cut off in its last line")
    return text


def _whole(rows: list[_Row]) -> list[_Row]:
    """Rows of a shard that has all that it says it has."""
    notes = {str(row[_KEY]) for row in rows}
    said = re.fullmatch(r"(\d+) of \d+", notes.pop()) if len(notes) == 1 else None
    if said is None or int(said[1]) != len(rows):
        raise ValueError(f"expected {said[1] if said else 'a number of'} rows; got {len(rows)}")
    for row in rows:
        if not _INDEX.fullmatch(str(row["index"])):
            raise ValueError("an index is no whole number")
    return rows


def _again(shard: Shard) -> str:
    return f"repeat it with --shard {shard}"
