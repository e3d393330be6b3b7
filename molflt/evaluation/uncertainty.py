"""The uncertainty of an ensemble: calibrated on half of a split, judged on all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from molflt import plots
from molflt.evaluation.calibration import (
    AGAIN,
    LEAST,
    LEVEL,
    Calibration,
    conformal_factor,
    is_set_aside,
)
from molflt.evaluation.ensemble import EnsembleRegressor
from molflt.evaluation.predictions import Predictions
from molflt.evaluation.report import _warn, align

__all__ = ["CALIBRATION", "calibration_of", "expect_theirs", "uncertainty_of"]

CALIBRATION = "uncertainty.json"
"""Name of the file with the calibration, in the folder of an evaluation."""

_ALONE = "one run has no spread and so no uncertainty; name further runs with --also"
_LEVELS = np.arange(5, 100, 5) / 100  # of the picture
_SHOWN = (  # metric, title of its column, digits
    ("coverage_percent", "coverage / %", 1),
    ("coverage_se_percent", "standard error / %", 1),
    ("coverage_crossed_percent", "halves crossed / %", 1),
    ("uncertainty_eV", "uncertainty / eV", 4),
    ("spread_eV", "spread / eV", 4),
    ("rank_correlation", "rank correlation", 2),
    ("member_mae_eV", "MAE of one member / eV", 4),
)

_Array = NDArray[np.float64]
_Rows = dict[str, dict[str, float | None]]


class _Judged(NamedTuple):
    """Systems that the uncertainty is judged on: they have a label, and did not calibrate it."""

    error: _Array
    """|error|, (systems,), eV"""
    spread: _Array
    """(systems,), eV"""


class _Uncertainty(NamedTuple):
    """What is known of it."""

    rows: _Rows
    """split -> metrics"""
    text: str
    """table"""
    columns: dict[str, dict[str, _Array]]
    """split -> spread_eV and, if calibrated, uncertainty_eV, each (systems,)"""
    files: list[Path]


def _check_asked(model: nn.Module, split: str | None, splits: Sequence[str]) -> None:
    """Raises ValueError if an uncertainty is asked for that there cannot be."""
    if split is None:
        return
    if not isinstance(model, EnsembleRegressor):
        raise ValueError(f"--calibration_split {split}: {_ALONE}")
    if split not in splits:
        raise ValueError(
            f"--calibration_split {split}: expected one of the evaluated splits, "
            f"{', '.join(splits)}"
        )


def _assess(
    model: nn.Module, found: Mapping[str, Predictions], out: Path, split: str | None, learned: str
) -> _Uncertainty:
    """Calibrates the uncertainty of an ensemble, and writes uncertainty.json and uncertainty.png.

    Args:
        model: nothing is done for one that is no ensemble.
        found: split -> predictions.
        out: folder to write.
        split: half of which calibrates; by default the first one with labels but `learned`. Without
            any, and if that half has less than 20 of them, there is only the spread.
        learned: the split of the training, whose errors are too small.
    """
    if not isinstance(model, EnsembleRegressor):
        return _Uncertainty({}, "", {}, [])
    labeled = [name for name, part in found.items() if part.labeled.any() and name != learned]
    columns = {name: {"spread_eV": part.spread} for name, part in found.items()}
    if split is None and not labeled:
        why = f" beside those of {learned}, which was learned" if learned in found else ""
        _warn(f"no labels to calibrate the uncertainty with{why}; there is only the spread")
        return _Uncertainty({name: _row(part) for name, part in found.items()}, "", columns, [])
    named, split = split, split or labeled[0]
    part = found[split]
    aside = is_set_aside(part.sid) & part.labeled
    if named is None and aside.sum() < LEAST:
        _warn(
            f"{split}: {aside.sum()} systems with labels in the half that calibrates the "
            f"uncertainty, expected at least {LEAST}; there is only the spread, spread_eV; hold "
            "out more, or name a larger split with --calibration_split"
        )
        return _Uncertainty({name: _row(part) for name, part in found.items()}, "", columns, [])
    error, spread = np.abs(part.energy - part.target), part.spread
    calibration = Calibration.fit(error[aside], spread[aside], split, model.weights)
    judged = {}
    for name, part in found.items():
        columns[name]["uncertainty_eV"] = calibration.uncertainty(part.spread)
        rest = part.labeled & ~aside if name == split else part.labeled
        judged[name] = _Judged(np.abs(part.energy - part.target)[rest], part.spread[rest])
    rows = {name: _row(part, judged[name], calibration) for name, part in found.items()}
    rows[split]["coverage_crossed_percent"] = _crossed(
        calibration, _Judged(error[aside], spread[aside]), judged[split]
    )
    files = [out / CALIBRATION]
    calibration.save(files[0])
    known = {name: one for name, one in judged.items() if len(one.error)}
    if known:
        files.append(out / "uncertainty.png")
        _draw(calibration, _Judged(error[aside], spread[aside]), known, files[-1])
    return _Uncertainty(rows, _table(calibration, rows), columns, files)


def _row(
    part: Predictions, judged: _Judged | None = None, calibration: Calibration | None = None
) -> dict[str, float | None]:
    """Metrics of a split; None where there are no labels to tell."""
    row: dict[str, float | None] = dict.fromkeys([*(key for key, _, _ in _SHOWN), "coverage_n"])
    row["spread_eV"] = float(part.spread.mean())
    if part.labeled.any():
        off = part.by_training - part.target[:, None]
        row["member_mae_eV"] = float(np.abs(off[part.labeled]).mean())
    if calibration is None:
        return row
    row["uncertainty_eV"] = float(calibration.uncertainty(part.spread).mean())
    if judged is not None and len(judged.error) > 0:
        n = len(judged.error)
        inside = judged.error <= calibration.uncertainty(judged.spread)
        row["coverage_percent"] = 100 * float(inside.mean())
        # of the level, not of what was found, whose own is 0 where all or none is inside
        row["coverage_se_percent"] = 100 * float(np.sqrt(LEVEL * (1 - LEVEL) / n))
        row["coverage_n"] = n
        row["rank_correlation"] = _rank_correlation(judged)
    return row


def _crossed(calibration: Calibration, aside: _Judged, rest: _Judged) -> float | None:
    """Coverage, %, where each half calibrates for the other; None if the other is too small.

    The halves' chances cancel: where one has the larger errors, it holds too much of the other one,
    and the other too little of it.
    """
    if len(rest.error) < LEAST:
        return None
    other = Calibration.fit(rest.error, rest.spread, calibration.split, calibration.members)
    held = [rest.error <= calibration.uncertainty(rest.spread)]
    held.append(aside.error <= other.uncertainty(aside.spread))
    return 100 * float(np.concatenate(held).mean())


def _rank_correlation(judged: _Judged) -> float | None:
    """Spearman's, of spread and |error|; None if one of them does not vary."""
    from scipy.stats import spearmanr

    if np.ptp(judged.spread) == 0 or np.ptp(judged.error) == 0:
        return None
    return float(spearmanr(judged.spread, judged.error).statistic)


