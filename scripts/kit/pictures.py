"""Panels of curves in the colors of the package."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kit.rows import Rows, names, pick
from molflt.plots.figure import SERIES, legend_outside, picture, plain

MOST = 8  # maximum number of entries in a legend
UNIFORM = "uniform attention"  # all keys have equal weights


def styles_of(names: Iterable[str], reference: str | None = None) -> dict[str, tuple[int, str]]:
    """Returns the color and line style of each curve; lines are dashed once all colors are used.

    The last color is reserved for `reference`, if given.
    """
    count = len(SERIES) - (reference is not None)
    others = [name for name in names if name != reference]
    styles = {name: (i % count, "-" if i < count else "--") for i, name in enumerate(others)}
    return styles if reference is None else {**styles, reference: (count, "-")}


def curves(
    axes: Any,
    points: Mapping[str, Sequence[tuple[float, float]]],
    styles: Mapping[str, tuple[int, str]] | None = None,
    **labels: Any,
) -> None:
    """Draws a line for each name through its points (x, y) on logarithmic scales.

    Args:
        axes: axes of the panel.
        points: points by name; lines without points are omitted.
        styles: color index and line style by name; defaults to the result of `styles_of`.
        labels: arguments of `axes.set`. The y axis is labeled "lower is better".
    """
    if "ylabel" in labels:
        labels["ylabel"] += "\n(lower is better)"
    styles = styles or styles_of(points)
    for name, own in points.items():
        color, line = styles[name]
        options = {"marker": "o", "markersize": 3, "linewidth": 1.2, "label": name}
        if own:
            axes.plot(*zip(*own, strict=True), line, color=SERIES[color], **options)
    axes.set(**{"xscale": "log", "yscale": "log", **labels})
    axes.grid(alpha=0.25)


def label_ends(axes: Any, height: float) -> None:
    """Labels lines at their ends, on the right of a panel; the labels do not overlap.

    Call it after everything else has been drawn. `height` is the height of the panel in inches.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    at = axes.transData + axes.transAxes.inverted()
    lines: Any = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    ends = [(line, line.get_xydata()[-1]) for line in lines if len(line.get_xydata())]
    places = [float(at.transform(end)[1]) for _, end in ends]
    order = sorted(range(len(ends)), key=places.__getitem__)
    step = min(0.125 / height, 1 / max(1, len(ends) - 1))  # a line of text of 7 points
    for before, after in pairwise(order):
        places[after] = max(places[after], places[before] + step)
    highest = 1.0
    for one in reversed(order):
        places[one] = min(places[one], highest)
        highest = places[one] - step
    for (line, end), place in zip(ends, places, strict=True):
        color = line.get_color()
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "relpos": (0, 0.5)}
        axes.annotate(
            plain(line.get_label()),
            end,
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=7,
            color=color,
            arrowprops=arrow,
            annotation_clip=False,
        )


def legend(figure: Any, axes: Any, columns: int = 4) -> None:
    """Draws one legend below all panels, or labels the line ends if the legend would be long."""
    if len(axes.get_legend_handles_labels()[1]) <= MOST:
        legend_outside(figure, axes, "lower", columns, fontsize="small")
        return
    figure.set_figwidth(1.45 * figure.get_figwidth())
    rows = axes.get_gridspec().nrows
    for panel in figure.axes:
        label_ends(panel, 0.75 * figure.get_figheight() / rows)


def error_panels(
    png: Path,
    rows: Rows,
    panel: Sequence[str],
    curve: str,
    x: str,
    labels: tuple[str, str],
    shape: tuple[int, int],
    figsize: tuple[float, float],
) -> None:
    """Draws the means in rows of `Points`, with error bars of one standard deviation.

    Each combination of the labels `panel` has its own panel, which contains a line against `x` for
    each value of `curve`. `labels` are the axis labels, and `shape` is (rows, columns).
    """
    found = {tuple(row[key] for key in panel) for row in rows}
    panels = sorted(found, key=lambda values: [(isinstance(v, str), v) for v in values])
    with picture(png, figsize=figsize) as figure:
        grid = figure.subplots(*shape, sharex=True, sharey="row", squeeze=False)
        for axes, values in zip(grid.flat, panels, strict=False):
            own = pick(rows, **dict(zip(panel, values, strict=True)))
            for color, name in zip(SERIES, names(rows, curve), strict=False):
                points = pick(own, **{curve: name})
                places, mean, sd = ([r[key] for r in points] for key in (x, "mean", "sd"))
                # On a logarithmic scale, the bar must not reach 0.
                below = [min(b, 0.8 * a) for a, b in zip(mean, sd, strict=True)]
                options = {"linewidth": 1, "elinewidth": 0.5, "markersize": 4}
                options["color"] = "black" if name == UNIFORM else color
                options["fmt"] = "--" if name == UNIFORM else ".-"
                axes.errorbar(places, mean, (below, sd), label=name, **options)
            axes.set(yscale="log")
            axes.set_xscale("log", base=2)
            parts = zip(panel, values, strict=True)
            title = ", ".join(v if isinstance(v, str) else f"{k} {v:g}" for k, v in parts)
            axes.set_title(title, fontsize="small")
        figure.supxlabel(labels[0])
        figure.supylabel(f"{labels[1]} (lower is better)")
        options = {"columnspacing": 1, "handlelength": 1, "fontsize": "small"}
        legend_outside(figure, grid[0, 0], "upper", **options)
