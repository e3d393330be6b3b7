"""Rows of a table: CSV files, Markdown and statistics."""

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

Row = dict[str, Any]
Rows = list[Row]


class Points:
    """Samples grouped by labels; each combination of labels is a point."""

    def __init__(self) -> None:
        self.samples: dict[tuple[tuple[str, Any], ...], list[float]] = {}

    def add(self, value: float | Tensor, **labels: object) -> None:
        """Adds one sample or a tensor of samples."""
        values = value.flatten().tolist() if isinstance(value, Tensor) else [value]
        self.samples.setdefault(tuple(labels.items()), []).extend(values)

    def rows(self) -> Rows:
        """Returns the labels, mean, standard deviation and number of samples for each point."""
        return [
            {
                **dict(labels),
                "mean": statistics.fmean(values),
                "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
                "samples": len(values),
            }
            for labels, values in self.samples.items()
        ]


def write_csv(path: Path, rows: Rows) -> None:
    """Writes rows to a CSV file; floats have six digits, and list items are separated by spaces.

    Each key that occurs in any row becomes a column.
    """

    def cell(value: object) -> object:
        if isinstance(value, list):
            return " ".join(f"{x:.6g}" for x in value)
        return f"{value:.6g}" if isinstance(value, float) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: cell(value) for key, value in row.items()} for row in rows)


def read_csv(path: Path) -> Rows:
    """Reads a CSV file; empty cells become None, and the column `seconds` contains lists."""

    def value(key: str, text: str) -> Any:
        if key == "seconds":
            return [float(x) for x in text.split()]
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return {"": None, "True": True, "False": False}.get(text, text)

    with path.open(newline="") as file:
        return [{k: value(k, v) for k, v in row.items()} for row in csv.DictReader(file)]


def markdown(head: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """Formats a Markdown table; None becomes an empty cell."""
    head = list(head)
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |"
        for line in cells
    )


def formatted(rows: Rows, columns: Mapping[str, str]) -> str:
    """Formats a table; `columns` maps headings to formats such as "{mae_eV:.3f}"."""
    return markdown(columns, ([form.format(**row) for form in columns.values()] for row in rows))


def pick(rows: Rows, **labels: object) -> Rows:
    """Returns the rows that have all given labels."""
    return [row for row in rows if all(row[key] == value for key, value in labels.items())]


def names(rows: Rows, key: str) -> list[Any]:
    """Returns the distinct values of a label, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Returns the slope of log y against log x, or nan for a single point."""
    if len(points) < 2:
        return math.nan
    x, y = ([math.log(value) for value in axis] for axis in zip(*points, strict=True))
    return statistics.linear_regression(x, y).slope


def upper_half(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the upper half of the points, including the middle one, but at least two points."""
    return points[min(len(points) // 2, max(0, len(points) - 2)) :]


def mean_sd(values: Sequence[float], digits: int) -> str:
    """Formats the mean and the sample standard deviation, or only the mean for a single value."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def choose(names: Sequence[str], known: Iterable[str], what: str = "mechanism") -> list[str]:
    """Returns `names`, or all known names if it is empty; raises ValueError for unknown names."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} is unknown; expected one of {'; '.join(known)}")
    return list(names) or known


def by_group(rows: Rows, kind: str, value: str, head: str) -> str:
    """Formats a table of mean values in eV, with a line per group and a column per model."""
    models, lines = names(rows, "model"), []
    for group in sorted(names(rows, kind)):
        own = pick(rows, **{kind: group})
        means = [statistics.fmean(row[value] for row in pick(own, model=m)) for m in models]
        lines.append([group, len(names(own, "name")), *(f"{mean:.3f}" for mean in means)])
    return markdown([head, "systems", *(f"{model}, MAE, eV" for model in models)], lines)
