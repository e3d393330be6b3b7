"""Labels and formats of metrics, and the locality of attention.

The threshold for energies is defined in OC20 (arXiv:2010.09990), section 4.1. This module does not
import torch.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

EWT_THRESHOLD = 0.02
"""error, in eV, below which an energy counts as correct"""

_ROW_TOLERANCE = 1e-2  # for sums of weights in half precision


class Metric(NamedTuple):
    """Label and format of a metric in figures; its column name in files ends with the unit."""

    label: str
    unit: str = ""
    scale: Literal["linear", "log"] = "linear"
    digits: int = 3
    """number of decimal places"""
    largest_is_best: bool = False
    measured_in: tuple[str, ...] = ("train", "val")

    @property
    def axis(self) -> str:
        """Returns the label with the unit."""
        return f"{self.label} / {self.unit}" if self.unit else self.label

    def shown(self, value: float) -> str:
        """Returns the label, the value and the unit as text."""
        return " ".join(filter(None, (self.label, f"{value:.{self.digits}f}", self.unit)))


class _Locality(NamedTuple):
    """Attention probabilities, averaged over queries."""

    nearest: NDArray[np.float64]  # of the tokens nearest to a query
    farthest: NDArray[np.float64]  # of the tokens farthest from a query


def locality(
    weights: ArrayLike, distances: ArrayLike, fraction: float = 0.1, causal: bool = False
) -> _Locality:
    """Computes the attention probability of the tokens nearest to and farthest from each query.

    FLT (arXiv:2302.01925), section 5.1 and appendix C.2, reports 0.279 and 0.068 for 10 % of the
    tokens, averaged over the heads of a language model. Uniform attention gives exactly `fraction`
    for both, because keys at the boundary of the fraction count partially, and keys at equal
    distances count equally. The query's own token counts as one of the nearest.

    Args:
        weights: attention probabilities (..., queries, keys), such as the result of
            `Attention.weights`. Each row sums to 1; signed features allow negative weights.
        distances: distances between queries and keys, (queries, keys) or a shape that broadcasts to
            the shape of `weights`, in any unit; infinite for masked keys, such as padding.
        fraction: fraction of the unmasked keys that count as nearest, and as farthest, in (0, 1].
        causal: also mask the keys after each query; the last query attends to all keys.

    Returns:
        The means over the queries, of shape (...).
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1]; got {fraction}")
    probability = np.asarray(weights, dtype=np.float64)
    distance = np.asarray(distances, dtype=np.float64)
    queries, keys = probability.shape[-2:]
    distance = np.broadcast_to(distance, (*distance.shape[:-2], queries, keys)).copy()
    if causal:
        future = np.arange(keys) > np.arange(queries)[:, None] + keys - queries
        distance[..., future] = np.inf
    sums = np.where(np.isfinite(distance), probability, 0.0).sum(axis=-1)
    off = np.argwhere(~(np.abs(sums - 1) <= _ROW_TOLERANCE))  # includes nan
    if len(off):
        raise ValueError(
            "the weights of each query must sum to 1 over the unmasked keys; got "
            f"{sums[tuple(off[0])]} for query {off[0][-1]} ({len(off)} of {sums.size}); check "
            "causal and the distances"
        )
    shares = np.apply_along_axis(_shares, -1, distance, fraction)  # [..., query, 2, key]
    means = (probability[..., None, :] * shares).sum(axis=-1).mean(axis=-2)
    return _Locality(*np.moveaxis(means, -1, 0))


def _shares(distance: NDArray[np.float64], fraction: float) -> NDArray[np.float64]:
    """Returns the weights in [0, 1] with which keys count as near and as far: (2, keys)."""
    ordered, seen = np.sort(distance), np.isfinite(distance).sum()
    # Keys at equal distances occupy the ranks from begin to end - 1.
    begin, end = (np.searchsorted(ordered, distance, side) for side in ("left", "right"))
    counted = (fraction * seen - np.stack((begin, seen - end))) / (end - begin)
    return np.where(np.isfinite(distance), counted.clip(0.0, 1.0), 0.0)