def _draw(calibration: Calibration, aside: _Judged, judged: dict[str, _Judged], png: Path) -> None:
    scores = aside.error / np.hypot(aside.spread, calibration.floor)
    factors = np.array([conformal_factor(scores, level) for level in _LEVELS])
    coverage, errors = {}, {}
    for split, one in judged.items():
        own = one.error / np.hypot(one.spread, calibration.floor)
        coverage[split] = (_LEVELS, (own[:, None] <= factors).mean(axis=0))
        errors[split] = (calibration.uncertainty(one.spread), one.error)
    plots.calibration(coverage, errors, LEVEL, png)


def _table(calibration: Calibration, rows: _Rows) -> str:
    """How much of each split the uncertainty holds, in plain text."""
    lines = [["split", "systems", *(title for _, title, _ in _SHOWN)]]
    for split, row in rows.items():
        values = [(row[key], digits) for key, _, digits in _SHOWN]
        cells = ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]
        lines.append([split, f"{row['coverage_n'] or 0:,}", *cells])
    heading = (
        f"uncertainty: {calibration.factor:.3g} * sqrt(spread^2 + ({calibration.floor:.3g} eV)^2) "
        f"holds {100 * LEVEL:.0f} % of the errors of {calibration.systems:,} systems of "
        f"{calibration.split}, which do not count here"
    )
    return f"{heading}\n{align(lines)}"


def calibration_of(model: nn.Module, calibration: Path | None, default: Path) -> Calibration | None:
    """The calibration of an ensemble; None for a model that is none.

    Args:
        model: the ensemble.
        calibration: file that an evaluation of the same runs wrote.
        default: taken without one, if it is there and of these runs; otherwise there is only the
            spread, which is said, and no calibration.

    Raises:
        FileNotFoundError: if the calibration is missing.
        ValueError: if it is damaged or that of other runs, or the model is no ensemble.
    """
    if not isinstance(model, EnsembleRegressor):
        if calibration is not None:
            raise ValueError(f"--calibration {calibration}: {_ALONE}")
        return None
    path = calibration or default
    try:
        return expect_theirs(model, Calibration.read(path), str(path))
    except (FileNotFoundError, _OfOthers) as error:
        if calibration is not None:
            raise
        _warn(f"{error}; until then there is only the spread, spread_eV")
        return None


def expect_theirs(model: EnsembleRegressor, calibration: Calibration, name: str) -> Calibration:
    """A calibration, if it is of the weights of an ensemble.

    Args:
        model: the ensemble.
        calibration: of any weights.
        name: of the calibration, for messages.

    Raises:
        ValueError: if it is of others.
    """
    if calibration.members != tuple(sorted(model.weights)):
        raise _OfOthers(
            f"{name}: the calibration of {len(calibration.members)} other weights than these "
            f"{len(model.weights)}; {AGAIN}"
        )
    return calibration


def uncertainty_of(
    model: nn.Module, found: Predictions, calibration: Calibration | None
) -> dict[str, _Array]:
    """Columns that an ensemble adds to its energies: spread_eV and, calibrated, uncertainty_eV.

    Args:
        model: nothing is added for one that is no ensemble.
        found: its predictions.
        calibration: of its weights, if there is one.

    Returns:
        (systems,) each, eV.
    """
    if not isinstance(model, EnsembleRegressor):
        return {}
    columns = {"spread_eV": found.spread}
    if calibration is not None:
        columns["uncertainty_eV"] = calibration.uncertainty(found.spread)
    return columns


class _OfOthers(ValueError):
    """A calibration of other weights."""
