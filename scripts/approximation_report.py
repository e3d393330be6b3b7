"""Points, pictures and tables of scripts/approximation.py."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from molflt.plots.figure import SERIES, picture

UNIFORM = "uniform attention"
UNSEEN = ("normalizers <= 0", "bias", "standard error of bias")  # in the CSV, not in pictures

Row = dict[str, Any]


class Points:
    """Samples of every point, kept under the point's labels."""

    def __init__(self) -> None:
        self.samples: dict[tuple[tuple[str, Any], ...], list[float]] = {}

    def add(self, value: float | Tensor, **labels: object) -> None:
        """Adds one sample, or a tensor of them."""
        values = value.flatten().tolist() if isinstance(value, Tensor) else [value]
        self.samples.setdefault(tuple(labels.items()), []).extend(values)

    def rows(self) -> list[Row]:
        """One row per point: labels, mean and standard deviation of its samples, their number."""
        return [
            {
                **dict(labels),
                "mean": statistics.fmean(values),
                "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
                "samples": len(values),
            }
            for labels, values in self.samples.items()
        ]


class Layout(NamedTuple):
    """How a figure is computed and drawn."""

    compute: Callable[[dict, torch.Generator], list[Row]]
    full: dict
    quick: dict
    panel: tuple[str, ...]
    curve: str
    x: str
    labels: tuple[str, str]
    columns: int
    figsize: tuple[float, float]
    log_x: bool = True
    page: str | None = None  # label with a picture of its own per value


def draw(png: Path, rows: list[Row], layout: Layout) -> None:
    """The picture; or one per page, the first at `png`."""
    values = [None] if layout.page is None else names(rows, layout.page)
    for value in values:
        page = png if value == values[0] else png.with_stem(f"{png.stem}-{layout.page}-{value:g}")
        own = rows if layout.page is None else pick(rows, **{layout.page: value})
        draw_page(page, own, layout)


