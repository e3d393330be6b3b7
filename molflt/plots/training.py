"""Figures of training curves, comparisons of runs and optimizers, and losses of texts."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from molflt.files import csv_rows
from molflt.metrics import Metric
from molflt.plots.figure import BLUE, GREEN, SERIES, VERMILION, legend_outside, plain, plain_numbers
from molflt.plots.figure import panels as panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ("-", "--", ":", "-.")
_LEAST = 1e-30  # smallest loss on a logarithmic axis
_BINS = 24  # of positions in a block

_PREFIXES = {"val": ("validation", VERMILION), "lr": ("", GREEN), "train": ("training", BLUE)}
_Array = NDArray[np.float64]
_Band = tuple[_Array, _Array, _Array, _Array]  # x, y, low, high


def training_curve(
    metrics_csv: Path,
    file: Path,
    metrics: Mapping[str, Metric],
    best: tuple[str, int] | None = None,
) -> None:
    """Plots the loss, the metrics and the learning rate against the step.

    Args:
        metrics_csv: metrics.csv of a run, with the column `step` and any of `train_loss`, `lr`, and
            metrics with the prefix `train_` or `val_`; cells may be empty.
        metrics: metrics of the task; each metric in the file is drawn in its own panel.
        best: metric whose best validation value is marked, and the step of this value.
    """
    columns = read_columns(Path(metrics_csv))
    known = {"train_loss": Metric("loss", scale="log"), **metrics, "lr": Metric("learning rate")}
    panels = {}
    for name in known:
        lines = [name] if name in ("train_loss", "lr") else [f"train_{name}", f"val_{name}"]
        if lines := [line for line in lines if np.isfinite(columns.get(line, [])).any()]:
            panels[name] = lines
    if not panels:
        raise ValueError(f"{metrics_csv}: nothing to plot; expected train_loss, lr or metrics")
    sizes = (7.0, 1.9), (0.0, 0.6)
    with panels_of(file, len(panels), 1, *sizes, sharex=True) as (figure, all_axes):
        for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
            metric = known[name]
            for line in lines:
                label, color = _PREFIXES[line.partition("_")[0]]
                label += " only" if label and len(lines) == 1 else ""
                _curve(axes, columns, line, color=color, label=label)
                if best is not None and line == f"val_{best[0]}":
                    _star(axes, columns, line, metric, best[1])
            if name != "lr":
                axes.legend()
            if metric.scale == "log":
                _log_if_wide(axes)
            elif axes.dataLim.ymin >= 0:  # logarithms and correlations may be negative
                axes.set_ylim(bottom=0.0)
            axes.set_ylabel(metric.axis)
            axes.grid()
        all_axes[-1].set_xlabel("step")
        figure.align_ylabels()


def read_columns(path: Path) -> dict[str, _Array]:
    """Reads columns of metrics.csv, without an incomplete last row; empty cells become NaN."""
    try:
        rows = csv_rows(path.read_text(encoding="utf-8").rpartition("\n")[0])
        names = rows[0] if rows else ()
        return {name: np.array([float(row[name] or "nan") for row in rows]) for name in names}
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: expected CSV with numbers; {error}; remove this row") from None


def _star(axes: Axes, columns: dict[str, _Array], name: str, metric: Metric, step: int) -> None:
    at = np.flatnonzero((columns["step"] == step) & np.isfinite(columns[name]))
    if len(at):
        value = columns[name][at[-1]]
        text = f"best: {value:.{metric.digits}f} {metric.unit}".rstrip() + f" at step {step}"
        axes.plot(step, value, "*", color=VERMILION, markersize=11, label=text)


def _curve(axes: Axes, columns: Mapping[str, _Array], name: str, **options: Any) -> None:
    """Plots the values of a column against the step, with markers if there are few."""
    known = np.isfinite(columns[name])
    marker = "o" if known.sum() < 40 else ""
    step, value = columns["step"][known], columns[name][known]
    axes.plot(step, value, marker=marker, markersize=3, **options)


def _log_if_wide(axes: Axes) -> None:
    low, high = axes.dataLim.intervaly
    if low > 0 and high / low >= 6:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis, wide=bool(high / low >= 60))


def overlaid_curves(
    runs: Mapping[str, Mapping[str, _Array]], metrics: Mapping[str, Metric], file: Path
) -> bool:
    """Plots columns of several metrics.csv files against the step, with one panel per metric.

    `runs` contains the columns of each run, including `step`; empty cells are NaN. Metrics without
    values are omitted. Returns False, without a file, if all metrics are.
    """
    panels = [
        name
        for name in metrics
        if any(np.isfinite(columns.get(name, [])).any() for columns in runs.values())
    ]
    if not panels:
        return False
    sizes = (7.0, 2.4), (0.0, 0.8 + 0.1 * len(runs))
    with panels_of(file, len(panels), 1, *sizes, sharex=True) as (figure, all_axes):
        last = max(float(np.nanmax(columns["step"], initial=1.0)) for columns in runs.values())
        for axes, name in zip(all_axes, panels, strict=True):
            styles = itertools.cycle(itertools.product(_STYLES, SERIES))
            for (run, columns), (style, color) in zip(runs.items(), styles, strict=False):
                if name in columns:
                    _curve(axes, columns, name, color=color, ls=style, lw=1.4, label=plain(run))
            if metrics[name].scale == "log":
                _log_if_wide(axes)
            axes.set_xlim(0, 1.02 * last)
            best = "higher" if metrics[name].largest_is_best else "lower"
            axes.set_ylabel(f"{metrics[name].axis}\n({best} is better)")
            axes.grid()
        all_axes[-1].set_xlabel("step")
        all_axes[0].set_title(f"n = {len(runs)} runs")
        figure.align_ylabels()
        lines = {str(line.get_label()): line for axes in all_axes for line in axes.lines}
        options: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(runs), 3)}
        figure.legend([*lines.values()], [*lines], **options)
    return True


def losses_by_place(losses: Mapping[str, NDArray[np.float64]], file: Path) -> None:
    """Plots the mean loss against the position in a block, which is the length of the context.

    `losses` contains the losses of the tokens of each text, in nats, as an array (blocks, length);
    missing tokens are NaN.
    """
    with panels_of(file, 1, 1, (6.0, 3.4)) as (_, (axes,)):
        for (name, loss), color in zip(losses.items(), itertools.cycle(SERIES), strict=False):
            edges = np.unique(np.geomspace(1, loss.shape[1] + 1, _BINS).astype(int))
            parts = np.split(loss, edges[1:-1] - 1, axis=1)  # a short text leaves the last empty
            means = [np.nansum(x) / ((~np.isnan(x)).sum() or np.nan) for x in parts]
            centers = np.sqrt(edges[:-1] * (edges[1:] - 1.0))
            axes.plot(centers, means, marker="o", markersize=3, color=color, label=name)
        axes.set(xscale="log", xlabel="position / tokens", ylabel="loss / nats per token")
        axes.grid()
        axes.legend()


def loss_curves(tasks: Mapping[str, Mapping[str, _Array]], file: Path, steps: int) -> None:
    """Plots losses against the step: the geometric mean and the range over repeats.

    `tasks` contains, for each task and optimizer, nonnegative losses (repeats, n) at n evenly
    spaced steps up to `steps`. Steps at which the loss of a repeat is infinite are omitted.
    """

    def band(losses: _Array) -> _Band:
        at = (np.arange(losses.shape[1]) + 0.5) * steps / losses.shape[1]
        shown = np.where(np.isfinite(losses), np.maximum(losses, _LEAST), np.nan)
        middle = np.exp(np.log(shown).mean(axis=0))
        return at, middle, shown.min(axis=0), shown.max(axis=0)

    _bands(file, tasks, band, "step", "loss", "log")


def best_values(
    panels: Mapping[str, Mapping[str, _Array]], evaluations: _Array, file: Path, runs: int
) -> None:
    """Plots the mean of log10 of the best value, with a band of ± one standard deviation.

    `panels` contains, for each function and optimizer, log10 of the best values (runs, points).
    `evaluations` (points,) contains the number of evaluations at each point.
    """

    def band(values: _Array) -> _Band:
        mean, width = values.mean(axis=0), values.std(axis=0, ddof=min(1, len(values) - 1))
        return evaluations, mean, mean - width, mean + width

    label = "log10 of the best value\n(lower is better)"
    title = f"mean ± standard deviation, n = {runs} runs"
    _bands(file, panels, band, "evaluations", label, "linear", title)


def _bands(
    file: Path,
    panels: Mapping[str, Mapping[str, _Array]],
    band: Callable[[_Array], _Band],
    x_label: str,
    y_label: str,
    scale: Literal["linear", "log"],
    title: str | None = None,
) -> None:
    names = list(dict.fromkeys(name for optimizers in panels.values() for name in optimizers))
    with panels_of(file, len(panels), 3, (3.1, 2.6), (1.0, 0.8)) as (figure, all_axes):
        for axes, (task, optimizers) in zip(all_axes, panels.items(), strict=True):
            for name, values in optimizers.items():
                x, y, low, high = band(values)
                color = SERIES[names.index(name) % len(SERIES)]
                axes.plot(x, y, color=color, linewidth=1.4, label=plain(name))
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
            axes.set(xlabel=x_label, ylabel=y_label, yscale=scale)
            axes.set_title(plain(task.replace("_", " ")))
            axes.grid()
        legend_outside(figure, all_axes[0], "lower", min(len(names), 5), title=title)
