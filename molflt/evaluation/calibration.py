"""Calibrated uncertainty of ensembles: intervals that cover 68 % of new errors.

The method is split conformal prediction (Papadopoulos et al. 2002; Lei et al., arXiv:1604.04173)
with the score |error| / sqrt(spread² + floor²). It does not assume a distribution of errors. Half
of a split is used for calibration, and all other systems for the coverage. Structures with elements
that do not occur in the training data are calibrated separately, because members often agree on
wrong energies for them.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from molflt import plots
from molflt.evaluation.ensemble import EnsembleRegressor
from molflt.evaluation.predictions import Predictions
from molflt.evaluation.results import Results, results_table
from molflt.files import read_json, shown, warn, write_atomically

LEVEL = 0.68
"""Fraction of errors that an uncertainty should cover, as one standard deviation does."""
CALIBRATION = "uncertainty.json"
"""Name of the calibration file in the folder of an evaluation."""

_LEAST = 20  # minimum number of systems; with fewer, the coverage is uncertain by more than 10 %
EVALUATE = (  # advice in messages
    "evaluate these runs with molflt evaluate RUN --also RUN2 ... and at least "
    f"{2 * _LEAST} held-out systems with labels"
)
ONE_RUN = "a single run has no spread; add other runs with --also"
_FLOORS = np.logspace(-2, 2, 33)  # floors to try, in units of the root mean square spread
_BINS = 10  # bins of the calibration error
_LEVELS = np.arange(5, 100, 5) / 100  # levels in the figure
_COLUMNS = (
    "coverage_percent", "coverage_se_percent", "coverage_crossed_percent", "uncertainty_eV",
    "spread_eV", "rank_correlation", "member_mae_eV", "coverage_n",
)  # fmt: skip

_Array = NDArray[np.float64]


class _Errors(NamedTuple):
    """Errors of systems with labels, and their spreads or uncertainties."""

    error: _Array  # |error| in eV, (systems,)
    width: _Array  # spread before calibration, uncertainty after it, in eV, (systems,)


@dataclass(frozen=True)
class Calibration:
    """Conversion of spreads to uncertainties: factor * sqrt(spread² + floor²).

    Attributes:
        factor: dimensionless factor.
        floor: in eV, added to the spread in quadrature, because members may agree by chance.
        split: name of the split that was used for calibration.
        systems: number of systems that were used for calibration.
        members: SHA-256 digests of the members' weights, sorted.
        new: calibration for structures with elements that do not occur in the training data; None
            if too few such systems with labels were evaluated.
    """

    factor: float
    floor: float
    split: str
    systems: int
    members: tuple[str, ...]
    new: "Calibration | None" = None

    @staticmethod
    def fit(error: _Array, spread: _Array, split: str, members: Sequence[str]) -> "Calibration":
        """Fits a calibration to held-out systems.

        The factor is computed by `conformal_factor`. The floor minimizes the interval score, a
        proper scoring rule for central intervals (Gneiting and Raftery 2007, eq. 43). If the spread
        does not predict the error, the floor is large and all intervals are nearly equal.

        Args:
            error: (systems,), signed errors of the ensemble's energies in eV.
            spread: (systems,), standard deviations over the members in eV.
            split: name of the split that contains the systems.
            members: SHA-256 digest of each member's weights.
        """
        if len(error) < _LEAST:
            raise ValueError(
                f"{split}: expected at least {_LEAST} labeled systems in the half for calibration; "
                f"got {len(error)}; select a larger split with --calibration-split"
            )
        scale = float(np.sqrt(np.mean(np.square(spread))))
        if scale == 0:
            raise ValueError(
                f"{split}: all members predict the same energies; expected a spread above 0; got "
                "0 eV; use different training runs"
            )
        error = np.abs(error)
        floor = min(scale * _FLOORS, key=lambda x: _interval_score(error, np.hypot(spread, x)))
        factor = conformal_factor(error / np.hypot(spread, floor))
        return Calibration(factor, float(floor), split, len(error), tuple(sorted(members)))

    def uncertainty(self, spread: _Array, new: NDArray[np.bool_] | bool = False) -> _Array:
        """Returns uncertainties in eV, with NaN for new elements if the calibration excludes them.

        `spread` contains standard deviations over the members, in eV, of shape (systems,). `new` is
        True for structures with elements that do not occur in the training data.
        """
        of_known = self.factor * np.hypot(spread, self.floor)
        of_new = np.nan if self.new is None else self.new.uncertainty(spread)
        return np.where(new, of_new, of_known)

    @property
    def label(self) -> str:
        """Formats the parameters of the calibration as text."""
        new = "" if self.new is None else f"/{self.new.label}"
        return f"{self.factor:.9g}/{self.floor:.9g}{new}"

    def save(self, path: Path) -> None:
        """Writes the calibration as JSON."""
        content = {"level": LEVEL, **asdict(self)}
        for part in filter(None, (content, content["new"])):
            part["floor_eV"] = part.pop("floor")
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())

    @staticmethod
    def read(path: Path, model: nn.Module | None = None) -> "Calibration":
        """Reads a file written by :meth:`save`; raises ValueError if it is not for `model`."""
        if model is not None and not isinstance(model, EnsembleRegressor):
            raise ValueError(f"--calibration {path}: {ONE_RUN}")
        content = read_json(path, "a calibration in JSON", EVALUATE)
        calibration = Calibration.from_json(content, str(path))
        if model is not None and calibration.members != tuple(sorted(model.weights)):
            raise ValueError(
                f"{path}: belongs to other weights, of {len(calibration.members)} members; "
                f"expected the {len(model.weights)} members of this ensemble; {EVALUATE}"
            )
        return calibration

    @staticmethod
    def from_json(content: Any, name: str) -> "Calibration":
        """Parses the content of a calibration file; `name` is its path, for error messages."""
        try:
            factor, floor = float(content["factor"]), float(content["floor_eV"])
            split, systems = str(content["split"]), int(content["systems"])
            new = content.get("new") and Calibration.from_json(content["new"], f"{name}: new")
            return Calibration(factor, floor, split, systems, tuple(content["members"]), new)
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{name}: expected a calibration; got {shown(content, 300)}; {EVALUATE}"
            ) from None


def conformal_factor(scores: _Array, level: float = LEVEL) -> float:
    """Returns a bound that the score of a new system does not exceed with probability >= `level`.

    The bound is the ceil((n + 1) level)-th smallest of n scores, because every rank of the new
    score is equally likely (Lei et al., arXiv:1604.04173, section 2.2).

    Args:
        scores: (systems,), |error| / width of the held-out systems.
        level: probability, in (0, 1) and at most n / (n + 1).
    """
    rank = math.ceil(round((len(scores) + 1) * level, 9))  # 75 * 0.68 is 51.00000000000001
    return float(np.sort(scores)[rank - 1])


def _interval_score(error: _Array, width: _Array) -> float:
    """Returns the mean interval score, in eV, of calibrated intervals; smaller is better."""
    half = conformal_factor(error / width) * width
    return float(np.mean(half + np.maximum(error - half, 0) / (1 - LEVEL)))


def is_set_aside(sid: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns a mask of half of the systems, selected by a hash of the seed 0 and their sids."""
    hashes = (hashlib.blake2b(f"0:{number}".encode(), digest_size=1) for number in sid)
    return np.array([value.digest()[0] % 2 == 0 for value in hashes], dtype=bool)


