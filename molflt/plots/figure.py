"""What all pictures share: colors, how panels are laid out, and how a figure is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#777777"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, "black")

ZERO = "#D9D9D9"  # in heat maps: a weight of exactly 0, a mask of -inf

DPI = 150


@contextmanager
def picture(png: Path, **options: object) -> Iterator[Figure]:
    """A figure that is written to `png` at the end.

    Args:
        png: file to write; folders above it are made.
        options: of `matplotlib.figure.Figure`, such as figsize in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **options)  # type: ignore[arg-type]
    FigureCanvasAgg(figure)
    yield figure
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    Path(png).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=DPI, format="png")


def grid_shape(panels: int, rows: int | None = None) -> tuple[int, int]:
    """Rows and columns that hold so many panels, four abreast, or eight if there are many."""
    if rows is not None:
        if not 1 <= rows <= panels:
            raise ValueError(f"rows must be 1 to {panels}, the number of panels; got {rows}")
        return rows, -(-panels // rows)
    columns = min(panels, 4 if panels <= 16 else 8)
    return -(-panels // columns), columns


def panels(figure: Figure, count: int, shape: tuple[int, int], share_y: bool) -> list[Axes]:
    """As many axes as there are heads, titled by them; what is left of the grid stays empty.

    Args:
        figure: where to put them.
        count: number of panels.
        shape: rows and columns, from `grid_shape`.
        share_y: whether all have the same y axis; the x axis is always shared.
    """
    grid = figure.subplots(*shape, sharex=True, sharey=share_y, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for column in range(shape[1]):  # the lowest panel that is seen carries the numbers
        lowest = (count - 1 - column) // shape[1]
        grid[lowest, column].tick_params(labelbottom=True)
    shown = list(grid.flat[:count])
    for head, axes in enumerate(shown):
        axes.set_title(f"head {head}", fontsize="small")
    return shown


def as_array(values: Any) -> NDArray[np.float64]:
    """In float64, of an array or a tensor of any device and precision."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
