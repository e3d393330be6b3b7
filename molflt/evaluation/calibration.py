"""From the spread of an ensemble to an uncertainty: intervals that hold 68 % of new errors.

Split conformal prediction (Papadopoulos et al. 2002; Lei et al., arXiv:1604.04173) with the score
|error| / sqrt(spread² + floor²): a quantile of the scores of systems that were set aside. It asks
for no distribution of errors, where scaling the variance by likelihood asks for a normal one, and
it is what was found calibrated for neural force fields (Hu et al., arXiv:2208.08337).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.files import shown, write_atomically

__all__ = ["AGAIN", "LEAST", "LEVEL", "Calibration", "conformal_factor", "is_set_aside"]

LEVEL = 0.68
"""Share of errors that an uncertainty is to hold, about that within one standard deviation."""
LEAST = 20
"""Systems that calibrate; fewer leave the coverage uncertain by more than 10 %."""
AGAIN = (
    "evaluate these runs with molflt evaluate RUN --also RUN2 ... and at least "
    f"{2 * LEAST} held-out systems with labels"
)
"""What to do about a calibration that cannot be used."""

_SEED = 0  # of the half that calibrates
_FLOORS = np.logspace(-2, 2, 33)  # in root mean squares of the spread: from none to it alone
_MOST_BYTES, _MOST = 100_000, 1e15

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """What turns spreads into uncertainties: factor * sqrt(spread² + floor²).

    Attributes:
        factor: without unit.
        floor: eV; members that agree by chance are not certain.
        split: where the systems are from that were set aside for it.
        systems: their number.
        members: sha256 of the weights of each member, sorted.
    """

    factor: float
    floor: float
    split: str
    systems: int
    members: tuple[str, ...]

    @staticmethod
    def fit(error: _Array, spread: _Array, split: str, members: tuple[str, ...]) -> Calibration:
        """Calibrates on systems that are set aside.

        The factor is the conformal one. The floor is that of the intervals with the least interval
        score, the proper score of a central interval (Gneiting and Raftery 2007, eq. 43): large
        where the spread says nothing about the error, and the intervals then are all alike.

        Args:
            error: of the ensemble's energies, (systems,), eV; the sign does not matter.
            spread: of the members, (systems,), eV.
            split: where they are from.
            members: sha256 of the weights of each.

        Raises:
            ValueError: if there are fewer than 20 systems, or the members agree in all of them.
        """
        if len(error) < LEAST:
            raise ValueError(
                f"{split}: expected at least {LEAST} systems with labels to calibrate the "
                f"uncertainty, half of the split; got {len(error)}; name a larger one with "
                "--calibration_split"
            )
        scale = float(np.sqrt(np.mean(np.square(spread))))
        if scale == 0:
            raise ValueError(
                f"{split}: all members predict the same energies; expected a spread; got 0 eV; "
                "name different trainings"
            )
        error = np.abs(error)
        best = min(
            (_interval_score(error, np.hypot(spread, floor)), floor) for floor in scale * _FLOORS
        )
        floor = float(best[1])
        factor = conformal_factor(error / np.hypot(spread, floor))
        return Calibration(factor, floor, split, len(error), tuple(sorted(members)))

    def uncertainty(self, spread: _Array) -> _Array:
        """eV, of spreads in eV."""
        return self.factor * np.hypot(spread, self.floor)

    def save(self, path: Path) -> None:
        """Writes it as JSON.

        Raises:
            OSError: naming the file that cannot be written.
        """
        write_atomically(path, (json.dumps(self.to_json(), indent=2) + "\n").encode())

    def to_json(self) -> dict[str, object]:
        """As plain numbers and names."""
        return {
            "level": LEVEL,
            "factor": self.factor,
            "floor_eV": self.floor,
            "split": self.split,
            "systems": self.systems,
            "members": list(self.members),
        }

    @staticmethod
    def read(path: Path) -> Calibration:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: naming file and key that is wrong.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such calibration; {AGAIN}")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path}: expected a calibration; got {path.stat().st_size:,} bytes")
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            raise ValueError(f"{path}: expected a calibration in JSON; {AGAIN}") from None
        return Calibration.from_json(content, str(path))

    @staticmethod
    def from_json(content: object, name: str) -> Calibration:
        """Reads what :meth:`to_json` gave.

        Args:
            content: of the file.
            name: of the file, for messages.

        Raises:
            ValueError: naming file and key that is wrong.
        """
        if not isinstance(content, dict):
            raise ValueError(f"{name}: expected a calibration; got {shown(content)}; {AGAIN}")
        if content.get("level") != LEVEL:
            raise _wrong(name, content, "level", str(LEVEL))
        split, members = content.get("split"), content.get("members")
        if not isinstance(split, str):
            raise _wrong(name, content, "split", "a name")
        if not isinstance(members, list) or not all(isinstance(one, str) for one in members):
            raise _wrong(name, content, "members", "a sha256 for each member")
        factor, floor, systems = (
            _positive(name, content, key) for key in ("factor", "floor_eV", "systems")
        )
        return Calibration(factor, floor, split, int(systems), tuple(members))


def _positive(name: str, content: dict[str, object], key: str) -> float:
    value = content.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST:
        return float(value)
    raise _wrong(name, content, key, "a number above 0")


def _wrong(name: str, content: dict[str, object], key: str, expected: str) -> ValueError:
    got = shown(content[key]) if key in content else "no such key"
    return ValueError(f"{name}: key {key}: expected {expected}; got {got}; {AGAIN}")


def conformal_factor(scores: _Array, level: float = LEVEL) -> float:
    """The score that a new system's stays below with at least the given probability.

    It is the ceil((n + 1) level)-th smallest of n: the new one is as likely in any place among
    them (Lei et al., arXiv:1604.04173, section 2.2).

    Args:
        scores: |error| / width of systems that were set aside, (systems,).
        level: in (0, 1), and so that there is such a score.
    """
    rank = math.ceil((len(scores) + 1) * level)
    return float(np.sort(scores)[rank - 1])


def _interval_score(error: _Array, width: _Array) -> float:
    """Mean over systems of the interval score of calibrated intervals, eV; small is good."""
    half = conformal_factor(error / width) * width
    return float(np.mean(half + np.maximum(error - half, 0) / (1 - LEVEL)))


def is_set_aside(sid: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which half of the systems calibrates: by a hash of the sid, whatever else is in the split."""
    digests = (hashlib.blake2b(f"{_SEED}:{one}".encode(), digest_size=1) for one in sid.tolist())
    return np.array([digest.digest()[0] % 2 == 0 for digest in digests], dtype=bool)
