"""Best values of optimizers against how many values they have asked for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import SERIES, curve_in_band, legend_outside, panel_grid, plain

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
    """
    if not panels:
        raise ValueError(f"{file}: nothing to draw; expected values on some function; got none")
    grid = (None, _ABREAST), (3.1, 2.5), (0.4, 0.7)
    with panel_grid(file, len(panels), *grid, sharex=True) as (figure, shown):
        for axes, (name, found) in zip(shown, panels.items(), strict=True):
            colors = itertools.cycle(SERIES)
            for color, (optimizer, values) in zip(colors, found.items(), strict=False):
                mean, width = values.mean(axis=0), values.std(axis=0, ddof=min(1, len(values) - 1))
                band = mean - width, mean + width
                curve_in_band(axes, evaluations, mean, band, optimizer, color)
            axes.set_title(plain(name), fontsize="medium")
            axes.grid(alpha=0.3)
        for axes in shown[::_ABREAST]:
            axes.set_ylabel("log10 of the best value\n(lower is better)")
        for axes in shown[-_ABREAST:]:
            axes.set_xlabel("evaluations")
        title = f"mean ± standard deviation, n = {runs} runs"
        legend_outside(figure, shown[0], "upper", title=title)