def check_calibration_split(model: nn.Module, split: str | None, splits: Sequence[str]) -> None:
    """Raises ValueError if the calibration split cannot be used."""
    if split is None:
        return
    if not isinstance(model, EnsembleRegressor):
        raise ValueError(f"--calibration-split {split}: {ONE_RUN}")
    if split not in splits:
        known = ", ".join(splits)
        raise ValueError(f"--calibration-split {split}: expected an evaluated split: {known}")


def assess(
    model: nn.Module, found: Mapping[str, Predictions], out: Path, split: str | None, learned: str
) -> tuple[Results, dict[str, dict[str, _Array]], str]:
    """Calibrates the uncertainty of an ensemble and writes uncertainty.json and uncertainty.png.

    If no split is large enough, nothing is written and only spreads are returned. For systems with
    new elements, the uncertainty is calibrated on such systems if at least 20 remain without any of
    the new elements of a system. To compute the coverage, each of these systems is evaluated with a
    calibration that is fitted to systems with different new elements.

    Args:
        model: an ensemble; other models are ignored.
        found: predictions by split.
        out: folder to write to.
        split: split to calibrate on; by default the first large enough split except `learned`.
        learned: name of the training split, whose errors are too small for calibration; "" if it
            is not evaluated.

    Returns:
        The metrics by split, the results of `uncertainty_of` by split, and a table of the metrics.
    """
    if not isinstance(model, EnsembleRegressor):
        return {}, {}, ""
    chosen = split or _split_to_calibrate_on(found, learned)
    if chosen is None:
        rows = {name: _row(part) for name, part in found.items()}
        spreads = {name: {"spread_eV": part.spread} for name, part in found.items()}
        return rows, spreads, results_table("split", rows, ("spread_eV", "member_mae_eV"))
    source = found[chosen]
    calibrating = _calibration_mask(source)
    fitted = _errors(source, source.spread, calibrating)
    calibration = Calibration.fit(*fitted, chosen, model.weights)
    calibration, widths = _with_new(calibration, found)
    widths[chosen][calibrating] = np.nan  # excludes these systems from the coverage
    masks = {name: part.labeled & np.isfinite(widths[name]) for name, part in found.items()}
    evaluated = {
        name: _errors(found[name], widths[name], mask) for name, mask in masks.items() if mask.any()
    }
    columns = {name: uncertainty_of(model, part, calibration) for name, part in found.items()}
    rows = {
        name: _row(part, columns[name]["uncertainty_eV"], evaluated.get(name))
        for name, part in found.items()
    }
    rest = _errors(source, source.spread, source.labeled & ~source.is_new & ~calibrating)
    if len(rest.error) >= _LEAST:  # each half calibrates the other
        other = Calibration.fit(*rest, chosen, model.weights)
        covered = [rest.error <= calibration.uncertainty(rest.width)]
        covered.append(fitted.error <= other.uncertainty(fitted.width))
        rows[chosen]["coverage_crossed_percent"] = 100 * float(np.concatenate(covered).mean())
    calibration.save(out / CALIBRATION)
    if evaluated:
        _draw(calibration, fitted, evaluated, out / "uncertainty.png")
    table = results_table("split", rows)
    if sum(mask.sum() for mask in masks.values()) >= _BINS * _BINS:
        is_new = np.concatenate([found[name].is_new[masks[name]] for name in evaluated])
        table += _over_all_splits([*evaluated.values()], is_new)
    return rows, columns, f"{_heading(calibration)}\n{table}"


