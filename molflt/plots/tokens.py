"""Pictures of errors of language models and image classifiers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.plots.figure import SERIES, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confusion", "image_sheet", "losses_by_place", "substitutions"]

_BINS = 24
_ROWS, _COLUMNS = 4, 8


def losses_by_place(losses: Mapping[str, NDArray[np.float64]], file: Path) -> None:
    """Draws the mean loss against the position in a block, which is the length of the context.

    `losses` are text -> loss of each token, nats, (blocks, length); NaN if missing.
    """
    with picture(file, figsize=(6.0, 3.4)) as figure:
        axes = figure.subplots()
        for (name, loss), color in zip(losses.items(), itertools.cycle(SERIES), strict=False):
            length = loss.shape[1]
            edges = np.unique(np.geomspace(1, length + 1, _BINS).astype(int))
            with warnings.catch_warnings():  # a short text does not reach the last positions
                warnings.simplefilter("ignore", RuntimeWarning)
                means = [
                    np.nanmean(loss[:, low - 1 : high - 1])
                    for low, high in itertools.pairwise(edges)
                ]
            centers = np.sqrt(edges[:-1] * (edges[1:] - 1.0))
            axes.plot(centers, means, marker="o", markersize=3, color=color, label=name)
        axes.set(xscale="log", xlabel="position / tokens", ylabel="loss / nats per token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")


def image_sheet(
    images: Sequence[NDArray[np.uint8]], captions: Sequence[str], file: Path, title: str
) -> None:
    """Draws images, (channels, height, width) each, with captions; the first 32 are drawn."""
    rows = max(1, min(_ROWS, -(-len(images) // _COLUMNS)))
    with picture(file, figsize=(1.3 * _COLUMNS, 0.5 + 1.65 * rows)) as figure:
        grid = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
        for axes in grid:
            axes.axis("off")
        for axes, image, caption in zip(grid, images, captions, strict=False):
            gray = len(image) == 1
            pixels = image[0] if gray else image.transpose(1, 2, 0)
            axes.imshow(pixels, cmap="gray" if gray else None)
            axes.set_title(caption, fontsize="x-small")
        figure.suptitle(title, fontsize="medium")


def confusion(counts: ArrayLike, classes: Sequence[str], file: Path) -> None:
    """Draws the confusion matrix: numbers of images by true class (rows) and predicted class."""
    matrix = np.asarray(counts, dtype=float)
    shares = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = 2.2 + 0.42 * min(len(classes), 20)
    with picture(file, figsize=(side + 0.8, side)) as figure:
        axes: Axes = figure.subplots()
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        if len(classes) <= 40:
            axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize="x-small")
            axes.set_yticks(range(len(classes)), classes, fontsize="x-small")
        if len(classes) <= 20:
            for (row, column), share in np.ndenumerate(shares):
                if share >= 0.5:
                    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "x-small"}
                    color = "white" if share > 60 else "black"
                    axes.text(column, row, f"{share:.0f}", color=color, **middle)
        figure.supylabel("class", fontsize="medium")
        axes.set_xlabel("predicted class")
        figure.colorbar(image, ax=axes, label="share of the class / %", fraction=0.05)


def substitutions(tables: Mapping[str, NDArray[np.float64]], letters: str, file: Path) -> None:
    """Draws tables of similarities, title -> (letters, letters), without their diagonals."""
    with picture(file, figsize=(0.6 + 4.4 * len(tables), 3.9)) as figure:
        panels = figure.subplots(1, len(tables), squeeze=False)[0]
        for axes, (title, table) in zip(panels, tables.items(), strict=True):
            shown = np.where(np.eye(len(letters), dtype=bool), np.nan, table)
            image = axes.imshow(shown, cmap="viridis")
            axes.set_xticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_yticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_title(title, fontsize="medium")
            figure.colorbar(image, ax=axes, fraction=0.05)
