"""Pictures of training, predictions and errors."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.metrics import EWT_THRESHOLD, Metric
from molflt.plots.figure import BLUE, GREEN, GREY, SERIES, SKY, VERMILION, _plain_numbers, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection

_MAX_POINTS = 2000  # more than these are drawn as a density
_MAX_BARS = 20

_Array = NDArray[np.float64]


class GroupError(NamedTuple):
    """Error of the systems that have something in common, such as the adsorbate."""

    group: str
    n: int
    mae: float
    """eV"""


def training_curve(
    metrics_csv: Path, png: Path, metrics: Mapping[str, Metric], best: str = ""
) -> None:
    """Draws loss, metrics and learning rate against the step.

    Args:
        metrics_csv: a run's metrics.csv: step and any of train_loss, lr, and train_ and val_ of the
            metrics; empty cells are where nothing was measured.
        png: file to write.
        metrics: those of the task; each that was measured has a panel.
        best: the one whose best validation is marked.

    Raises:
        ValueError: if the file has no column step, or nothing to draw.
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
    with picture(png, figsize=(7.0, 0.6 + 1.9 * len(shown))) as figure:
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, metric, lines) in zip(rows, shown, strict=True):
            for line in lines:
                _curve(axes, columns, line, metric if line == f"val_{best}" else None)
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
    """Columns of a run's metrics.csv by name, (rows,) each, nan where they are empty.

    Raises:
        ValueError: if there is no column step.
    """
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


def _curve(axes: Axes, columns: dict[str, _Array], name: str, marked: Metric | None) -> None:
    """One column against the step, and a star at its best value if that is wanted."""
    known = np.isfinite(columns["step"]) & np.isfinite(columns[name])
    step, value = columns["step"][known], columns[name][known]
    label, color = {"val": ("validation", VERMILION), "lr": ("", GREEN)}.get(
        name.partition("_")[0], ("training", BLUE)
    )
    marker = "o" if len(step) < 40 else ""
    axes.plot(step, value, color=color, label=label, marker=marker, markersize=3)
    if marked is not None:
        best = int(value.argmax() if marked.largest_is_best else value.argmin())
        text = f"best: {value[best]:.{marked.digits}f} {marked.unit}".rstrip()
        text += f" at step {step[best]:.0f}"
        axes.plot(step[best], value[best], "*", color=color, markersize=11, label=text)


def _log_if_wide(axes: Axes, values: _Array) -> None:
    """A logarithmic axis with plain numbers, unless it would have too few of them."""
    low, high = np.nanmin(values), np.nanmax(values)
    if low <= 0 or high / low < 6:
        return
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis, wide=bool(high / low >= 60))


def parity(panels: Mapping[str, tuple[_Array, _Array]], png: Path) -> None:
    """Draws predicted against true energies, a panel per split, all with the same axes.

    Args:
        panels: split -> (labels, predictions), each (systems,), eV.
        png: file to write.

    Raises:
        ValueError: if there is no panel, or labels and predictions differ in number.
    """
    if not panels:
        raise ValueError("parity: expected at least one split with labels; got none")
    for split, (target, energy) in panels.items():
        if target.shape != energy.shape or target.size == 0:
            raise ValueError(
                f"parity: split {split!r} needs one prediction per label; got {energy.shape} and "
                f"{target.shape}"
            )
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    low, high = _limits(list(panels.values()))
    dense = any(len(target) > _MAX_POINTS for target, _ in panels.values())
    size = (0.6 + 3.6 * columns + 0.8 * dense, 0.4 + 3.7 * rows)
    with picture(png, figsize=size) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        densities = []
        for axes, (split, (target, energy)) in zip(grid.flat, panels.items(), strict=False):
            densities += _parity_panel(axes, target, energy, low, high)
            mae = np.abs(energy - target).mean()
            axes.set_title(f"{split}: MAE {mae:.3f} eV (n = {len(target):,})", fontsize="medium")
        if densities:
            most = max(float(np.max(np.asarray(density.get_array()))) for density in densities)
            for density in densities:
                density.set_clim(1, max(most, 2))
            used = list(grid.flat[: len(panels)])
            figure.colorbar(densities[0], ax=used, label="systems per cell", shrink=0.5, aspect=30)
        figure.supxlabel("labeled energy / eV")
        figure.supylabel("predicted energy / eV")


