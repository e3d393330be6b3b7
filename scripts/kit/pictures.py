"""Curves of rows in panels, in the colors of the package's pictures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.rows import Rows
from molflt.plots.figure import SERIES, LineEnd, label_ends, legend_outside, picture

MOST = 8  # entries of a legend; more lines than that are named where they end
UNIFORM = "uniform attention"  # all keys weigh the same: what an estimate has to beat


def curves(
    axes: Any,
    points: Mapping[str, Sequence[tuple[float, float]]],
    styles: Mapping[str, tuple[int, str]] | None = None,
    **labels: Any,
) -> None:
    """A line per name through its points (x, y), if it has any; both scales are logarithmic.

    Styles are the number of a color and the style of a line by name, labels those of `axes.set`;
    of what is drawn so, times, bytes and errors, less is better, and the axis says it.
    """
    if "ylabel" in labels:
        labels["ylabel"] += "\n(lower is better)"
    for index, (name, own) in enumerate(points.items()):
        color, line = (styles or {}).get(name, (index % len(SERIES), "-"))
        options = {"marker": "o", "markersize": 3, "linewidth": 1.2, "label": name}
        if own:
            axes.plot(*zip(*own, strict=True), line, color=SERIES[color], **options)
    axes.set(**{"xscale": "log", "yscale": "log", **labels})
    axes.grid(alpha=0.25)


def legend(figure: Any, axes: Any, columns: int = 4) -> None:
    """One for all panels, below them; of many lines, names at their ends in each panel."""
    if len(axes.get_legend_handles_labels()[1]) <= MOST:
        legend_outside(figure, axes, "lower", columns, fontsize="small")
        return
    figure.set_figwidth(1.45 * figure.get_figwidth())
    rows = axes.get_gridspec().nrows
    for panel in figure.axes:
        lines = [line for line in panel.lines if not line.get_label().startswith("_")]
        ends = [
            LineEnd(line.get_label(), *line.get_xydata()[-1], line.get_color()) for line in lines
        ]
        label_ends(panel, ends, 0.75 * figure.get_figheight() / rows)


def error_panels(
    png: Path,
    rows: Rows,
    panel: Sequence[str],
    curve: str,
    x: str,
    labels: tuple[str, str],
    shape: tuple[int, int],
    figsize: tuple[float, float],
    log_x: bool = True,
) -> None:
    """Means of points (`Points` makes them) with bars of one standard deviation.

    A panel per combination of the labels `panel`, and in it a line per value of `curve` (`UNIFORM`
    is black) against `x`; `labels` are those of both axes, `shape` rows and columns of panels.
    """
    found = {tuple(row[key] for key in panel) for row in rows}
    panels = sorted(found, key=lambda values: [(isinstance(v, str), v) for v in values])
    names = list(dict.fromkeys(row[curve] for row in rows))
    with picture(png, figsize=figsize) as figure:
        grid = figure.subplots(*shape, sharex=True, sharey="row", squeeze=False)
        for axes, values in zip(grid.flat, panels, strict=False):
            own = [row for row in rows if tuple(row[key] for key in panel) == values]
            for color, name in zip(SERIES, names, strict=False):
                points = [r for r in own if r[curve] == name and math.isfinite(r["mean"])]
                places, mean, sd = ([r[key] for r in points] for key in (x, "mean", "sd"))
                # An sd above the mean would reach below 0, which a logarithm cannot show.
                below = [min(b, 0.8 * a) for a, b in zip(mean, sd, strict=True)]
                options = {"linewidth": 1, "elinewidth": 0.5, "markersize": 4}
                options["color"] = "black" if name == UNIFORM else color
                options["fmt"] = "--" if name == UNIFORM or "bound" in str(name) else ".-"
                label = f"{curve} = {name}" if isinstance(name, int) else name
                axes.errorbar(places, mean, (below, sd), label=label, **options)
            axes.set(yscale="log")
            if log_x:
                axes.set_xscale("log", base=2)
            parts = zip(panel, values, strict=True)
            title = ", ".join(v if isinstance(v, str) else f"{k} {v:g}" for k, v in parts)
            axes.set_title(title, fontsize="small")
        figure.supxlabel(labels[0])
        figure.supylabel(f"{labels[1]} (lower is better)")
        options = {"columnspacing": 1, "handlelength": 1, "fontsize": "small"}
        legend_outside(figure, grid[0, 0], "upper", **options)
