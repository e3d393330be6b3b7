"""Pictures of calibrations of uncertainties."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import GREY, SERIES, picture, plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["calibration"]

_BIN = 25  # minimum number of systems in a bin
_MOST_BINS = 8

_Array = NDArray[np.float64]


def calibration(
    coverage: Mapping[str, tuple[_Array, _Array]],
    errors: Mapping[str, tuple[_Array, _Array]],
    level: float,
    file: Path,
) -> None:
    """Draws the coverage over the nominal level, and the errors over the uncertainty.

    Args:
        coverage: split -> levels in (0, 1) and the shares of errors within their intervals,
            each (levels,).
        errors: split -> uncertainty and |error| of each system, (systems,), eV.
        level: share of errors within the uncertainty, in (0, 1).
        file: file to write, .png, .svg or .pdf.
    """
    if not coverage or not errors:
        raise ValueError("calibration: expected at least one split with labels; got none")
    colors = dict(zip(errors, SERIES * len(errors), strict=False))
    with picture(file, figsize=(10.5, 4.6)) as figure:
        left, right = figure.subplots(1, 2)
        left.set_title("coverage of the intervals", fontsize="medium")
        right.set_title("errors against their uncertainty", fontsize="medium")
        left.plot([0, 100], [0, 100], color=GREY, linewidth=1)
        left.axvline(100 * level, color="black", linestyle="--", linewidth=1)
        left.text(100 * level, 2, f" {100 * level:.0f} %", fontsize="small")
        for split, (nominal, found) in coverage.items():
            count = len(errors[split][0])
            label = f"{split} (n = {count:,})"
            left.plot(100 * nominal, 100 * found, color=colors[split], label=label)
        left.set(xlim=(0, 100), ylim=(0, 100), aspect="equal")
        left.set_xlabel("nominal level / %")
        left.set_ylabel("systems within the interval / %")
        left.grid(alpha=0.3)
        left.legend(frameon=False, fontsize="small", loc="upper left")
        _binned(right, errors, level, colors)


def _binned(
    axes: Axes, errors: Mapping[str, tuple[_Array, _Array]], level: float, colors: dict[str, str]
) -> None:
    """Draws the quantile of |error| over the uncertainty in bins of equally many systems."""
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
    axes.set_xlabel("mean uncertainty of a bin / eV")
    axes.set_ylabel(f"{100 * level:.0f} % of its |errors| are below / eV")
    axes.grid(alpha=0.3, which="both")