def draw_page(png: Path, rows: list[Row], layout: Layout) -> None:
    """Means with bars of one standard deviation, a panel per combination of labels."""
    rows = [row for row in rows if row.get("quantity") not in UNSEEN]
    panels = list(dict.fromkeys(tuple(row[key] for key in layout.panel) for row in rows))
    if "quantity" in layout.panel:
        panels.sort(key=lambda name: name[0])
    curves = names(rows, layout.curve)
    with picture(png, figsize=layout.figsize) as figure:
        shape = -(-len(panels) // layout.columns), layout.columns
        grid = figure.subplots(*shape, sharex=True, sharey="row", squeeze=False)
        for axes, name in zip(grid.flat, panels, strict=False):
            for color, curve in zip(SERIES, curves, strict=False):
                own = [
                    row
                    for row in rows
                    if row[layout.curve] == curve and tuple(row[k] for k in layout.panel) == name
                ]
                own = [row for row in own if math.isfinite(row["mean"])]
                x, mean, sd = ([row[key] for row in own] for key in (layout.x, "mean", "sd"))
                color = "black" if curve == UNIFORM else color
                label = f"m = {curve}" if isinstance(curve, int) else curve
                # An sd above the mean would reach below 0, which a logarithm cannot show.
                below = [min(b, 0.8 * a) for a, b in zip(mean, sd, strict=True)]
                style = "--" if curve == UNIFORM or str(curve).startswith("bound") else ".-"
                options = {"label": label, "linewidth": 1, "elinewidth": 0.5, "markersize": 4}
                axes.errorbar(x, mean, (below, sd), fmt=style, color=color, **options)
            axes.set_yscale("log")
            if layout.log_x:
                axes.set_xscale("log", base=2)
            words = (
                part if isinstance(part, str) else f"{key} {part:g}"
                for key, part in zip(layout.panel, name, strict=True)
            )
            axes.set_title(", ".join(words), fontsize="small")
        figure.supxlabel(layout.labels[0])
        figure.supylabel(layout.labels[1])
        handles = grid[0, 0].get_legend_handles_labels()
        options = {
            "ncols": len(handles[0]),
            "columnspacing": 1,
            "fontsize": "small",
            "frameon": False,
            "handlelength": 1,
        }
        figure.legend(*handles, loc="outside upper center", **options)


def write_csv(path: Path, rows: list[Row]) -> None:
    """A line per point."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            numbers = {k: f"{v:.5g}" for k, v in row.items() if isinstance(v, float)}
            writer.writerow({**row, **numbers})


def pick(rows: list[Row], **labels: object) -> list[Row]:
    """Points with all these labels."""
    return [row for row in rows if all(row[key] == value for key, value in labels.items())]


def names(rows: list[Row], key: str) -> list:
    """Values of a label, in the order of the points."""
    return list(dict.fromkeys(row[key] for row in rows))


def slope(rows: list[Row], x: str) -> float:
    """Least-squares slope of log(mean) against log(x)."""
    a, b = (torch.tensor([float(row[key]) for row in rows]).double().log() for key in (x, "mean"))
    return float(((a - a.mean()) * b).sum() / (a - a.mean()).square().sum())


def better(rows: list[Row], baseline: list[Row], x: str) -> str:
    """Where a curve lies below another one: its ends, interpolated in logarithms."""
    place = [math.log(row[x]) for row in rows]
    gap = [math.log(a["mean"] / b["mean"]) for a, b in zip(rows, baseline, strict=True)]
    below = [i for i, value in enumerate(gap) if value < 0]
    if not below:
        return "nowhere"

    def between(i: int, j: int) -> str:
        return f"{math.exp(place[i] - gap[i] * (place[j] - place[i]) / (gap[j] - gap[i])):.2f}"

    first, last = below[0], below[-1]
    low = between(first - 1, first) if first else f"<= {rows[0][x]:g}"
    high = between(last, last + 1) if last + 1 < len(rows) else f">= {rows[-1][x]:g}"
    return f"{low} to {high}"


def table(head: list[str], lines: list[list[str]]) -> str:
    """Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def summarize(figure: str, rows: list[Row]) -> str:
    """The table of one figure."""
    return SUMMARIES[figure](rows)


def _features(rows: list[Row]) -> str:
    projections = [name for name in names(rows, "projection") if name != UNIFORM]
    largest = max(names(rows, "m"))
    head = ["map, scale, error", f"iid at M = {largest}", "uniform"]
    head += [f"{name}: slope, / iid" for name in projections]
    lines = []
    for scale in names(rows, "scale"):
        for feature_map in names(rows, "feature_map"):
            for quantity in ("matrix", "output"):
                own = pick(rows, feature_map=feature_map, scale=scale, quantity=quantity)
                iid = pick(own, projection="iid")
                cells = [
                    f"{iid[-1]['mean']:.2g}",
                    f"{pick(own, projection=UNIFORM)[-1]['mean']:.2g}",
                ]
                for name in projections:
                    curve = pick(own, projection=name)
                    ratios = [a["mean"] / b["mean"] for a, b in zip(curve, iid, strict=True)]
                    ratio = statistics.geometric_mean(ratios)
                    cells.append(f"{slope(curve, 'm'):.2f}, {ratio:.2f}")
                lines.append([f"{feature_map}, {scale:g}, {quantity}", *cells])
    return table(head, lines)


def _layers(rows: list[Row]) -> str:
    depths = sorted({1, 2, max(names(rows, "layers"))})
    lines = []
    for feature_map in names(rows, "feature_map"):
        for gain in names(rows, "gain"):
            for m in names(rows, "m"):
                own = pick(rows, feature_map=feature_map, gain=gain, m=m)
                cells = [
                    f"{row['mean']:.3f} ± {row['sd']:.3f}" for row in own if row["layers"] in depths
                ]
                lines.append([f"{feature_map}, gain {gain:g}", str(m), *cells])
    return table(["map", "m", *(f"layers: {depth}" for depth in depths)], lines)


def _norms(rows: list[Row]) -> str:
    radii = [r for r in names(rows, "R") if r in (1, 2, 3)]
    lines = []
    for feature_map in names(rows, "feature_map"):
        own = pick(rows, feature_map=feature_map)
        uniform = pick(own, m=UNIFORM)
        for m in names(own, "m"):
            curve = pick(own, m=m)
            cells = [f"{pick(curve, R=radius)[0]['mean']:.3f}" for radius in radii]
            where = "" if m == UNIFORM else better(curve, uniform, "R")
            lines.append([feature_map, str(m), *cells, where])
    head = ["map", "m", *(f"R = {radius:g}" for radius in radii), "better than uniform for R of"]
    return table(head, lines)


def _masks(rows: list[Row]) -> str:
    largest = max(names(rows, "r"))
    lines = []
    for family in names(rows, "family"):
        own = pick(rows, family=family)
        by = {name: pick(own, quantity=name) for name in names(own, "quantity")}
        bound = next(curve for name, curve in by.items() if name.startswith("bound"))
        share = [a["mean"] / b["mean"] for a, b in zip(by["largest error"], bound, strict=True)]
        bias = [
            a["mean"] / b["mean"]
            for a, b in zip(by["bias"], by["standard error of bias"], strict=True)
        ]
        lines.append(
            [
                family,
                f"{own[0]['largest g/p']:.3g}",
                f"{slope(by['rms error'], 'r'):.2f}",
                f"{by['rms error'][-1]['mean']:.3g}",
                f"{by['largest error'][-1]['mean']:.3g}",
                f"{max(share):.2f}",
                f"{statistics.fmean(bias):.2f} ({max(bias):.2f})",
            ]
        )
    head = ["family, nodes", "max g/p", "slope of rms", f"rms at r = {largest}"]
    head += ["largest error there", "largest error / bound", "bias in standard errors (max)"]
    return table(head, lines)


SUMMARIES = {"features": _features, "layers": _layers, "norms": _norms, "masks": _masks}
