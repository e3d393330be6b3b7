"""Figures for language models."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import SERIES, panels

_BINS = 24


def losses_by_place(losses: Mapping[str, NDArray[np.float64]], file: Path) -> None:
    """Plots the mean loss against the position in a block, which is the length of the context.

    `losses` contains the losses of the tokens of each text, in nats, as an array (blocks, length);
    missing tokens are NaN.
    """
    with panels(file, 1, 1, (6.0, 3.4)) as (_, (axes,)):
        for (name, loss), color in zip(losses.items(), itertools.cycle(SERIES), strict=False):
            edges = np.unique(np.geomspace(1, loss.shape[1] + 1, _BINS).astype(int))
            with warnings.catch_warnings():  # a short text does not reach the last positions
                warnings.simplefilter("ignore", RuntimeWarning)
                means = [np.nanmean(loss[:, a - 1 : b - 1]) for a, b in itertools.pairwise(edges)]
            centers = np.sqrt(edges[:-1] * (edges[1:] - 1.0))
            axes.plot(centers, means, marker="o", markersize=3, color=color, label=name)
        axes.set(xscale="log", xlabel="position / tokens", ylabel="loss / nats per token")
        axes.grid()
        axes.legend()


def substitutions(tables: Mapping[str, NDArray[np.float64]], letters: str, file: Path) -> None:
    """Draws similarity tables (letters, letters), keyed by title, without their diagonals."""
    count = len(tables)
    with panels(file, count, count, (4.4, 3.9), (0.6, 0.0)) as (figure, all_axes):
        for axes, (title, table) in zip(all_axes, tables.items(), strict=True):
            image = axes.imshow(np.where(np.eye(len(letters)), np.nan, table), cmap="viridis")
            axes.set_xticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_yticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_title(title)
            figure.colorbar(image, ax=axes, fraction=0.05)
