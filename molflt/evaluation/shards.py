"""Predictions in shards: each process predicts some batches, and the files are merged afterwards.

A shard has whole batches of all that one process would cut, so that its numbers are the same bits.
Each row of its file says which structure it is of, how many rows the shard and the whole have, and
what made it: what is lost or cut off, or of another model or other structures, is named.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from molflt.data.shards import MOST_SHARDS, Shard
from molflt.data.structures import Structures
from molflt.evaluation.ensemble import _digest
from molflt.evaluation.report import csv_text
from molflt.files import shown, write_atomically

__all__ = ["ENDINGS", "made_of", "merge_shards", "noted"]

_LARGEST = 2**32  # bytes of a file of one shard
_KEY = "shard"
_INDEX = re.compile(r"[0-9]{1,18}")
_SHOWN = 16  # of a digest

_Row = dict[str, object]


class _Note(NamedTuple):
    """What each row of the file of a shard says of it."""

    rows: int
    total: int
    """rows of all shards"""
    made: Mapping[str, str]
    """what made it"""

    @classmethod
    def read(cls, text: str) -> _Note:
        counts, *made = text.split("; ")
        found = re.fullmatch(r"(\d{1,18}) of (\d{1,18})", counts)
        if found is None:
            raise ValueError(f"{text!r} is no number of rows")
        if not made:
            raise ValueError("an earlier version wrote it, which does not say of what model it is")
        parts = (part.partition(" ") for part in made)
        return cls(int(found[1]), int(found[2]), {name: value for name, _, value in parts})


def noted(rows: int, total: int, made: Mapping[str, object]) -> dict[str, object]:
    """What each row of the file of a shard says beside its own.

    Args:
        rows: of this shard.
        total: of all shards.
        made: what made it, as `made_of` gives it.
    """
    return {_KEY: "; ".join([f"{rows} of {total}", *(f"{k} {made[k]}" for k in made)])}


def made_of(model: nn.Module, dataset: Structures, **options: object) -> dict[str, object]:
    """What decides about the predictions of a data set: shards of others are not merged.

    Args:
        model: of energies, or an ensemble.
        dataset: all of it; its files are read once.
        options: of the prediction.

    Returns:
        Digests of weights and data, and the options.
    """
    members = getattr(model, "members", [model])
    weights = hashlib.sha256("".join(sorted(map(_digest, members))).encode())
    data = hashlib.sha256(dataset.natoms.astype("<i8").tobytes())  # without what was left out
    path = dataset.path
    for file in sorted(path.glob("*.lmdb")) if path.is_dir() else [path]:
        with open(file, "rb") as opened:
            data.update(hashlib.file_digest(opened, "sha256").digest())
    digests = {"weights": weights, "data": data}
    return {**{name: one.hexdigest()[:_SHOWN] for name, one in digests.items()}, **options}


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
_NOTED = re.compile(r' molflt_index=(\d+) molflt_shard="([^"]*)"(?=\s|$)')


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
    """
    if out.suffix not in _FORMATS:
        raise ValueError(
            f"{out}: expected a name that ends in {', '.join(ENDINGS)}; got "
            f"{out.suffix or 'no ending'!r}"
        )
    read, write = _FORMATS[out.suffix]
    shards = _shards(out)
    parts: dict[Shard, list[_Row]] = {}
    notes: dict[Shard, _Note] = {}
    faults = []
    for shard in shards:
        try:
            parts[shard], notes[shard] = _whole(read(_text(shard.path(out))))
        except (ValueError, KeyError, TypeError, csv.Error, RecursionError) as error:
            faults.append(f"{shard.path(out)}: damaged: {shown(str(error), 100)}; {_again(shard)}")
    if faults:
        raise ValueError("; ".join(faults))
    _check_alike(out, notes)
    rows = [row for part in parts.values() for row in part]
    columns = [set(row) for row in rows]
    if unlike := set().union(*columns) - columns[0].intersection(*columns):
        raise ValueError(
            f"{out}: its shards do not all have {shown(sorted(unlike))}; expected the same columns "
            "in each; predict all shards again with the same options"
        )
    for row in rows:
        del row[_KEY]
    totals = {note.total for note in notes.values()}
    rows.sort(key=lambda row: int(str(row["index"])))
    places = {int(str(row["index"])) for row in rows}  # not of structures that were left out
    if totals != {len(rows)} or len(places) != len(rows):
        expected = " or ".join(map(str, sorted(totals)))
        raise ValueError(
            f"{out}: its shards are not of one division; expected each structure once; got "
            f"{len(rows):,} of {expected}; predict all shards again with the same options"
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


def _check_alike(out: Path, notes: Mapping[Shard, _Note]) -> None:
    """Raises ValueError for two shards that were not made of the same, naming both."""
    first, *others = notes
    own = notes[first].made
    for shard in others:
        theirs = notes[shard].made
        unlike = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        if unlike:
            words = ", ".join(f"{n} {own.get(n)} and {theirs.get(n)}" for n in unlike)
            raise ValueError(
                f"{first.path(out)} and {shard.path(out)}: not of one prediction: "
                f"{shown(words, 300)}; predict all shards again with the same model, structures "
                "and options"
            )


def _whole(rows: list[_Row]) -> tuple[list[_Row], _Note]:
    """Rows of a shard that has all that it says it has."""
    notes = {str(row[_KEY]) for row in rows}
    if len(notes) != 1:
        raise ValueError(f"expected one note in all rows; got {len(notes)}")
    note = _Note.read(notes.pop())
    if note.rows != len(rows):
        raise ValueError(f"expected {note.rows} rows; got {len(rows)}")
    for row in rows:
        if not _INDEX.fullmatch(str(row["index"])):
            raise ValueError("an index is no whole number")
    return rows, note


def _again(shard: Shard) -> str:
    return f"repeat it with --shard {shard}"
