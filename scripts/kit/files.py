"""Files that results are of, and files of results that come one by one."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from kit.rows import Row, Rows
from molflt.data.structures.systems import SYSTEMS
from molflt.files import append, write_atomically


def digest(path: Path) -> str:
    """sha256 of a file, or of the LMDBs in a folder."""
    if path.is_dir():
        each = "".join(map(digest, sorted(path.glob("*.lmdb"))))
        return hashlib.sha256(each.encode()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """sha256 by path of compact stores in a folder, and of what their systems are called."""
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob(SYSTEMS)])
    return {path.as_posix(): digest(path) for path in paths}


def begin_rows(path: Path) -> Rows:
    """Rows of earlier starts, one in each line; a line that was cut off is taken out of the file.

    Args:
        path: a file for `add_row`, which is there afterwards.
    """
    text = path.read_text() if path.exists() else ""
    rows: Rows = []
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    whole = "".join(f"{json.dumps(row)}\n" for row in rows)
    if whole != text or not path.exists():
        write_atomically(path, whole.encode())
    return rows


def add_row(path: Path, row: Row) -> None:
    """Adds a row to a file that `begin_rows` has read."""
    append(path, f"{json.dumps(row)}\n")
