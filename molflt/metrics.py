"""OC20's energy metrics, in float64 and without torch.

Definitions: Chanussot et al., OC20 (arXiv:2010.09990), section 4.1, and the leaderboard's code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["EWT_THRESHOLD", "energy_mae", "energy_mse", "energy_within_threshold"]

EWT_THRESHOLD = 0.02
"""Energies closer than this to their label count as right, eV."""


def energy_mae(energy: ArrayLike, target: ArrayLike) -> float:
    """Mean absolute error.

    Args:
        energy: predicted energies, eV, of any shape.
        target: labels, eV, of the same shape.

    Returns:
        Mean of |energy - target|, eV.

    Raises:
        ValueError: if the shapes differ, a number is not finite, or there is none.
    """
    return float(np.abs(_error(energy, target)).mean())


def energy_mse(energy: ArrayLike, target: ArrayLike) -> float:
    """Mean squared error; arguments and errors as in :func:`energy_mae`.

    Returns:
        Mean of (energy - target)^2, eV^2.
    """
    return float(np.square(_error(energy, target)).mean())


def energy_within_threshold(energy: ArrayLike, target: ArrayLike) -> float:
    """EwT: share of energies that are right; arguments and errors as in :func:`energy_mae`.

    Returns:
        Share, 0 to 1, of systems with |energy - target| strictly below 0.02 eV.
    """
    return float((np.abs(_error(energy, target)) < EWT_THRESHOLD).mean())


def _error(energy: ArrayLike, target: ArrayLike) -> NDArray[np.float64]:
    """energy - target in float64, eV, after the checks that broadcasting would let slip."""
    predicted = np.asarray(energy, dtype=np.float64)
    wanted = np.asarray(target, dtype=np.float64)
    if predicted.shape != wanted.shape:
        # (N, 1) against (N,) would broadcast to (N, N) and give a number that means nothing
        raise ValueError(
            f"energy and target must have the same shape; got {predicted.shape} and "
            f"{wanted.shape}; flatten both to (systems,)"
        )
    if predicted.size == 0:
        raise ValueError("energy and target must hold at least one system; got none")
    for name, values in (("energy", predicted), ("target", wanted)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise ValueError(
                f"{name} must be finite, in eV; got {values.flat[bad[0]]} at index {bad[0]} "
                f"({len(bad)} of {values.size} in all); leave such systems out"
            )
    return predicted - wanted
