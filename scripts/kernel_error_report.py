"""Tables of scripts/kernel_error.py."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PAPER = "gaussian 16 σ 0.15"  # rule of the papers' form
BOUND = 0.2  # what the near field is to make of the additive form's error
ALONE = ("no mask", "exact mask")  # forms without rules


class Row(NamedTuple):
    """Errors of one form at one budget."""

    slabs: str
    qk: str
    feature_map: str  # "exact": exp(q . k) itself, without a budget
    form: str
    rule: str
    r: int
    m: int
    budget: float
    cost: float
    error: float
    sd: float  # of the mean over structures, between heads and seeds
    spoiled: float  # share of heads and structures with an error above 1
    residual: float  # root mean square error of what was fitted to f or exp(f)


def summary(found: list[list[list[float]]]) -> tuple[float, float, float]:
    """Mean, spread and spoiled share of errors by seed, structure and head."""
    means = [
        statistics.fmean(column) for structures in found for column in zip(*structures, strict=True)
    ]
    flat = list(itertools.chain.from_iterable(itertools.chain.from_iterable(found)))
    return statistics.fmean(flat), statistics.stdev(means), sum(e > 1 for e in flat) / len(flat)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """A line per row."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows([f"{x:.4g}" if isinstance(x, float) else x for x in row] for row in rows)


def best(rows: Sequence[Row], **labels: object) -> Row | None:
    """The row of least error among those with these labels."""
    own = [r for r in rows if all(getattr(r, key) == value for key, value in labels.items())]
    return min(own, key=lambda row: row.error, default=None)


# Rows of the tables: a name, and which of the measurements may stand for it.
LINES: dict[str, dict[str, object]] = {
    "no mask": {"form": "no mask"},
    "additive, papers' nodes": {"form": "additive", "rule": PAPER},
    "additive, best": {"form": "additive"},
    "multiplicative, best": {"form": "multiplicative"},
    "near field, best": {"form": "near field"},
    "near exact, best": {"form": "near exact"},
    "exact mask": {"form": "exact mask"},
}


def mask_table(rows: Sequence[Row]) -> str:
    """Errors with exact q . k: Markdown, a line per form and rule."""
    columns = list(dict.fromkeys((row.slabs, row.qk) for row in rows))
    titles = [f"{name}, {qk} q, k" for name, qk in columns]
    lines = ["| form | nodes | " + " | ".join(titles) + " |", "|" + "---|" * (2 + len(columns))]
    for form, rule in dict.fromkeys((row.form, row.rule) for row in rows):
        if form == "exact mask":
            continue
        own = [
            best(rows, form=form, rule=rule, slabs=name, qk=qk, feature_map="exact")
            for name, qk in columns
        ]
        cells = [f"{row.error:.3f} ± {row.sd:.3f} (r = {row.r})" for row in own if row]
        lines.append(f"| {form} | {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost_table(rows: Sequence[Row], name: str, qk: str) -> str:
    """Errors at equal cost: Markdown, a line per form, a column per budget."""
    rows = [row for row in rows if (row.slabs, row.qk) == (name, qk) and row.budget]
    budgets = sorted({row.budget for row in rows})
    head = [f"{budget:,.0f} multiplications" for budget in budgets]
    lines = [f"| {name}, {qk} q, k | " + " | ".join(head) + " |", "|" + "---|" * (1 + len(head))]
    for line, labels in LINES.items():
        cells = []
        for budget in budgets:
            row = best(rows, budget=budget, **labels)
            cells.append("-" if row is None else _cell(row))
        lines.append(f"| {line} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    rule = "" if row.form in ALONE else f"{row.rule}, "
    return f"{row.error:.3f} ± {row.sd:.3f} ({rule}{row.feature_map} m = {row.m})"


def verdicts(rows: Sequence[Row]) -> str:
    """Errors of the near fields over those of the additive form, unit queries and keys."""
    head = f"at most {BOUND:g} wanted | budget | near field / papers' nodes | near field / best"
    lines = [f"| {head} | near exact / papers' nodes | near exact / best |", "|" + "---|" * 6]
    for name, budget in dict.fromkeys((row.slabs, row.budget) for row in rows):
        own = [row for row in rows if (row.slabs, row.qk, row.budget) == (name, "unit", budget)]
        cells = [f"{budget:,.0f}" if budget else "exact q . k"]
        positive = {"feature_map": "positive"} if budget else {}
        for form in ("near field", "near exact"):
            near = best(own, form=form)
            for other in (
                best(own, form="additive", rule=PAPER, **positive),
                best(own, form="additive"),
            ):
                ratio = near.error / other.error if near and other else float("nan")
                cells.append(f"{ratio:.3f} {'PASS' if ratio <= BOUND else 'FAIL'}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> str:
    """All tables."""
    pairs = dict.fromkeys((row.slabs, row.qk) for row in rows)
    costs = [cost_table(rows, name, qk) for name, qk in pairs]
    return "\n\n".join((mask_table(rows), *costs, verdicts(rows)))
