"""Rows of numbers: CSV, Markdown, statistics and what is promised of them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

Row = dict[str, Any]
Rows = list[Row]


class Verdict(NamedTuple):
    """Result of a promise."""

    text: str
    measured: str
    bound: str
    kept: bool


class Promise(NamedTuple):
    """A statement about the rows of a benchmark."""

    text: str
    value: Callable[[Rows], float | None]
    """None where the rows do not have what it speaks of"""
    most: float = math.inf
    least: float = -math.inf

    def verdict(self, rows: Rows) -> Verdict:
        """True if it holds or was not measured."""
        value = self.value(rows)
        bound = f"≤ {self.most:g}" if self.most < math.inf else f"≥ {self.least:g}"
        measured = "not measured" if value is None else f"{value:.3g}"
        kept = value is None or self.least <= value <= self.most
        return Verdict(self.text, measured, bound, kept)


class Points:
    """Samples of every point, kept under the point's labels."""

    def __init__(self) -> None:
        self.samples: dict[tuple[tuple[str, Any], ...], list[float]] = {}

    def add(self, value: float | Tensor, **labels: object) -> None:
        """Adds one sample, or a tensor of them."""
        values = value.flatten().tolist() if isinstance(value, Tensor) else [value]
        self.samples.setdefault(tuple(labels.items()), []).extend(values)

    def rows(self) -> Rows:
        """One row per point: labels, mean and standard deviation of its samples, their number."""
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
    """Numbers with six digits, lists of them separated by blanks."""

    def cell(value: object) -> object:
        if isinstance(value, list):
            return " ".join(f"{x:.6g}" for x in value)
        return f"{value:.6g}" if isinstance(value, float) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: cell(value) for key, value in row.items()} for row in rows)


def read_csv(path: Path) -> Rows:
    """Rows with whole numbers, numbers and words; empty cells are None, `seconds` are lists."""

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
    """A table; None is an empty cell."""
    head = list(head)
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |"
        for line in cells
    )


def formatted(rows: Rows, columns: Mapping[str, str]) -> str:
    """A table with a line per row: formats of its values by heading, such as "{mae_eV:.3f}"."""
    return markdown(columns, ([form.format(**row) for form in columns.values()] for row in rows))


def pick(rows: Rows, **labels: object) -> Rows:
    """Rows with all these labels."""
    return [row for row in rows if all(row[key] == value for key, value in labels.items())]


def names(rows: Rows, key: str) -> list[Any]:
    """Values of a label, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Slope in the doubly logarithmic plane: cost ~ length^exponent; nan for a single point."""
    if len(points) < 2:
        return math.nan
    x, y = ([math.log(value) for value in axis] for axis in zip(*points, strict=True))
    return statistics.linear_regression(x, y).slope


def upper_half(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of the longer half of the lengths, the middle one included, but at least two."""
    return points[min(len(points) // 2, max(0, len(points) - 2)) :]


def mean_sd(values: Sequence[float], digits: int) -> str:
    """Mean and sample standard deviation, which a single value does not have."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def choose(names: Sequence[str], known: Iterable[str], what: str = "mechanism") -> list[str]:
    """The names, or all that are known if there are none; what they are names of."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} is unknown; expected some of {'; '.join(known)}")
    return list(names) or known
