"""Best values of optimizers against how many values they have asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import SERIES, picture, plain

_ABREAST = 3


def best_values(
    panels: Mapping[str, Mapping[str, NDArray[np.float64]]],
    evaluations: NDArray[np.float64],
    file: Path,
    runs: int,
) -> None:
    """Draws the mean of log10 of the best value with a band of one standard deviation.

    Args:
        panels: name of a function -> name of an optimizer -> log10 of its best value so far, (runs,
            points).
        evaluations: values asked for up to each point, (points,).
        file: to write, .png, .svg or .pdf.
        runs: of each optimizer, for the title.

    Raises:
        ValueError: if there is nothing to draw.
    """
    if not panels:
        raise ValueError(f"{file}: nothing to draw; expected values on some function; got none")
    columns = min(_ABREAST, len(panels))
    rows = -(-len(panels) // columns)
    with picture(file, figsize=(3.1 * columns + 0.4, 2.5 * rows + 0.7)) as figure:
        grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for place, (name, found) in enumerate(panels.items()):
            axes = grid.flat[place]
            for color, (optimizer, values) in zip(SERIES, found.items(), strict=False):
                mean, width = values.mean(axis=0), values.std(axis=0, ddof=min(1, len(values) - 1))
                axes.plot(evaluations, mean, color=color, linewidth=1.4, label=plain(optimizer))
                band = {"color": color, "alpha": 0.2, "linewidth": 0}
                axes.fill_between(evaluations, mean - width, mean + width, **band)
            axes.set_title(plain(name), fontsize="medium")
            axes.grid(alpha=0.3)
            axes.tick_params(labelbottom=place + columns >= len(panels))
            if place % columns == 0:
                axes.set_ylabel("log10 of the best value\n(lower is better)")
            if place + columns >= len(panels):
                axes.set_xlabel("evaluations")
        title = f"mean ± standard deviation, n = {runs} runs"
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            title=title,
            loc="outside upper center",
            ncols=len(labels),
            frameon=False,
        )
