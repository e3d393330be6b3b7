"""Names and formats of metrics, and the locality of attention, computed without torch.

Energies: Chanussot et al., OC20 (arXiv:2010.09990), section 4.1, and the leaderboard's code.
Locality: FLT (arXiv:2302.01925), section 4.1 and appendix C.2.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["EWT_THRESHOLD", "Metric", "locality"]

EWT_THRESHOLD = 0.02
"""Largest error of an energy that counts as correct, eV."""

_ROW_TOLERANCE = 1e-2  # for sums of weights in half precision


class Metric(NamedTuple):
    """Label and format of a metric in pictures; its name in files ends with its unit."""

    label: str
    unit: str = ""
    scale: Literal["linear", "log"] = "linear"
    digits: int = 3
    """number of decimals"""
    largest_is_best: bool = False
    measured_in: tuple[str, ...] = ("train", "val")

    @property
    def axis(self) -> str:
        """Label with the unit."""
        return f"{self.label} / {self.unit}" if self.unit else self.label

    def shown(self, value: float) -> str:
        """Returns label, value and unit as text."""
        return " ".join(filter(None, (self.label, f"{value:.{self.digits}f}", self.unit)))


class _Locality(NamedTuple):
    """Attention probabilities of near and of far tokens, (...) as in `locality`."""

    nearest: NDArray[np.float64]
    """mean over queries of the probability on their nearest tokens, 0 to 1"""
    farthest: NDArray[np.float64]
    """mean over queries of the probability on their most distant tokens, 0 to 1"""


def locality(
    weights: ArrayLike, distances: ArrayLike, fraction: float = 0.1, causal: bool = False
) -> _Locality:
    """Computes the attention probability of the tokens nearest to and farthest from each query.

    FLT (arXiv:2302.01925), appendix C.2, reports 0.279 and 0.068 for 10 % of the tokens, averaged
    over the heads of a language model. Uniform attention gives exactly `fraction` for both, for any
    number of keys, because tokens at equal distances and the token at the edge of the 10 % count
    partially. The query's own token counts as one of the nearest.

    Args:
        weights: attention probabilities (..., queries, keys), such as (heads, queries, keys) of
            `Attention.weights`. The sum over keys is 1; signed features allow negative weights.
        distances: distances between query and key, (queries, keys) or a shape that broadcasts to
            the shape of `weights`, in any unit; infinite for masked keys, such as padding.
        fraction: share of the unmasked keys of a query, above 0 and at most 1.
        causal: also mask the keys after each query; the last query sees all keys.

    Returns:
        Mean over queries, (...), such as one number per head.
    """
    probability = np.asarray(weights, dtype=np.float64)
    distance = np.array(distances, dtype=np.float64)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1; got {fraction}")
    _check_shapes(probability, distance)
    if np.isnan(distance).any() or (distance < 0).any():
        raise ValueError("distances must be at least 0, or inf for masked keys; got less, or nan")
    queries, keys = distance.shape[-2:]
    if causal:
        future = np.arange(keys) > np.arange(queries)[:, None] + keys - queries
        distance[..., future] = np.inf
    _check_rows(probability, distance)
    shares = _shares(distance, fraction)
    return _Locality(*((probability * share).sum(axis=-1).mean(axis=-1) for share in shares))


def _shares(distance: NDArray[np.float64], fraction: float) -> list[NDArray[np.float64]]:
    """Returns the fraction of each key that counts among the nearest and the farthest, 0 to 1."""
    order = np.argsort(distance, axis=-1)
    ordered = np.take_along_axis(distance, order, axis=-1)
    keys = distance.shape[-1]
    seen = np.isfinite(distance).sum(axis=-1, keepdims=True)
    wanted = fraction * seen
    new = np.ones(distance.shape, dtype=bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    place = np.arange(keys)
    # Keys at equal distance are at begin, ..., end - 1 when sorted; each gets the same share.
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
    both = zip(probability.shape[::-1], distance.shape[::-1], strict=False)
    if not fits or distance.ndim > probability.ndim or any(d not in (1, p) for p, d in both):
        raise ValueError(
            "expected non-empty weights (..., queries, keys) and distances (queries, keys) that "
            f"broadcast to them; got {probability.shape} and {distance.shape}"
        )


def _check_rows(probability: NDArray[np.float64], distance: NDArray[np.float64]) -> None:
    """Raises ValueError unless the weights of each query are probabilities of unmasked keys."""
    seen = np.isfinite(distance)
    if not seen.any(axis=-1).all():
        row = np.argwhere(~seen.any(axis=-1))[0][-1]
        raise ValueError(f"each query must see at least one key; got none for query {row}")
    sums = probability.sum(axis=-1)
    off = np.argwhere(~(np.abs(sums - 1) <= _ROW_TOLERANCE))  # also true of nan
    if len(off):
        raise ValueError(
            f"weights of each query must sum to 1; got {sums[tuple(off[0])]} for query "
            f"{off[0][-1]} ({len(off)} of {sums.size})"
        )
    hidden = np.abs(np.where(seen, 0.0, probability)).max()
    if hidden > _ROW_TOLERANCE:
        raise ValueError(
            f"weights must be 0 on masked keys; got {hidden}; correct causal or the distances"
        )
