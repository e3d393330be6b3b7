"""Pictures of optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import SERIES, curve_in_band, legend_outside, panel_grid, plain

__all__ = ["best_values", "loss_curves"]

_COLUMNS = 3
_LEAST = 1e-30  # of losses on a logarithmic axis


def loss_curves(
    tasks: Mapping[str, Mapping[str, NDArray[np.float64]]], file: Path, steps: int
) -> None:
    """Draws losses over the step: the geometric mean and the range over repeats.

    Args:
        tasks: name of a task -> name of an optimizer -> losses (repeats, n) at evenly spaced steps,
            at least 0; infinite values are left out.
        file: file to write, .png, .svg or .pdf.
        steps: number of steps that the n losses span.
    """
    names = list(dict.fromkeys(name for own in tasks.values() for name in own))
    sizes = (3.1, 2.6), (1.0, 0.8)
    with panel_grid(file, len(tasks), (None, _COLUMNS), *sizes) as (figure, shown_axes):
        for axes, (task, own) in zip(shown_axes, tasks.items(), strict=True):
            for name, losses in own.items():
                color = SERIES[names.index(name) % len(SERIES)]
                at = (np.arange(losses.shape[1]) + 0.5) * steps / losses.shape[1]
                shown = np.where(np.isfinite(losses), np.maximum(losses, _LEAST), np.nan)
                middle = np.exp(np.log(shown).mean(axis=0))
                band = shown.min(axis=0), shown.max(axis=0)
                curve_in_band(axes, at, middle, band, name, color)
            axes.set_yscale("log")
            axes.set_title(plain(task.replace("_", " ")), fontsize="medium")
            axes.set(xlabel="step", ylabel="loss")
            axes.grid(alpha=0.3)
        legend_outside(figure, shown_axes[0], "lower", min(len(names), 5))


def best_values(
    panels: Mapping[str, Mapping[str, NDArray[np.float64]]],
    evaluations: NDArray[np.float64],
    file: Path,
    runs: int,
) -> None:
    """Draws the mean of log10 of the best value with a band of one standard deviation.

    Args:
        panels: name of a function -> name of an optimizer -> log10 of the best value so far, (runs,
            points).
        evaluations: number of evaluations at each point, (points,).
        file: file to write, .png, .svg or .pdf.
        runs: number of runs of each optimizer, for the title.
    """
    if not panels:
        raise ValueError(f"{file}: nothing to draw; expected values of a function; got none")
    grid = (None, _COLUMNS), (3.1, 2.5), (0.4, 0.7)
    with panel_grid(file, len(panels), *grid, sharex=True) as (figure, shown):
        for axes, (name, found) in zip(shown, panels.items(), strict=True):
            colors = itertools.cycle(SERIES)
            for color, (optimizer, values) in zip(colors, found.items(), strict=False):
                mean, width = values.mean(axis=0), values.std(axis=0, ddof=min(1, len(values) - 1))
                band = mean - width, mean + width
                curve_in_band(axes, evaluations, mean, band, optimizer, color)
            axes.set_title(plain(name), fontsize="medium")
            axes.grid(alpha=0.3)
        for axes in shown[::_COLUMNS]:
            axes.set_ylabel("log10 of the best value\n(lower is better)")
        for axes in shown[-_COLUMNS:]:
            axes.set_xlabel("evaluations")
        title = f"mean ± standard deviation, n = {runs} runs"
        legend_outside(figure, shown[0], "upper", title=title)
