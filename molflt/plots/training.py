"""Pictures of training curves and errors."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.metrics import EWT_THRESHOLD, Metric
from molflt.plots.figure import (
    BLUE,
    GREEN,
    SERIES,
    SKY,
    VERMILION,
    picture,
    plain,
    plain_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_BARS = 20

_KINDS = {  # kind of groups -> axis, title
    "adsorbate": ("adsorbate", "by adsorbate"),
    "slab": ("elements of the slab", "by metal"),
    "element": ("element of the atom", "by element"),
    "natoms": ("atoms in the system", "by size"),
}

_Array = NDArray[np.float64]


class GroupError(NamedTuple):
    """Error of a group of systems, such as those with one adsorbate."""

    group: str
    n: int
    mae: float
    """in the unit of the prediction"""


def training_curve(
    metrics_csv: Path,
    file: Path,
    metrics: Mapping[str, Metric],
    best: str = "",
    step: int | None = None,
) -> None:
    """Draws loss, metrics and learning rate over the step.

    Args:
        metrics_csv: metrics.csv of a run, with the column step and any of train_loss, lr, and the
            metrics with prefix train_ and val_; cells may be empty.
        file: file to write, .png, .svg or .pdf.
        metrics: metrics of the task; each measured one has a panel.
        best: metric whose best validation is marked.
        step: step of that validation; by default the one with the best value.
    """
    columns = read_columns(Path(metrics_csv))
    panels = [("train_loss", Metric("loss", scale="log"), ["train_loss"])]
    panels += [(n, metric, [f"train_{n}", f"val_{n}"]) for n, metric in metrics.items()]
    panels.append(("lr", Metric("learning rate"), ["lr"]))
    shown = [
        (name, metric, lines)
        for name, metric, known in panels
        if (lines := [line for line in known if np.isfinite(columns.get(line, [])).any()])
    ]
    if not shown:
        raise ValueError(f"{metrics_csv}: nothing to draw; expected train_loss, lr or metrics")
    with picture(file, figsize=(7.0, 0.6 + 1.9 * len(shown))) as figure:
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, metric, lines) in zip(rows, shown, strict=True):
            for line in lines:
                _curve(axes, columns, line, alone=len(lines) == 1)
                if line == f"val_{best}":
                    _star(axes, columns, line, metric, step)
            if name != "lr":
                axes.legend(frameon=False, fontsize="small")
            if metric.scale == "log":
                _log_if_wide(axes, np.concatenate([columns[line] for line in lines]))
            else:
                axes.set_ylim(bottom=0.0)
            axes.set_ylabel(metric.axis)
            axes.grid(alpha=0.3)
        rows[-1].set_xlabel("step")
        figure.align_ylabels()


def read_columns(path: Path) -> dict[str, _Array]:
    """Reads the columns of a metrics.csv, (rows,) each, with NaN for empty cells."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        rows = list(reader)
    if "step" not in names:
        raise ValueError(f"{path}: expected a column step; got {', '.join(names) or 'no columns'}")
    return {name: np.array([_number(row[name]) for row in rows], dtype=float) for name in names}


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:  # a row of units
        return float("nan")


def best_place(columns: Mapping[str, _Array], name: str, largest_is_best: bool) -> int | None:
    """Returns the row of the best validation by a column of metrics.csv, or None.

    Validations in which any measured metric is not finite do not count.
    """
    measured = [v for key, v in columns.items() if key.startswith("val_") and np.isfinite(v).any()]
    if name not in columns or not measured:
        return None
    known = np.isfinite([columns[name], columns["step"], *measured]).all(axis=0)
    values = np.where(known, columns[name] if largest_is_best else -columns[name], -np.inf)
    return int(values.argmax()) if known.any() else None


def _star(
    axes: Axes, columns: dict[str, _Array], name: str, metric: Metric, best: int | None
) -> None:
    """Marks the best validation."""
    at = np.flatnonzero((columns["step"] == best) & np.isfinite(columns[name]))
    place = at[-1] if len(at) else best_place(columns, name, metric.largest_is_best)
    if place is not None:
        step, value = columns["step"][place], columns[name][place]
        text = f"best: {value:.{metric.digits}f} {metric.unit}".rstrip() + f" at step {step:.0f}"
        axes.plot(step, value, "*", color=VERMILION, markersize=11, label=text)


def _curve(axes: Axes, columns: dict[str, _Array], name: str, alone: bool) -> None:
    """Draws one column over the step."""
    known = np.isfinite(columns["step"]) & np.isfinite(columns[name])
    step, value = columns["step"][known], columns[name][known]
    label, color = {"val": ("validation", VERMILION), "lr": ("", GREEN)}.get(
        name.partition("_")[0], ("training", BLUE)
    )
    label += " only" if alone and label else ""
    marker = "o" if len(step) < 40 else ""
    axes.plot(step, value, color=color, label=label, marker=marker, markersize=3)


