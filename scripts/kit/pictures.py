"""Panels of curves in the colors of the package."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.rows import Rows, names, pick
from molflt.plots.figure import SERIES, legend_outside, picture

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
