"""What has come of a run so far: its best validation, and how that reads in a line."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from molflt.files import expect_readable, shown
from molflt.metrics import Metric

__all__ = ["Best", "best_of", "draw_curve", "duration", "outcome", "steps_of"]

_PREFIX = "val_"
_GONE = "restore the file, or start a new run"


class Best(NamedTuple):
    """The best validation of a run, whose weights are best.safetensors."""

    metric: str
    """its name in metrics.csv, without ``val_``"""
    value: float
    step: int


def best_of(run: Path) -> Best | None:
    """The best validation of a run, from the header of its weights; None if there was none."""
    path = Path(run) / "checkpoints" / "best.safetensors"
    header = _header(path)
    name = next((name for name in header if name.startswith(_PREFIX)), "")
    if not header:
        return None
    return Best(name.removeprefix(_PREFIX), _number(path, header, name), steps_of(run, "best"))


def draw_curve(run: Path, file: Path, metrics: Mapping[str, Metric], measure: str) -> None:
    """Draws the metrics.csv of a run, and marks the validation that chose its best weights.

    Args:
        run: its folder.
        file: to write.
        metrics: those of its task.
        measure: metric whose best value is marked without best weights.
    """
    from molflt.plots import training_curve

    chosen = None
    with contextlib.suppress(ValueError):  # damaged: told by whoever loads them
        chosen = best_of(run)
    metric, step = (measure, None) if chosen is None else (chosen.metric, chosen.step)
    training_curve(Path(run) / "metrics.csv", file, metrics, metric, step)


def steps_of(run: Path, weights: str = "last") -> int:
    """Steps that have been taken, from the header of "last" or "best" weights; 0 without them."""
    path = Path(run) / "checkpoints" / f"{weights}.safetensors"
    header = _header(path)
    return int(_number(path, header, "step")) if header else 0


def _header(path: Path) -> dict[str, str]:
    """What weights say about themselves; nothing, where there are none."""
    if not path.is_file():
        return {}
    expect_readable(path)
    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {"": ""}
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete safetensors file; {str(error)[:100]}; {_GONE}"
        ) from None


def _number(path: Path, header: Mapping[str, str], key: str) -> float:
    try:
        number = float(header[key])
        int(number)  # neither NaN nor infinite
        return number
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"{path}: expected weights whose header has the step and the metric of their "
            f"validation; got {shown(header.get(key))} for {key or 'a metric'}; {_GONE}"
        ) from None


def duration(seconds: float) -> str:
    """A time as "7 s", "4 min 12 s" or "2 h 05 min"."""
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def outcome(run: Path, metrics: Mapping[str, Metric], steps: int, seconds: float) -> str:
    """The line that a training ends with.

    Args:
        run: its folder, as it was named.
        metrics: what its task measures, by name.
        steps: taken in all.
        seconds: that this part of the training took.
    """
    best = best_of(run)
    known = (
        "no validation with finite values"
        if best is None
        else f"best validation {metrics[best.metric].shown(best.value)} at step {best.step:,}"
    )
    return (
        f"{run}: {known}; {steps:,} steps, {duration(seconds)}; next: "
        f"molflt evaluate {shlex.quote(str(run))}"
    )
