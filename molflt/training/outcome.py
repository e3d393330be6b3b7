"""Result of a run so far: its best validation, steps, curve and final message."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from molflt.files import read_header, shown
from molflt.metrics import Metric

__all__ = ["Best", "best_of", "draw_curve", "duration", "outcome", "steps_of"]


class Best(NamedTuple):
    """The best validation of a run, whose weights are in best.safetensors."""

    metric: str
    """name in metrics.csv without ``val_``"""
    value: float
    step: int


def best_of(run: Path) -> Best | None:
    """Reads the best validation of a run from its weights; None if there was no validation."""
    path = Path(run) / "checkpoints" / "best.safetensors"
    if not path.is_file():
        return None
    name = next((name for name in read_header(path) if name.startswith("val_")), "val_")
    return Best(name.removeprefix("val_"), _number(path, name), steps_of(run, "best"))


def steps_of(run: Path, weights: str = "last") -> int:
    """Reads the number of steps from the header of "last" or "best" weights; 0 if missing."""
    path = Path(run) / "checkpoints" / f"{weights}.safetensors"
    return int(_number(path, "step")) if path.is_file() else 0


def _number(path: Path, key: str) -> float:
    """Reads a finite number from the header of weights."""
    header = read_header(path)
    try:
        number = float(header[key])
        int(number)  # raises for NaN and infinity
        return number
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"{path}: expected weights with {key} in their header; got {shown(header.get(key))}; "
            "restore the file, or start a new run"
        ) from None


def draw_curve(run: Path, file: Path, metrics: Mapping[str, Metric], measure: str) -> None:
    """Plots metrics.csv of a run, and marks the validation of its best weights.

    Args:
        run: folder of the run.
        file: file to write.
        metrics: metrics of the task.
        measure: metric whose best value is marked if there are no best weights.
    """
    from molflt.plots import training_curve

    chosen = None
    with contextlib.suppress(ValueError):  # reported when these weights are loaded
        chosen = best_of(run)
    metric, step = (measure, None) if chosen is None else (chosen.metric, chosen.step)
    training_curve(Path(run) / "metrics.csv", file, metrics, metric, step)


def duration(seconds: float) -> str:
    """Formats a time as "7 s", "4 min 12 s" or "2 h 05 min"."""
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def outcome(run: Path, metrics: Mapping[str, Metric], steps: int, seconds: float) -> str:
    """Returns the final message of a training run that took `steps` steps and `seconds`."""
    best = best_of(run)
    known = "no validation with finite values"
    if best is not None:
        value = metrics[best.metric].shown(best.value)
        known = f"best validation {value} at step {best.step:,}"
    return (
        f"{run}: {known}; {steps:,} steps, {duration(seconds)}; next: "
        f"molflt evaluate {shlex.quote(str(run))}"
    )
