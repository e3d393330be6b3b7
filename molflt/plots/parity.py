"""Figures of predictions against labels, and of the calibration of uncertainties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import BLUE, GREY, SERIES, VERMILION, plain, plain_numbers
from molflt.plots.figure import panels as panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SHIFTS = [(9.0, 0.0), (-9.0, 0.0), (0.0, 9.0)]  # offsets of labels from their points

_BIN = 25  # minimum number of systems in a bin of uncertainties
_MOST_BINS = 8

_Array = NDArray[np.float64]


def parity(
    panels: Mapping[str, tuple[_Array, _Array]],
    file: Path,
    names: Mapping[str, Sequence[str]] | None = None,
    quantity: str = "energy",
    unit: str = "eV",
) -> None:
    """Plots predictions against labels, with one panel per split and equal axes.

    Args:
        panels: labels and predictions of each split in `unit`, both of shape (systems,).
        names: names of the systems of each split; if given, the largest errors are labeled.
        quantity: name of the predicted quantity.
        unit: unit of the predicted quantity.
    """
    targets, energies = (np.concatenate(values) for values in zip(*panels.values(), strict=True))
    # All labels and 99 % of the predictions are within the axes.
    low = float(min(targets.min(), np.quantile(energies, 0.005)))
    high = float(max(targets.max(), np.quantile(energies, 0.995)))
    pad = 0.04 * (high - low) or 0.5
    low, high = low - pad, high + pad
    sizes = (3.7, 4.0 if names is None else 4.6), (0.6, 0.4)
    with panels_of(file, len(panels), 2, *sizes, layout="compressed") as (figure, all_axes):
        for axes, (split, (target, energy)) in zip(all_axes, panels.items(), strict=True):
            axes.plot([low, high], [low, high], color=GREY, linewidth=1, zorder=1)
            alpha = min(0.5, max(0.02, 500 / len(target)))
            # Points are rasterized because vector files of many points are large.
            axes.scatter(
                target, energy, 9, BLUE, alpha=alpha, rasterized=True, linewidth=0, zorder=2
            )
            axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
            axes.grid()
            if outside := int(((energy < low) | (energy > high)).sum()):
                text = {"transform": axes.transAxes, "va": "top", "fontsize": "small"}
                axes.text(0.03, 0.97, f"{outside} outside", text)
            mae, digits = np.abs(energy - target).mean(), 1 if unit.startswith("m") else 3
            axes.set_title(f"{plain(split)}: MAE {mae:.{digits}f} {unit} (n = {len(target):,})")
            worst = [] if names is None else _name_worst(axes, target, energy, names[split], unit)
            axes.set_xlabel("\n".join([f"labeled {quantity} / {unit}", *worst]), fontsize="small")
        figure.supylabel(f"predicted {quantity} / {unit}")


def _name_worst(
    axes: Axes, target: _Array, energy: _Array, names: Sequence[str], unit: str
) -> list[str]:
    """Numbers the points with the largest errors; returns a line about each for the axis label."""
    error = energy - target
    worst = np.argsort(-np.abs(error), kind="stable")[: len(_SHIFTS)]
    digits, lines = 1 if unit.startswith("m") else 2, []
    low, high = axes.get_ylim()
    text: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center"}
    text |= {"fontsize": "small", "color": VERMILION}
    for number, (system, shift) in enumerate(zip(worst, _SHIFTS, strict=False), start=1):
        signed = f"{error[system]:+.{digits}f} {unit}".replace("-", "−")
        lines.append(f"{number}: {plain(names[system])}, error {signed}")
        point = target[system], energy[system]
        if low <= energy[system] <= high:
            axes.plot(*point, "o", color=VERMILION, mfc="none", markersize=6)
            axes.annotate(str(number), point, xytext=shift, **text)
    return lines


def calibration(
    coverage: Mapping[str, tuple[_Array, _Array]],
    errors: Mapping[str, tuple[_Array, _Array]],
    level: float,
    file: Path,
) -> None:
    """Plots the coverage against the nominal level, and the errors against the uncertainty.

    Args:
        coverage: for each split, levels in (0, 1) and the fractions of errors within the intervals
            of these levels, both of shape (levels,).
        errors: for each split, uncertainties and |errors| in eV, both of shape (systems,).
        level: fraction of errors that the uncertainty should cover, in (0, 1).
    """
    colors = dict(zip(errors, SERIES * len(errors), strict=False))
    with panels_of(file, 2, 2, (5.25, 4.6)) as (_, (left, right)):
        left.plot([0, 100], [0, 100], color=GREY, linewidth=1)
        left.axvline(100 * level, color="black", linestyle="--", linewidth=1)
        left.text(100 * level, 2, f" {100 * level:.0f} %", fontsize="small")
        for split, (nominal, found) in coverage.items():
            label = f"{split} (n = {len(errors[split][0]):,})"
            left.plot(100 * nominal, 100 * found, color=colors[split], label=label)
        left.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", title="coverage of the intervals")
        left.set(xlabel="nominal level / %", ylabel="systems within the interval / %")
        left.grid()
        left.legend(loc="upper left")
        _binned(right, errors, level, colors)


def _binned(
    axes: Axes, errors: Mapping[str, tuple[_Array, _Array]], level: float, colors: dict[str, str]
) -> None:
    """Plots quantiles of |error| against the uncertainty in bins with equal numbers of systems."""
    seen = []
    for split, (uncertainty, error) in errors.items():
        bins = min(_MOST_BINS, max(1, len(error) // _BIN))
        parts = np.array_split(np.argsort(uncertainty, kind="stable"), bins)
        x = np.array([uncertainty[part].mean() for part in parts])
        y = np.array([np.quantile(error[part], level) for part in parts])
        axes.plot(x, y, "o-", color=colors[split], markersize=4, label=split)
        seen += [x, y]
    values = np.concatenate(seen)
    values = values[values > 0]
    low, high = (0.8 * values.min(), 1.25 * values.max()) if len(values) else (0.01, 1.0)
    axes.plot([low, high], [low, high], color=GREY, linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis, wide=high / low >= 60)
    axes.set(title="error against uncertainty", xlabel="mean uncertainty of a bin / eV")
    axes.set_ylabel(f"{100 * level:.0f} % quantile of |error| in the bin / eV")
    axes.grid(which="both")
