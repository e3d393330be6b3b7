"""Pictures of optimizations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import SERIES, picture, plain

__all__ = ["loss_curves"]

_BINS = 60
_COLUMNS = 3


def loss_curves(tasks: Mapping[str, Mapping[str, NDArray[np.float64]]], file: Path) -> None:
    """Draws losses against the step: the geometric mean over repeats, and all that they span.

    Steps are pooled in bins, over which a loss is averaged: minibatches make it noisy.

    Args:
        tasks: name of a task, which gets a panel -> name of an optimizer -> losses (repeats,
            steps), above 0; infinite ones are left out.
        file: to write, .png, .svg or .pdf.
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
                steps, binned = _binned(losses)
                middle = np.exp(np.log(binned).mean(axis=0))
                axes.plot(steps, middle, color=color, linewidth=1.4, label=plain(name))
                if len(binned) > 1:
                    low, high = binned.min(axis=0), binned.max(axis=0)
                    axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
            axes.set_yscale("log")
            axes.set_title(plain(task.replace("_", " ")), fontsize="medium")
            axes.set(xlabel="step", ylabel="loss")
            axes.grid(alpha=0.3)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(names), 5), frameon=False
        )


def _binned(losses: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Centers of bins of steps, and the mean loss in each: (bins,) and (repeats, bins)."""
    steps = losses.shape[1]
    edges = np.unique(np.linspace(0, steps, _BINS + 1).round().astype(int))
    means = np.stack([losses[:, a:b].mean(axis=1) for a, b in itertools.pairwise(edges)], axis=1)
    known = np.isfinite(means)
    return (edges[:-1] + edges[1:] - 1) / 2, np.where(known, np.maximum(means, 1e-30), np.nan)
