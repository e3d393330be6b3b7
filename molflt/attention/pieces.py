"""Linear attention over many tokens piece by piece, without features of all of them at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.encoding import Encoding
from molflt.attention.feature_maps import FeatureMap
from molflt.attention.mixing import Features, Sums, at_least_float32, stable_query
from molflt.attention.parts import Part, Projected
from molflt.attention.recompute import recomputed

PIECE = 2**22  # numbers that a piece of the tokens may hold at once
LONG = 2**24  # numbers of all tokens from which they are worth cutting
LEAST = 1024  # tokens of a piece, also in a large batch


def features_of(
    feature_map: FeatureMap | None, x: Tensor, factors: Part | None, mask: Tensor | None = None
) -> Features:
    """phi of [factors, x], or of [0, x] without factors in a map that was made for them.

    Args:
        feature_map: phi.
        x: scaled queries or keys, (batch, heads, n, d); features are in float32 at least.
        factors: N1 or N2, (batch or 1, heads or 1, n, 2r), or random projections of them.
        mask: broadcastable to (batch, heads, n), False where features are 0.
    """
    assert feature_map is not None
    with torch.autocast(x.device.type, enabled=False):
        x = at_least_float32(x)
        parts: tuple[Part, ...] = (x,)
        if isinstance(factors, Projected):
            parts = factors, x
        elif missing := feature_map.dim - x.shape[-1]:
            factors = x.new_zeros(1, 1, 1, missing) if factors is None else factors
            parts = factors.to(x.dtype).expand(*x.shape[:-1], -1), x
        features: Features = feature_map(*parts)
        return features.masked(mask)


def piece_size(
    feature_map: FeatureMap | None, query: Tensor, key: Tensor, value: Tensor, encoding: Encoding
) -> int:
    """Tokens per piece; 0 where features of all tokens are few enough to be kept.

    Arguments as for `linear_in_pieces`.
    """
    assert feature_map is not None
    kernel = encoding.kernel
    columns = 0 if kernel is None else kernel[1].shape[-1] * (value.shape[-1] + 1)
    each = query.shape[0] * query.shape[1] * max(feature_map.width, columns)
    tokens, size = max(query.shape[2], key.shape[2]), max(LEAST, PIECE // each)
    return size if each * tokens >= LONG and tokens > size else 0


def linear_in_pieces(
    feature_map: FeatureMap | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    encoding: Encoding,
    mask: Tensor | None,
    size: int,
) -> Sums:
    """`mixing.linear`, or `linear_with_kernel` without pairs, of features that are never all there.

    Features, and products of values and kernel, are computed again in backward; beyond the
    arguments only the sums are kept. Each feature of the keys carries its running maximum, which
    cancels as in `mixing.stabilize`.

    Args:
        feature_map: phi.
        query: scaled, (batch, heads, queries, d).
        key: scaled, (batch, heads, keys, d).
        value: (batch, heads, keys, dv).
        encoding: of which factors and kernel are used.
        mask: broadcastable to (batch, heads, keys), True where a key exists.
        size: tokens per piece.
    """
    phi = partial(features_of, feature_map)
    queries, keys = zip((query, key), encoding.factors or (None, None), strict=True)
    left, right = encoding.kernel or (None, None)
    masks = None if mask is None else mask[..., None]
    context, log_max = None, None
    for piece in zip(*(_cut(x, size, key) for x in (*keys, masks, right, value)), strict=True):
        added, own = recomputed(_absorb, phi, *piece)
        if context is None or log_max is None:
            context, log_max = added if context is None else context + added, own
            continue
        peak = torch.maximum(log_max, own)
        finite = peak.where(peak.isfinite(), 0.0)
        scales = ((x - finite).exp().transpose(-1, -2) for x in (log_max, own))
        context, log_max = sum(x * y for x, y in zip((context, added), scales, strict=True)), peak
    if log_max is not None:
        log_max = log_max.where(log_max.isfinite(), 0.0)  # no valid key at all
    answers = [
        recomputed(_answer, phi, *piece, context, log_max)
        for piece in zip(*(_cut(x, size, query) for x in (*queries, left)), strict=True)
    ]
    joined = (
        torch.cat(parts, dim=-2) if parts[0].ndim else parts[0]
        for parts in zip(*answers, strict=True)
    )
    return Sums(*joined)


def _cut(x: Part | None, size: int, like: Tensor) -> tuple[Any, ...]:
    """Pieces by `split`: the gradient of slices would be a whole tensor for each."""
    if x is None:
        return (None,) * len(like.split(size, dim=-2))
    if isinstance(x, Projected):
        return tuple(map(Projected, *(part.split(size, dim=-2) for part in x)))
    return x.split(size, dim=-2)


def _absorb(
    phi: Callable[..., Features],
    x: Tensor,
    factors: Part | None,
    mask: Tensor | None,
    right: Tensor | None,
    value: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """sum_j phi(k_j) [v_j, 1] of a piece over exp(its maxima), and these: -inf without a key."""
    key = phi(x, factors, None if mask is None else mask[..., 0]).full()
    with torch.autocast(value.device.type, enabled=False):
        value = F.pad(at_least_float32(value), (0, 1), value=1.0)
        if right is not None:
            value = (at_least_float32(right)[..., :, None] * value[..., None, :]).flatten(-2)
        if key.log_scale is None:
            return key.materialize().transpose(-1, -2) @ value, None
        own = key.log_scale.detach().amax(dim=-2, keepdim=True)
        return key.shifted(own.where(own.isfinite(), 0.0)).transpose(-1, -2) @ value, own


def _answer(
    phi: Callable[..., Features],
    x: Tensor,
    factors: Part | None,
    left: Tensor | None,
    context: Tensor,
    log_max: Tensor | None,
) -> Sums:
    """Sums of a piece of queries over all keys."""
    query = phi(x, factors, None).full()
    with torch.autocast(x.device.type, enabled=False):
        phi_q, shift = stable_query(query, log_max)
        mixed = phi_q @ context
        if left is not None:
            mixed = mixed.unflatten(-1, (left.shape[-1], -1))
            mixed = (at_least_float32(left)[..., None, :] @ mixed).squeeze(-2)
        return Sums(mixed[..., :-1], mixed[..., -1:], shift)
