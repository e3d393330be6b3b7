"""Figures for language models and image classifiers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.plots.figure import SERIES, panels

__all__ = ["confusion", "image_sheet", "losses_by_place", "substitutions"]

_BINS = 24
_ROWS, _COLUMNS = 4, 8


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


def image_sheet(
    images: Sequence[NDArray[np.uint8]], captions: Sequence[str], file: Path, title: str
) -> None:
    """Draws up to 32 images of shape (channels, height, width) with captions."""
    count = max(1, min(_ROWS * _COLUMNS, len(images)))
    size, margin, least = (1.3, 1.65), (0.0, 0.5), (1.3 * _COLUMNS, 0.0)
    with panels(file, count, _COLUMNS, size, margin, least) as (figure, shown):
        for axes, image, caption in zip(shown, images, captions, strict=False):
            axes.axis("off")
            axes.imshow(image.transpose(1, 2, 0), cmap="gray")  # cmap applies to single channels
            axes.set_title(caption, fontsize="x-small")
        figure.suptitle(title)


def confusion(counts: ArrayLike, classes: Sequence[str], file: Path) -> None:
    """Draws a confusion matrix: the share of each predicted class among images of each class.

    `counts` contains numbers of images, with one row per true class and one column per predicted
    class.
    """
    matrix = np.asarray(counts, dtype=float)
    shares = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = 2.2 + 0.42 * min(len(classes), 20)
    with panels(file, 1, 1, (side + 0.8, side)) as (figure, (axes,)):
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        if len(classes) <= 40:
            axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize="x-small")
            axes.set_yticks(range(len(classes)), classes, fontsize="x-small")
        if len(classes) <= 20:
            for (row, column), share in np.ndenumerate(shares):
                color = "white" if share > 60 else "black"
                number = f"{share:.0f}" if share >= 0.5 else ""
                place = axes.text(column, row, number, color=color, fontsize="x-small")
                place.set(ha="center", va="center")
        axes.set(xlabel="predicted class", ylabel="true class")
        figure.colorbar(image, ax=axes, label="share of the class / %", fraction=0.05)


def substitutions(tables: Mapping[str, NDArray[np.float64]], letters: str, file: Path) -> None:
    """Draws similarity tables (letters, letters), keyed by title, without their diagonals."""
    count = len(tables)
    with panels(file, count, count, (4.4, 3.9), (0.6, 0.0)) as (figure, shown):
        for axes, (title, table) in zip(shown, tables.items(), strict=True):
            image = axes.imshow(np.where(np.eye(len(letters)), np.nan, table), cmap="viridis")
            axes.set_xticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_yticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_title(title)
            figure.colorbar(image, ax=axes, fraction=0.05)
