"""Runs side by side: their training curves in one picture, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.metrics import Metric
from molflt.plots.figure import SERIES, picture
from molflt.plots.training import _log_if_wide

_Columns = Mapping[str, NDArray[np.float64]]
_STYLES = ("-", "--", ":", "-.")


def overlaid_curves(runs: Mapping[str, _Columns], metrics: Mapping[str, Metric], png: Path) -> None:
    """Draws columns of several metrics.csv against the step, a panel each.

    Args:
        runs: name of a run -> its columns, (rows,) each, among them step; nan where empty.
        metrics: columns that get a panel where some run has them, and how they read.
        png: file to write.

    Raises:
        ValueError: if there is nothing to draw.
    """
    shown = [
        name
        for name in metrics
        if any(np.isfinite(columns.get(name, [])).any() for columns in runs.values())
    ]
    if not shown:
        raise ValueError(f"{png}: nothing to draw; expected runs with some of {', '.join(metrics)}")
    size = (7.5, 0.8 + 2.4 * len(shown) + 0.15 * len(runs))
    with picture(png, figsize=size) as figure:
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, shown, strict=True):
            drawn = []
            for place, (run, columns) in enumerate(runs.items()):
                values = columns.get(name, np.full(len(columns["step"]), np.nan))
                known = np.isfinite(values)
                drawn.append(values[known])
                style = {"color": SERIES[place % len(SERIES)], "linewidth": 1.4}
                style["linestyle"] = _STYLES[place // len(SERIES) % len(_STYLES)]
                style["marker"] = "o" if known.sum() < 40 else ""
                axes.plot(columns["step"][known], values[known], label=run, markersize=3, **style)
            if metrics[name].scale == "log":
                _log_if_wide(axes, np.concatenate(drawn))
            axes.set_ylabel(metrics[name].axis)
            axes.grid(alpha=0.3)
        panels[-1].set_xlabel("step")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", frameon=False, ncols=2)
        figure.align_ylabels()


def intervals(
    panels: Mapping[str, Mapping[str, tuple[float, float]]], png: Path, largest_is_best: bool
) -> None:
    """Draws values with their uncertainties, one below the other, the best of the first on top.

    Args:
        panels: label of a panel -> name -> value and half of the width of its interval; names that
            a panel does not have are left out in it.
        png: file to write.
        largest_is_best: whether more is better.

    Raises:
        ValueError: if there is nothing to draw.
    """
    first = next(iter(panels.values()), {})
    if not first:
        raise ValueError(f"{png}: nothing to draw; expected values of some run; got none")
    order = sorted(first, key=lambda name: first[name][0], reverse=not largest_is_best)
    others = [name for found in panels.values() for name in found if name not in first]
    order = [*dict.fromkeys(others), *order]
    size = (3.2 + 3.2 * len(panels), 1.0 + 0.3 * len(order))
    with picture(png, figsize=size) as figure:
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (label, found) in zip(row, panels.items(), strict=True):
            for place, name in enumerate(order):
                if name in found:
                    value, width = found[name]
                    axes.errorbar(value, place, xerr=width, fmt="o", capsize=3, color=SERIES[0])
            axes.set_yticks(range(len(order)), order)
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
