"""OC20's energy metrics and the locality of attention, in float64 and without torch.

Energies: Chanussot et al., OC20 (arXiv:2010.09990), section 4.1, and the leaderboard's code.
Locality: FLT (arXiv:2302.01925), section 4.1 and appendix C.2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "EWT_THRESHOLD",
    "Locality",
    "energy_mae",
    "energy_mse",
    "energy_within_threshold",
    "locality",
]

EWT_THRESHOLD = 0.02
"""Energies closer than this to their label count as right, eV."""

ROW_TOLERANCE = 1e-2  # of sums of weights that were rounded to half precision


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


class Locality(NamedTuple):
    """How much attention goes to near and to far tokens, (...) as in `locality`."""

    nearest: NDArray[np.float64]
    """mean over queries of the probability on their nearest tokens, 0 to 1"""
    farthest: NDArray[np.float64]
    """the same for their most distant tokens"""


def locality(
    weights: ArrayLike, distances: ArrayLike, fraction: float = 0.1, causal: bool = False
) -> Locality:
    """Attention probability on the nearest and on the most distant tokens of each query.

    FLT (arXiv:2302.01925), appendix C.2, has 0.279 and 0.068 for 10 % of the tokens, averaged over
    heads, of a language model. Uniform attention has exactly `fraction` of both, however many keys
    a query sees: tokens at the same distance, and the one at the edge of the 10 %, count in part.
    The token itself counts among the nearest.

    Args:
        weights: attention probabilities (..., queries, keys), such as (heads, queries, keys), as
            from `Attention.weights`. Each query's sum to 1; signed features make some negative.
        distances: between query and key, (queries, keys) or a shape that broadcasts to that of the
            weights, in any unit; infinite for keys that a query cannot see, such as padding.
        fraction: share of the keys that a query sees, 0 to 1.
        causal: whether a query sees only keys up to its own place, and the last sees all keys.

    Returns:
        Mean over queries, (...), such as one number per head.

    Raises:
        ValueError: shapes that do not fit, weights that are no probabilities or that lie on keys
            out of sight, a query that sees nothing, distances below 0 or not a number.
    """
    probability = np.asarray(weights, dtype=np.float64)
    distance = np.array(distances, dtype=np.float64)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1; got {fraction}; 0.1 is 10 %")
    _check_shapes(probability, distance)
    if np.isnan(distance).any() or (distance < 0).any():
        raise ValueError("distances must be at least 0, inf out of sight; got one below or nan")
    queries, keys = distance.shape[-2:]
    if causal:
        future = np.arange(keys) > np.arange(queries)[:, None] + keys - queries
        distance[..., future] = np.inf
    _check_rows(probability, distance)
    shares = _shares(distance, fraction)
    return Locality(*((probability * share).sum(axis=-1).mean(axis=-1) for share in shares))


def _shares(distance: NDArray[np.float64], fraction: float) -> list[NDArray[np.float64]]:
    """How much of each key, 0 to 1, is among the nearest and among the farthest, per query."""
    order = np.argsort(distance, axis=-1)
    ordered = np.take_along_axis(distance, order, axis=-1)
    keys = distance.shape[-1]
    seen = np.isfinite(distance).sum(axis=-1, keepdims=True)
    wanted = fraction * seen
    new = np.ones(distance.shape, dtype=bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    place = np.arange(keys)
    # Tied keys stand at begin, begin + 1, ..., end - 1 in the order; each gets the same share.
    begin = np.maximum.accumulate(np.where(new, place, 0), axis=-1)
    last = np.ones(distance.shape, dtype=bool)
    last[..., :-1] = new[..., 1:]
    end = np.where(last, place + 1, keys)
    end = np.minimum.accumulate(end[..., ::-1], axis=-1)[..., ::-1]
    shares = []
    for before in (begin, seen - end):
        share = np.clip((wanted - before) / (end - begin), 0.0, 1.0)
        back = np.empty_like(distance)
        np.put_along_axis(back, order, np.where(np.isfinite(ordered), share, 0.0), axis=-1)
        shares.append(back)
    return shares


def _check_shapes(probability: NDArray[np.float64], distance: NDArray[np.float64]) -> None:
    fits = probability.ndim >= 2 and probability.size and distance.ndim >= 2
    fits = fits and probability.shape[-2:] == distance.shape[-2:]
    try:
        fits = fits and np.broadcast_shapes(probability.shape, distance.shape) == probability.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "expected weights (..., queries, keys), none of them 0, and distances (queries, keys) "
            f"that broadcast to them; got {probability.shape} and {distance.shape}; reshape them"
        )


def _check_rows(probability: NDArray[np.float64], distance: NDArray[np.float64]) -> None:
    """Each query sees something, and has probabilities that lie on what it sees."""
    seen = np.isfinite(distance)
    if not seen.any(axis=-1).all():
        row = np.argwhere(~seen.any(axis=-1))[0][-1]
        raise ValueError(f"each query must see at least one key; query {row} sees none; cut it off")
    sums = probability.sum(axis=-1)
    off = np.argwhere(~(np.abs(sums - 1) <= ROW_TOLERANCE))  # also of nan
    if len(off):
        raise ValueError(
            f"weights of each query must sum to 1; got {sums[tuple(off[0])]} for query "
            f"{off[0][-1]} ({len(off)} of {sums.size} in all); divide by the sums"
        )
    hidden = np.abs(np.where(seen, 0.0, probability)).max()
    if hidden > ROW_TOLERANCE:
        raise ValueError(
            f"weights must be 0 on keys that a query cannot see; got {hidden}; correct causal or "
            "the infinite distances"
        )