def _limits(pairs: Sequence[tuple[_Array, _Array]]) -> tuple[float, float]:
    """Range of the labels and of all but the most extreme predictions, eV."""
    targets = np.concatenate([target for target, _ in pairs])
    energies = np.concatenate([energy for _, energy in pairs])
    low = min(targets.min(), np.quantile(energies, 0.005))
    high = max(targets.max(), np.quantile(energies, 0.995))
    pad = 0.04 * (high - low) or 0.5
    return float(low - pad), float(high + pad)


def _parity_panel(
    axes: Axes, target: _Array, energy: _Array, low: float, high: float
) -> list[PolyCollection]:
    """Draws points or, of many systems, their density, which it returns."""
    densities: list[PolyCollection] = []
    axes.plot([low, high], [low, high], color=GREY, linewidth=1, zorder=1)
    if len(target) <= _MAX_POINTS:
        axes.scatter(target, energy, s=9, alpha=0.5, color=BLUE, linewidths=0, zorder=2)
    else:
        box = (low, high, low, high)
        density = axes.hexbin(
            target, energy, gridsize=60, extent=box, bins="log", mincnt=1, cmap="cividis"
        )
        densities.append(density)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.grid(alpha=0.3)
    outside = int(((energy < low) | (energy > high)).sum())
    if outside:
        axes.text(
            0.03, 0.97, f"{outside} outside", transform=axes.transAxes, va="top", fontsize="small"
        )
    return densities


def errors(
    by_adsorbate: Sequence[GroupError],
    by_size: Sequence[GroupError],
    absolute: Mapping[str, _Array],
    png: Path,
) -> None:
    """Draws MAE by adsorbate and by size, and the distribution of errors per split.

    Args:
        by_adsorbate: error per adsorbate; of more than 20, those with the largest are drawn.
        by_size: error per range of numbers of atoms, in their order.
        absolute: split -> |error| of each system, (systems,), eV.
        png: file to write.

    Raises:
        ValueError: if there is nothing to draw.
    """
    if not by_adsorbate or not by_size or not absolute:
        raise ValueError("errors: expected adsorbates, sizes and splits with labels; got none")
    worst = sorted(by_adsorbate, key=lambda group: group.mae)[-_MAX_BARS:]
    with picture(png, figsize=(13.5, max(3.8, 1.1 + 0.27 * len(worst)))) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.0, 0.9, 1.2))
        _bars(left, worst, "adsorbate")
        title = "by adsorbate, all splits"
        if len(worst) < len(by_adsorbate):
            title += f": the {len(worst)} worst of {len(by_adsorbate)}"
        left.set_title(title, fontsize="medium")
        _bars(middle, list(by_size)[::-1], "atoms in the system")
        middle.set_title("by size, all splits", fontsize="medium")
        _distribution(right, absolute)


def _bars(axes: Axes, groups: Sequence[GroupError], label: str) -> None:
    places = np.arange(len(groups))
    values = [group.mae for group in groups]
    axes.barh(places, values, color=SKY, height=0.75)
    for place, group in zip(places, groups, strict=True):
        axes.annotate(
            f"{group.mae:.3f}  (n = {group.n:,})",
            (group.mae, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    axes.set_yticks(places, [_subscripts(group.group) for group in groups])
    axes.set_xlim(0, 1.55 * max(values) or 1.0)  # room for the numbers
    axes.set_ylim(min(-0.6, len(groups) - 4.4), len(groups) - 0.4)
    axes.set_xlabel("MAE / eV")
    axes.set_ylabel(label)


def _subscripts(formula: str) -> str:
    """CH3 with a lowered 3; ranges of sizes and words stay as they are."""
    if not re.fullmatch(r"(?:[A-Z][a-z]?\d*)+", formula):
        return formula
    return re.sub(r"(\d+)", r"$_{\1}$", formula)


def _distribution(axes: Axes, absolute: Mapping[str, _Array]) -> None:
    """Share of systems below each error; read the EwT where a curve crosses the dashed line."""
    floor = 1e-3
    for color, (split, values) in zip(SERIES * len(absolute), absolute.items(), strict=False):
        ordered = np.sort(np.maximum(values, floor))
        share = 100.0 * np.arange(len(ordered) + 1) / len(ordered)
        ordered = np.append(ordered[0], ordered)  # each curve begins at 0 %
        axes.step(ordered, share, where="post", color=color, label=split)
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