def uncertainty_of(
    model: nn.Module, found: Predictions, calibration: Calibration | None
) -> dict[str, _Array]:
    """Returns the columns spread_eV and, with a calibration, uncertainty_eV of an ensemble.

    For other models, the result is empty. Uncertainties are NaN for new elements if the calibration
    does not include a factor for them.
    """
    if not isinstance(model, EnsembleRegressor):
        return {}
    columns = {"spread_eV": found.spread}
    if calibration is not None:
        columns["uncertainty_eV"] = calibration.uncertainty(found.spread, found.is_new)
    return columns


def _heading(calibration: Calibration) -> str:
    heading = (
        f"uncertainty: {calibration.factor:.3g} * sqrt(spread^2 + ({calibration.floor:.3g} eV)^2), "
        f"fitted to cover {100 * LEVEL:.0f} % of the errors of {calibration.systems:,} systems of "
        f"{calibration.split}, which are excluded from coverage and rank correlation"
    )
    if (new := calibration.new) is not None:
        heading += (
            f"; for elements that are not in the training data, {new.factor:.3g} * sqrt(spread^2 + "
            f"({new.floor:.3g} eV)^2), fitted to {new.systems:,} systems"
        )
    return heading


def _split_to_calibrate_on(found: Mapping[str, Predictions], learned: str) -> str | None:
    """Returns the split to calibrate on; if no split is suitable, warns and returns None."""
    counts = {
        name: int(_calibration_mask(part).sum())
        for name, part in found.items()
        if part.labeled.any() and name != learned
    }
    if chosen := next((name for name, count in counts.items() if count >= _LEAST), None):
        return chosen
    least = f"at least {_LEAST} systems with labels and without new elements"
    known = ", ".join(f"{count} in {name}" for name, count in counts.items()) or "no labels"
    known += f"; {learned}, the training split, is excluded" if learned in found else ""
    warn(
        f"the uncertainty is not calibrated, and only the spread, spread_eV, is reported: expected "
        f"{least} in the half of a split that calibrates it; got {known}; hold out more systems, "
        "or select a larger split with --calibration-split"
    )
    return None


def _errors(part: Predictions, width: _Array, mask: NDArray[np.bool_]) -> _Errors:
    return _Errors(np.abs(part.energy - part.target)[mask], width[mask])


def _calibration_mask(part: Predictions) -> NDArray[np.bool_]:
    return is_set_aside(part.sid) & part.labeled & ~part.is_new