def _log_if_wide(axes: Axes, values: _Array) -> None:
    """Makes the y axis logarithmic if values span a factor of 6 or more."""
    low, high = np.nanmin(values), np.nanmax(values)
    if low <= 0 or high / low < 6:
        return
    axes.set_yscale("log")
    plain_numbers(axes.yaxis, wide=bool(high / low >= 60))


def errors(
    groups: Mapping[str, Sequence[GroupError]],
    absolute: Mapping[str, _Array],
    file: Path,
    unit: str = "eV",
) -> None:
    """Draws the MAE of groups, with one panel per kind, and the distribution of errors per split.

    Args:
        groups: kind (adsorbate, slab, element, natoms) -> groups; those of natoms are in order of
            size, and of the others the 20 with the largest errors are drawn.
        absolute: split -> |error| of each system, (systems,), eV; may be empty.
        file: file to write, .png, .svg or .pdf.
        unit: unit of the MAE.
    """
    if not (groups or absolute) or not all(groups.values()):
        raise ValueError("errors: expected groups, or splits with labels; got none")
    shown = {
        kind: [*own][::-1] if kind == "natoms" else sorted(own, key=lambda g: g.mae)[-_MAX_BARS:]
        for kind, own in groups.items()
        if kind != "natoms" or len(own) > 1 or len(groups) == 1  # a single size is not informative
    }
    bars = max(map(len, shown.values()), default=0)
    widths = [4.2] * len(shown) + [5.0] * bool(absolute)
    size = (sum(widths), max(3.8, 1.3 + 0.27 * bars))
    with picture(file, figsize=size) as figure:
        row = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        for axes, (kind, own) in zip(row, shown.items(), strict=False):
            label, title = _KINDS[kind]
            _bars(axes, own, label, unit)
            if len(own) < len(groups[kind]):
                title += f": the {len(own)} worst of {len(groups[kind])}"
            axes.set_title(title, fontsize="medium")
        if absolute:
            _distribution(row[-1], absolute)


def _bars(axes: Axes, groups: Sequence[GroupError], label: str, unit: str) -> None:
    places = np.arange(len(groups))
    values = [group.mae for group in groups]
    axes.barh(places, values, color=SKY, height=0.75)
    digits = 3 if unit == "eV" else 1
    for place, group in zip(places, groups, strict=True):
        axes.annotate(
            f"{group.mae:.{digits}f}  (n = {group.n:,})",
            (group.mae, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    axes.set_yticks(places, [_subscripts(group.group) for group in groups])
    axes.set_xlim(0, 1.55 * max(values) or 1.0)  # space for the numbers
    axes.set_ylim(min(-0.6, len(groups) - 4.4), len(groups) - 0.4)
    axes.set_xlabel(f"MAE / {unit} (lower is better)")
    axes.set_ylabel(label)


def _subscripts(formula: str) -> str:
    """Returns a formula with subscripts; other text is unchanged."""
    if not re.fullmatch(r"(?:[A-Z][a-z]?\d*)+", formula):
        return plain(formula)
    return re.sub(r"(\d+)", r"$_{\1}$", formula)


def _distribution(axes: Axes, absolute: Mapping[str, _Array]) -> None:
    """Draws the share of systems below each error; the dashed line marks the EwT."""
    floor = 1e-3
    for color, (split, values) in zip(SERIES * len(absolute), absolute.items(), strict=False):
        ordered = np.sort(np.maximum(values, floor))
        share = 100.0 * np.arange(len(ordered) + 1) / len(ordered)
        ordered = np.append(ordered[0], ordered)  # curves begin at 0 %
        axes.step(ordered, share, where="post", color=color, label=plain(split))
    axes.axvline(EWT_THRESHOLD, color="black", linestyle="--", linewidth=1)
    axes.text(EWT_THRESHOLD, 99, f"EwT: {EWT_THRESHOLD} eV ", rotation=90, ha="right", va="top")
    axes.set_xscale("log")
    largest = max(float(np.quantile(values, 0.999)) for values in absolute.values())
    axes.set(xlim=(floor, max(2 * EWT_THRESHOLD, 1.2 * largest)), ylim=(0, 101))
    axes.set_xlabel("|error| / eV")
    axes.set_ylabel("systems with a smaller error / %")
    axes.grid(alpha=0.3)
    axes.legend(
        frameon=False, fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1)
    )
