"""Shared parts of figures: colors, panels, labels and output files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molflt.files import atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#777777"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, "black")

ZERO = "#D9D9D9"  # color of masked values in heat maps
DPI = 150

_LONGEST = 48  # maximum number of characters in a name
FORMATS = ("png", "svg", "pdf")
_UNDATED = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}  # reproducible files
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium",
    "figure.titlesize": "medium", "figure.labelsize": "medium", "svg.hashsalt": "molflt",
    "legend.frameon": False, "legend.fontsize": "small", "grid.alpha": 0.3,
}  # fmt: skip
_further: ContextVar[tuple[tuple[str, ...], list[Path]]] = ContextVar("further", default=((), []))


@contextmanager
def further_formats(names: Collection[str]) -> Iterator[list[Path]]:
    """Inside the block, also writes each figure in each of the formats `names`.

    Yields a list to which the written files are added.
    """
    written: list[Path] = []
    token = _further.set((tuple(names), written))
    try:
        yield written
    finally:
        _further.reset(token)


@contextmanager
def picture(file: Path, **options: object) -> Iterator[Figure]:
    """Yields a figure and writes it on exit, also in the formats of `further_formats`.

    `options`, such as figsize in inches, are passed to `matplotlib.figure.Figure`.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    file = Path(file)
    names, written = _further.get()
    more = [path for name in names if (path := file.with_suffix(f".{name}")) != file]
    with rc_context(_STYLE):
        figure = Figure(**{"layout": "constrained", **options}, dpi=DPI)  # type: ignore[arg-type]
        FigureCanvasAgg(figure)
        yield figure
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)  # `savefig` would draw all artists once more for the layout
            figure.set_layout_engine("none")
        for path in (file, *more):
            kind = path.suffix.removeprefix(".")
            with atomically(path) as part:
                figure.savefig(part, dpi=DPI, format=kind, metadata=_UNDATED[kind])
    written += more


def plain(text: str) -> str:
    """Prepares a name from the data for a figure: shortens it and escapes dollar signs."""
    name = "".join(char if char.isprintable() else "?" for char in text)
    name = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    return name.replace("$", r"\$")


def plain_numbers(axis: Axis, wide: bool) -> None:
    """Labels a logarithmic axis with numbers such as 0.2, or only powers of ten if `wide`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


@contextmanager
def panels(
    file: Path,
    count: int,
    columns: int,
    size: tuple[float, float],
    margin: tuple[float, float] = (0.0, 0.0),
    least: tuple[float, float] = (0.0, 0.0),
    *,
    layout: str = "constrained",
    **options: Any,
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yields a figure with `count` panels in up to `columns` columns, row by row.

    `size` is the size of a panel, `margin` the total size of the margins, and `least` the smallest
    size of the figure, each as (width, height) in inches. `options` are passed to
    `matplotlib.figure.Figure.subplots`.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    width = max(margin[0] + size[0] * columns, least[0])
    height = max(margin[1] + size[1] * rows, least[1])
    with picture(file, figsize=(width, height), layout=layout) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, **options)
        for axes in grid.flat[count:]:
            axes.set_visible(False)
        for axes in grid.flat[count - columns : count]:  # the bottom panel of each column
            axes.tick_params(labelbottom=True)
        yield figure, list(grid.flat[:count])


def legend_outside(
    figure: Figure, axes: Axes, place: str, columns: int | None = None, **options: Any
) -> None:
    """Adds a legend of the labels in `axes` outside all panels; `place` is "lower" or "upper"."""
    handles, labels = axes.get_legend_handles_labels()
    options |= {"loc": f"outside {place} center", "ncols": columns or len(labels)}
    figure.legend(handles, labels, **options)


@contextmanager
def head_panels(
    file: Path, heads: int, *sizes: tuple[float, float], share_y: bool = True
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yields a figure with one panel per head; `sizes` are passed to `panels`."""
    columns = 4 if heads <= 16 else 8
    with panels(file, heads, columns, *sizes, sharex=True, sharey=share_y) as (figure, all_axes):
        for head, axes in enumerate(all_axes):
            axes.set_title(f"head {head}", fontsize="small")
        yield figure, all_axes