def _with_new(
    calibration: Calibration, found: Mapping[str, Predictions]
) -> tuple[Calibration, dict[str, _Array]]:
    """Extends a calibration to new elements if possible; also returns uncertainties in eV.

    Uncertainties of systems with new elements are from calibrations without these elements.
    """
    widths = {
        name: calibration.uncertainty(part.spread, part.is_new) for name, part in found.items()
    }
    parts = [(part, part.labeled & part.is_new) for part in found.values()]
    elements = np.concatenate([part.new_elements[mask] for part, mask in parts])
    error, spread = np.hstack([_errors(part, part.spread, mask) for part, mask in parts])  # (2, n)
    others = {}  # masks of systems without the new elements of a system, such as "Cu-Pd"
    for text in set(elements.tolist()):
        excluded = set(text.split("-"))
        others[text] = np.array([excluded.isdisjoint(each.split("-")) for each in elements])
    smallest = min((mask.sum() for mask in others.values()), default=0)
    if smallest < _LEAST or not all(spread[mask].any() for mask in others.values()):
        return calibration, widths

    def extended(mask: NDArray[np.bool_]) -> "Calibration":
        new = Calibration.fit(error[mask], spread[mask], calibration.split, calibration.members)
        return replace(calibration, new=new)

    for text, mask in others.items():
        calibrated = extended(mask)
        for name, part in found.items():
            same = part.new_elements == text
            widths[name][same] = calibrated.uncertainty(part.spread[same], True)
    return extended(np.full(len(error), True)), widths


def _row(
    part: Predictions, uncertainty: _Array | None = None, evaluated: _Errors | None = None
) -> dict[str, float | None]:
    """Returns the metrics of a split; metrics that require missing labels are None."""
    from scipy.stats import spearmanr

    row: dict[str, float | None] = dict.fromkeys(_COLUMNS)
    row["spread_eV"] = float(part.spread.mean())
    if part.labeled.any():
        errors = part.members - part.target[:, None]
        row["member_mae_eV"] = float(np.abs(errors[part.labeled]).mean())
    if uncertainty is not None and np.isfinite(uncertainty).any():
        row["uncertainty_eV"] = float(np.nanmean(uncertainty))
    if evaluated is not None:
        error, width = evaluated
        n = len(error)
        row["coverage_percent"] = 100 * float((error <= width).mean())
        # The nominal level is used because the estimate would be 0 at a coverage of 0 or 100 %.
        row["coverage_se_percent"] = 100 * float(np.sqrt(LEVEL * (1 - LEVEL) / n))
        row["coverage_n"] = n
        if np.ptp(width) > 0 and np.ptp(error) > 0:
            row["rank_correlation"] = float(spearmanr(width, error).statistic)
    return row


def _over_all_splits(evaluated: Sequence[_Errors], is_new: NDArray[np.bool_]) -> str:
    """Describes how uncertainties agree with the errors and indicate new elements.

    The expected normalized calibration error is that of Levi et al. (arXiv:1905.11659, eq. 8).
    """
    from scipy.stats import mannwhitneyu

    error = np.concatenate([each.error for each in evaluated])
    width = np.concatenate([each.width for each in evaluated])
    bins = np.array_split(np.argsort(width), _BINS)
    expected, found = np.sqrt([[np.mean(x[i] ** 2) for i in bins] for x in (width, error)])
    text = (
        f"\nover all splits: expected normalized calibration error "
        f"{np.mean(np.abs(expected - found) / expected):.2f}, as a standard deviation"
    )
    known, new = width[~is_new], width[is_new]
    if len(known) and len(new):
        # the asymptotic method only avoids the slow exact p-value, which is not used
        area = mannwhitneyu(new, known, method="asymptotic").statistic / len(known) / len(new)
        text += f"; larger for new elements, with an area under the ROC curve of {area:.2f}"
    return text


def _draw(
    calibration: Calibration, fitted: _Errors, evaluated: dict[str, _Errors], png: Path
) -> None:
    scores = fitted.error / calibration.uncertainty(fitted.width)
    factors = np.array([conformal_factor(scores, level) for level in _LEVELS])
    coverage = {
        split: (_LEVELS, (error[:, None] <= width[:, None] * factors).mean(axis=0))
        for split, (error, width) in evaluated.items()
    }
    points = {split: (width, error) for split, (error, width) in evaluated.items()}
    plots.calibration(coverage, points, LEVEL, png)
