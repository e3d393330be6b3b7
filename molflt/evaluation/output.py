"""The result of an evaluation, and the tables and CSV files that evaluations write."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from molflt.files import write_atomically

__all__ = ["Evaluation", "Results", "align", "csv_text", "fixed", "results_table", "warn"]
__all__ += ["write_csv"]

Results = dict[str, dict[str, float | None]]
"""split -> metric -> value; None where it is undefined or unknown"""


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    results: Results
    text: str
    """tables, to be printed after the name of the run"""
    files: list[Path]
    """the files that were written"""


def fixed(value: float | None, digits: int) -> str:
    """Formats a number with a fixed number of digits, or a count; None becomes a hyphen."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def results_table(
    title: str,
    columns: Mapping[str, tuple[str, int]],
    results: Mapping[str, Mapping[str, float | None]],
) -> str:
    """Formats metrics as text, one line per split; missing ones become hyphens.

    Args:
        title: heading of the first column, which names the splits.
        columns: metric -> heading and number of digits, which counts ignore.
        results: split -> metrics.
    """
    lines = [[title, *(heading for heading, _ in columns.values())]]
    for split, row in results.items():
        cells = (fixed(row.get(key), digits) for key, (_, digits) in columns.items())
        lines.append([split, *cells])
    return align(lines)


def align(lines: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Aligns cells in columns: the first `text_columns` to the left, the others to the right."""
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
    """Writes rows as CSV, see `csv_text`, and returns the path."""
    write_atomically(path, csv_text(rows).encode())
    return path


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Formats rows as CSV: the header has the keys of all rows, None becomes an empty cell."""
    buffer = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def warn(text: str) -> None:
    """Prints a warning to stderr."""
    print(f"molflt: warning: {text}", file=sys.stderr)
