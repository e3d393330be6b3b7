"""Pictures of optimizations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import SERIES, curve_in_band, legend_outside, panel_grid, plain

__all__ = ["loss_curves"]

_COLUMNS = 3
_LEAST = 1e-30  # of losses on a logarithmic axis


def loss_curves(
    tasks: Mapping[str, Mapping[str, NDArray[np.float64]]], file: Path, steps: int
) -> None:
    """Draws losses against the step: the geometric mean over repeats, and all that they span.

    Args:
        tasks: name of a task, which gets a panel -> name of an optimizer -> losses (repeats, n) at
            evenly spaced steps, at least 0; infinite ones are left out.
        file: to write, .png, .svg or .pdf.
        steps: that the n losses span.
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
