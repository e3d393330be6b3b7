"""Pictures of optimizations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import SERIES, picture, plain

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
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    names = list(dict.fromkeys(name for own in tasks.values() for name in own))
    with picture(file, figsize=(1.0 + 3.1 * columns, 0.8 + 2.6 * rows)) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(tasks) :]:
            axes.set_visible(False)
        for axes, (task, own) in zip(grid.flat, tasks.items(), strict=False):
            for name, losses in own.items():
                color = SERIES[names.index(name) % len(SERIES)]
                at = (np.arange(losses.shape[1]) + 0.5) * steps / losses.shape[1]
                shown = np.where(np.isfinite(losses), np.maximum(losses, _LEAST), np.nan)
                middle = np.exp(np.log(shown).mean(axis=0))
                axes.plot(at, middle, color=color, linewidth=1.4, label=plain(name))
                if len(shown) > 1:
                    low, high = shown.min(axis=0), shown.max(axis=0)
                    axes.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
            axes.set_yscale("log")
            axes.set_title(plain(task.replace("_", " ")), fontsize="medium")
            axes.set(xlabel="step", ylabel="loss")
            axes.grid(alpha=0.3)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(names), 5), frameon=False
        )
