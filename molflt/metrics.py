"""What a metric is called and how it reads; the locality of attention, in float64, without torch.

Energies: Chanussot et al., OC20 (arXiv:2010.09990), section 4.1, and the leaderboard's code.
Locality: FLT (arXiv:2302.01925), section 4.1 and appendix C.2.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["EWT_THRESHOLD", "Metric", "locality"]

EWT_THRESHOLD = 0.02
"""Energies closer than this to their label count as right, eV."""

_ROW_TOLERANCE = 1e-2  # of sums of weights that were rounded to half precision


class Metric(NamedTuple):
    """How a metric reads in pictures; its name is that of the files, and ends in its unit."""

    label: str
    unit: str = ""
    scale: Literal["linear", "log"] = "linear"
    digits: int = 3
    """behind the point"""
    largest_is_best: bool = False
    measured_in: tuple[str, ...] = ("train", "val")

    @property
    def axis(self) -> str:
        """Label and unit."""
        return f"{self.label} / {self.unit}" if self.unit else self.label

    def shown(self, value: float) -> str:
        """Label, value and unit, in a line of text."""
        return " ".join(filter(None, (self.label, f"{value:.{self.digits}f}", self.unit)))


class _Locality(NamedTuple):
    """How much attention goes to near and to far tokens, (...) as in `locality`."""

    nearest: NDArray[np.float64]
    """mean over queries of the probability on their nearest tokens, 0 to 1"""
    farthest: NDArray[np.float64]
    """the same for their most distant tokens"""


def locality(
    weights: ArrayLike, distances: ArrayLike, fraction: float = 0.1, causal: bool = False
) -> _Locality:
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
    return _Locality(*((probability * share).sum(axis=-1).mean(axis=-1) for share in shares))


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
    off = np.argwhere(~(np.abs(sums - 1) <= _ROW_TOLERANCE))  # also of nan
    if len(off):
        raise ValueError(
            f"weights of each query must sum to 1; got {sums[tuple(off[0])]} for query "
            f"{off[0][-1]} ({len(off)} of {sums.size} in all); divide by the sums"
        )
    hidden = np.abs(np.where(seen, 0.0, probability)).max()
    if hidden > _ROW_TOLERANCE:
        raise ValueError(
            f"weights must be 0 on keys that a query cannot see; got {hidden}; correct causal or "
            "the infinite distances"
        )
