"""What all pictures share: colors, how panels are laid out, and how a figure is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#777777"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, "black")

ZERO, DPI = "#D9D9D9", 150  # in heat maps: a weight of exactly 0, a mask of -inf; dots per inch


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


def _plain_numbers(axis: Axis, wide: bool) -> None:
    """0.2 in place of 2e-1 on a logarithmic axis; a wide one shows powers of ten alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


@contextmanager
def _head_panels(
    png: Path,
    heads: int,
    panel: tuple[float, float],
    margin: tuple[float, float],
    least: tuple[float, float] = (0.0, 0.0),
    rows: int | None = None,
    share_y: bool = True,
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A picture with a panel per head, titled by it; what is left of the grid stays empty.

    Args:
        png: file to write.
        heads: number of panels.
        panel: width and height of each, inches.
        margin: width and height of what is around them, inches.
        least: smallest width and height of all, inches.
        rows: rows of panels; None puts four abreast, or eight if there are many.
        share_y: whether all have the same y axis; the x axis is always shared.

    Raises:
        ValueError: if there cannot be so many rows.
    """
    if rows is not None and not 1 <= rows <= heads:
        raise ValueError(f"rows must be 1 to {heads}, the number of panels; got {rows}")
    columns = -(-heads // rows) if rows else min(heads, 4 if heads <= 16 else 8)
    shape = (-(-heads // columns) if rows is None else rows, columns)
    width, height = (
        max(margin[axis] + panel[axis] * shape[1 - axis], least[axis]) for axis in (0, 1)
    )
    with picture(png, figsize=(width, height)) as figure:
        grid = figure.subplots(*shape, sharex=True, sharey=share_y, squeeze=False)
        for axes in grid.flat[heads:]:
            axes.set_visible(False)
        for column in range(columns):  # the lowest panel that is seen carries the numbers
            lowest = (heads - 1 - column) // columns
            grid[lowest, column].tick_params(labelbottom=True)
        shown = list(grid.flat[:heads])
        for head, axes in enumerate(shown):
            axes.set_title(f"head {head}", fontsize="small")
        yield figure, shown
