"""What every evaluation hands back, and the tables and CSV files that all of them write."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from molflt.files import write_atomically

__all__ = ["Report", "align", "csv_text", "write_csv"]


class Report(NamedTuple):
    """An evaluation."""

    results: dict[str, dict[str, float | None]]
    """split -> metrics, None where there are none"""
    text: str
    """tables, to be printed behind the name of the run"""
    files: list[Path]
    """what was written"""


def align(lines: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Cells in columns: the first `text_columns` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Writes rows as CSV; see `csv_text`.

    Returns:
        The path.
    """
    write_atomically(path, csv_text(rows).encode())
    return path


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as CSV; all their keys are the header, None is an empty cell."""
    buffer = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _warn(text: str) -> None:
    """Says what the user should know, and goes on."""
    print(f"molflt: warning: {text}", file=sys.stderr)
