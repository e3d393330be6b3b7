"""Pictures of several runs: training curves and results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.metrics import Metric
from molflt.plots.figure import SERIES, LineEnd, label_ends, picture, plain
from molflt.plots.training import _log_if_wide

_Columns = Mapping[str, NDArray[np.float64]]
_STYLES = ("-", "--", ":", "-.")


def overlaid_curves(
    runs: Mapping[str, _Columns], metrics: Mapping[str, Metric], file: Path
) -> None:
    """Draws columns of several metrics.csv over the step, with one panel per metric.

    Args:
        runs: name of a run -> columns, (rows,) each, including step; NaN for empty cells.
        metrics: column -> metric; columns without values are left out.
        file: file to write, .png, .svg or .pdf.
    """
    shown = [
        name
        for name in metrics
        if any(np.isfinite(columns.get(name, [])).any() for columns in runs.values())
    ]
    if not shown:
        raise ValueError(
            f"{file}: nothing to draw; expected runs with some of {', '.join(metrics)}"
        )
    height = max(2.2, 0.3 + 0.14 * len(runs))
    with picture(file, figsize=(9.0, 0.8 + (height + 0.2) * len(shown))) as figure:
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        last = max(float(np.nanmax(columns["step"], initial=1.0)) for columns in runs.values())
        for axes, name in zip(panels, shown, strict=True):
            drawn, ends = [], []
            for place, (run, columns) in enumerate(runs.items()):
                values = columns.get(name, np.full(len(columns["step"]), np.nan))
                known = np.isfinite(values)
                steps, values = columns["step"][known], values[known]
                drawn.append(values)
                color = SERIES[place % len(SERIES)]
                style = _STYLES[place // len(SERIES) % len(_STYLES)]
                marker = "o" if known.sum() < 40 else ""
                line = {"color": color, "linewidth": 1.4, "linestyle": style, "marker": marker}
                axes.plot(steps, values, markersize=3, **line)
                if len(values):
                    ends.append(LineEnd(run, float(steps[-1]), float(values[-1]), color))
            if metrics[name].scale == "log":
                _log_if_wide(axes, np.concatenate(drawn))
            axes.set_xlim(0, 1.02 * last)
            axes.set_ylabel(f"{metrics[name].axis}\n({better(metrics[name].largest_is_best)})")
            axes.grid(alpha=0.3)
            label_ends(axes, ends, height)
        panels[-1].set_xlabel("step")
        panels[0].set_title(f"n = {len(runs)} runs", fontsize="medium")
        figure.align_ylabels()


def better(largest_is_best: bool) -> str:
    """Returns the better direction in words."""
    return f"{'higher' if largest_is_best else 'lower'} is better"


def intervals(
    panels: Mapping[str, Mapping[str, tuple[float, float]]], file: Path, largest_is_best: bool
) -> None:
    """Draws values with uncertainties in rows, sorted by the first panel with the best on top.

    Args:
        panels: label of a panel -> name -> value and half width of its interval; a panel may lack
            names.
        file: file to write, .png, .svg or .pdf.
        largest_is_best: True if larger values are better.
    """
    first = next(iter(panels.values()), {})
    if not first:
        raise ValueError(f"{file}: nothing to draw; expected values of a run; got none")
    order = sorted(first, key=lambda name: first[name][0], reverse=not largest_is_best)
    others = [name for found in panels.values() for name in found if name not in first]
    order = [*dict.fromkeys(others), *order]
    size = (3.2 + 3.2 * len(panels), 1.3 + 0.3 * len(order))
    with picture(file, figsize=size) as figure:
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (label, found) in zip(row, panels.items(), strict=True):
            for place, name in enumerate(order):
                if name in found:
                    value, width = found[name]
                    axes.errorbar(value, place, xerr=width, fmt="o", capsize=3, color=SERIES[0])
            axes.set_yticks(range(len(order)), [plain(name) for name in order])
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.locator_params(axis="x", nbins=5)
            axes.set_xlabel(f"{label}\n({better(largest_is_best)})")
            axes.grid(alpha=0.3)
