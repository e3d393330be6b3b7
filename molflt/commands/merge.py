"""``molflt merge``: joins the predictions of several processes.

Each row of a shard contains the index of its structure, the numbers of rows in this shard and in
all shards, and digests of the model and the data.
"""

import csv
import hashlib
import json
import re
from collections.abc import Callable
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from torch import nn

from molflt.data.batches import Shard
from molflt.data.structures import Structures
from molflt.data.structures.oc20 import shards_in
from molflt.evaluation.ensemble import digest_of
from molflt.files import counted, csv_rows, csv_text, expect_ending, shown, write_atomically

_COLUMN = "shard"
_COUNT = re.compile(r"(\d+) of \d+; ")  # number of rows in the shard, of those in all shards
_NOTED = re.compile(r' molflt_index=(\d+)( molflt_file=.*?)? molflt_shard="([^"]*)"(?=\s|$)')

_Row = dict[str, object]


def noted(model: nn.Module, dataset: Structures, rows: int, **options: object) -> dict[str, object]:
    """Returns the column that is added to each of the `rows` rows of a shard, as {name: text}.

    The text also contains what all shards must share: `options`, and digests of model and data.
    """
    members = getattr(model, "members", [model])
    weights = hashlib.sha256("".join(sorted(map(digest_of, members))).encode())
    data = hashlib.sha256(dataset.natoms.astype("<i8").tobytes())  # without skipped structures
    for file in (part for path in dataset.files for part in shards_in(path) or [path]):
        with open(file, "rb") as opened:
            data.update(hashlib.file_digest(opened, "sha256").digest())
    made = {"weights": weights.hexdigest()[:16], "data": data.hexdigest()[:16], **options}
    entries = (f"{name} {value}" for name, value in made.items())
    return {_COLUMN: "; ".join([f"{rows} of {len(dataset)}", *entries])}


def _frames(text: str) -> list[_Row]:
    """Splits an extended XYZ file into structures and removes the column added by `noted`."""
    lines = iter(text.splitlines(keepends=True))
    rows: list[_Row] = []
    for count in lines:
        head, atoms = next(lines, ""), list(islice(lines, int(count)))
        match = _NOTED.search(head)
        if match is None or len(atoms) < int(count):
            raise ValueError("a structure is truncated or has no index")
        index, file, note = match.groups()
        origin = f" molflt_index={index}{file}" if file else ""  # else the position in the file
        frame = "".join([count, head.replace(match[0], origin, 1), *atoms])
        rows.append({"index": index, _COLUMN: note, "frame": frame})
    return rows


_FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[list[_Row]], str]]] = {
    ".csv": (csv_rows, csv_text),
    ".json": (json.loads, lambda rows: json.dumps(rows, indent=1) + "\n"),
    ".extxyz": (_frames, lambda rows: "".join(str(row["frame"]) for row in rows)),
}
ENDINGS = tuple(_FORMATS)


def merge(out: Path) -> None:
    """Joins the files of all N calls of molflt predict --shard I/N, which are not removed.

    The result equals the file that a single process would have written. If a shard is missing or
    damaged, the error names it and the command that recreates it.

    Args:
        out: value of --out in these calls; .csv, .json or .extxyz.
    """
    expect_ending(out, *ENDINGS)
    rows: dict[int, _Row] = {}
    origins: dict[Path, str] = {}
    for shard in _shards(out):
        path = shard.path(out)
        shard_rows, origins[path] = _read_shard(path, shard)
        rows |= shard_rows
    (first_path, first_origin), *others = origins.items()
    for path, origin in others:
        pairs = zip_longest(first_origin.split("; "), origin.split("; "))
        if different := [f"{first} and {other}" for first, other in pairs if first != other]:
            raise ValueError(
                f"{first_path} and {path}: shards of different predictions: "
                f"{shown(', '.join(different), 300)}; predict all shards again with the same "
                "model, structures and options"
            )
    _, text_of = _FORMATS[out.suffix]
    write_atomically(out, text_of([rows[index] for index in sorted(rows)]).encode())
    print(f"{out}: {counted(len(rows), 'structure')}")


def _read_shard(path: Path, shard: Shard) -> tuple[dict[int, _Row], str]:
    """Reads the rows of a shard by index, without the column of `noted`.

    Also returns the text that follows "of" in this column, which is the same in all shards.
    """
    rows_of, _ = _FORMATS[path.suffix]
    try:
        text = path.read_text(encoding="utf-8")
        rows: list[_Row] = rows_of(text)
        by_index = {int(str(row["index"])): row for row in rows}
        (note,) = {str(row.pop(_COLUMN)) for row in rows}  # equal in all rows
        if not text.endswith("\n") or int(_COUNT.findall(note)[0]) != len(rows):
            raise ValueError("lines are missing")
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        reason = shown(str(error), 100)
        raise ValueError(f"{path}: damaged: {reason}; repeat --shard {shard}") from None
    return by_index, note.partition(" of ")[2]


def _shards(out: Path) -> list[Shard]:
    """Returns all shards of `out`; raises ValueError if one is missing or divisions differ."""
    name = re.compile(rf"{re.escape(out.stem)}\.(\d{{1,5}})-of-(\d{{1,5}}){re.escape(out.suffix)}")
    matches = filter(None, (name.fullmatch(path.name) for path in out.parent.glob("*")))
    found = {Shard(int(match[1]), int(match[2])) for match in matches}
    counts = sorted({shard.total for shard in found})
    if len(counts) != 1:
        got = f"divisions into {', '.join(map(str, counts))}" if counts else "no shards"
        raise ValueError(
            f"{out}: expected all shards of one division, such as {Shard(1, 8).path(out).name}, "
            f"which molflt predict --shard 1/8 --out writes; got {got}"
        )
    everything = [Shard(number, counts[0]) for number in range(1, counts[0] + 1)]
    if missing := [shard for shard in everything if shard not in found]:
        raise ValueError(
            f"{out}: {len(missing)} of {counts[0]} shards are missing: "
            f"{shown([shard.number for shard in missing])}; repeat --shard {missing[0]} and so on"
        )
    return everything
