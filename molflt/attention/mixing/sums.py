"""Sums over keys before division, scaled to prevent overflow.

Shapes are (batch, heads, tokens, dim) throughout. Sums of kernelized attention are computed in at
least float32, even under autocast: `Encoding.attend` disables autocast and casts its inputs.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.features import Features
from molflt.attention.numerics import finite

NormalizeName = Literal["masked", "unmasked", "none"]


class Sums(NamedTuple):
    """Numerator and normalizer of kernelized attention, both to be multiplied by exp(log_scale)."""

    numerator: Tensor
    """sum_j A_ij v_j, (batch, heads, queries, dv)"""
    normalizer: Tensor
    """sum_j A_ij, (batch, heads, queries, 1)"""
    log_scale: Tensor
    """(batch, heads, queries, 1), or a scalar 0"""

    @classmethod
    def of(cls, sums: Tensor, log_scale: Tensor) -> "Sums":
        """Splits sums over values from `with_ones`, (batch, heads, queries, dv + 1)."""
        return cls(sums[..., :-1], sums[..., -1:], log_scale)

    def ratio(self, floor: float = 0.0, divisor: "Sums | None" = None) -> Tensor:
        """Returns sum_j A_ij v_j / sum_j A_ij, or 0 without a gradient if the divisor is exactly 0.

        Args:
            floor: lower bound on |sum_j A_ij|. Smaller sums are replaced by `floor` with the sign
                of the sum. The bound applies to the sum itself, not to the scaled `normalizer`, and
                therefore has the same effect in every form of attention.
            divisor: sums whose normalizer is used as the divisor.
        """
        numerator, normalizer, log_scale = self
        if divisor is not None:
            _, normalizer, log_scale = divisor
            numerator = numerator * (self.log_scale - log_scale).exp()
        empty = normalizer == 0
        if floor:
            # Beyond the bound on the exponent, the quotient is 0 in float32 in any case.
            least = floor * (-log_scale).clamp(max=80.0).exp()
            least = torch.copysign(least.expand_as(normalizer), normalizer)
            normalizer = torch.where(normalizer.abs() < least.abs(), least, normalizer)
        # A quotient, because the gradient of a reciprocal overflows below 1e-19.
        return (numerator / normalizer.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)

    def extensive(self, retained: float = 1.0) -> Tensor:
        """Returns sum_j A_ij v_j, divided by the fraction of retained keys; can overflow."""
        return self.numerator * self.log_scale.exp() / retained


def with_ones(value: Tensor) -> Tensor:
    """Appends a column of ones, whose sums are the normalizers: (..., dv) -> (..., dv + 1)."""
    return F.pad(value, (0, 1), value=1.0)


def _stabilize(query: Features, key: Features) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scaled phi_q and phi_k of a whole sequence, and the logarithm of the divisor."""
    # For each feature, the maximum over the valid keys of the sequence is moved to the queries.
    # Each query then subtracts its maximum over features. Both shifts cancel in the ratio of sums
    # and need no gradients. For positive features, the largest term of a normalizer is exactly 1.
    log_k, key_max = key.log_scale, None
    if log_k is not None and log_k.shape[-2]:
        key_max = finite(log_k.detach().amax(dim=-2, keepdim=True))  # -inf without a valid key
    phi_k = key.materialize() if key_max is None else key.shifted(key_max)
    phi_q, query_max = _stable_query(query, key_max)
    return phi_q, phi_k, query_max


def _stable_query(query: Features, key_max: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiplies phi_q by exp(key_max) and divides it by its largest scale for each query.

    Returns the quotient and the logarithm of the divisor, (batch, heads, queries, 1) or a scalar 0.
    """
    log_q = query.log_scale
    if key_max is not None:
        moved = key_max.expand(*key_max.shape[:2], query.tokens, -1)
        log_q = moved if log_q is None else moved + log_q
    if log_q is None:
        phi_q = query.materialize()
        return phi_q, phi_q.new_zeros(())
    query_max = log_q.detach().amax(dim=-1, keepdim=True)
    # In this order of operations, the largest exponent is exactly 0.
    return Features(query.values, log_q).shifted(query_max), query_max


def _per_token(features: Features) -> tuple[Tensor, Tensor | None]:
    """Divides features by the largest scale of each token; also returns the log of this scale.

    The log (batch, heads, tokens, 1) is None if the features do not have a scale.
    """
    if features.log_scale is None:
        return features.materialize(), None
    top = features.log_scale.detach().amax(dim=-1, keepdim=True)
    return features.shifted(finite(top)), top


def _causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Returns a causal mask (queries, keys) in which the last query attends to all keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def drop_keys(key: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    """Draws a mask (batch, heads, keys) that drops keys with probability `rate`.

    Values are not multiplied by 1 / (1 - rate), because this factor cancels in ratios.
    """
    retained = torch.rand(key.shape[:-1], device=key.device) >= rate
    return retained if mask is None else retained & mask
