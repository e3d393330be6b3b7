"""Linear attention over many tokens chunk by chunk, without features of all of them at once."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.features.base import Operand, cut
from molflt.attention.mixing.sums import Sums, _stable_query
from molflt.attention.numerics import at_least_float32, finite, recomputed

_AT_ONCE = 2**22  # numbers that a chunk of the tokens may hold at once
_LONG = 2**24  # numbers of all tokens from which they are worth cutting
_LEAST = 1024  # tokens of a chunk, also in a large batch


def chunk_size(query: Operand, key: Operand, value: Tensor, columns: int = 0) -> int:
    """Tokens per chunk; 0 where features of all tokens are few enough to be kept.

    Args:
        query: as for `linear_in_chunks`.
        key: likewise.
        value: likewise.
        columns: p, of the positional kernel; 0 without one.
    """
    if torch.compiler.is_exporting():
        return 0  # one graph of operations for all sizes
    width = max(query.feature_map.width, columns * (value.shape[-1] + 1))
    each = max(1, query.x.shape[0] * query.x.shape[1] * width)
    tokens, size = max(query.x.shape[2], key.x.shape[2]), max(_LEAST, _AT_ONCE // each)
    return size if each * tokens >= _LONG and tokens > size else 0


def linear_in_chunks(
    query: Operand,
    key: Operand,
    value: Tensor,
    size: int,
    kernel: tuple[Tensor, Tensor] | None = None,
) -> Sums:
    """`linear`, or `linear_with_kernel` without pairs, of features that are never all there.

    Features, and products of values and kernel, are computed again in backward; beyond the
    arguments only the sums are kept. Each feature of the keys carries its running maximum, which
    cancels as in `stabilize`.

    Args:
        query: (batch, heads, queries, d).
        key: (batch, heads, keys, d).
        value: (batch, heads, keys, dv).
        size: tokens per chunk.
        kernel: U (batch or 1, heads or 1, queries, p) and V (batch or 1, heads or 1, keys, p).
    """
    left, right = kernel or (None, None)
    queries, keys = query.split(size), key.split(size)
    rights = cut(right, size, len(keys))
    carried: _Carried | None = None
    for operand, v, values in zip(keys, rights, value.split(size, dim=-2), strict=True):
        added = recomputed(_absorb, operand, v, values)
        carried = added if carried is None else carried.plus(added)
    if carried is None:
        raise ValueError("linear_in_chunks needs at least one key; got none; use `linear`")
    context, log_max = carried
    if log_max is not None:
        log_max = finite(log_max)  # infinite: no valid key at all
    answers = [
        recomputed(_answer, operand, u, context, log_max)
        for operand, u in zip(queries, cut(left, size, len(queries)), strict=True)
    ]
    joined = (
        torch.cat(parts, dim=-2) if parts[0].ndim else parts[0]
        for parts in zip(*answers, strict=True)
    )
    return Sums(*joined)


class _Carried(NamedTuple):
    """sum_j phi(k_j) [v_j, 1] so far, to be multiplied by exp of the features' maxima."""

    context: Tensor
    log_max: Tensor | None
    """-inf without a key; None where features have no logarithm"""

    def plus(self, added: "_Carried") -> "_Carried":
        if self.log_max is None or added.log_max is None:
            return _Carried(self.context + added.context, None)
        peak = torch.maximum(self.log_max, added.log_max)
        before, own = (
            (x - finite(peak)).exp().transpose(-1, -2) for x in (self.log_max, added.log_max)
        )
        return _Carried(self.context * before + added.context * own, peak)


def _absorb(operand: Operand, right: Tensor | None, value: Tensor) -> _Carried:
    key = operand.features().at_least_float32()
    with torch.autocast(value.device.type, enabled=False):
        value = F.pad(at_least_float32(value), (0, 1), value=1.0)
        if right is not None:
            value = (right.to(value.dtype)[..., :, None] * value[..., None, :]).flatten(-2)
        if key.log_scale is None:
            return _Carried(key.materialize().transpose(-1, -2) @ value, None)
        own = key.log_scale.detach().amax(dim=-2, keepdim=True)
        return _Carried(key.shifted(finite(own)).transpose(-1, -2) @ value, own)


def _answer(operand: Operand, left: Tensor | None, context: Tensor, log_max: Tensor | None) -> Sums:
    """Sums of a chunk of queries over all keys."""
    query = operand.features().at_least_float32()
    with torch.autocast(context.device.type, enabled=False):
        phi_q, shift = _stable_query(query, log_max)
        mixed = phi_q @ context
        if left is not None:
            mixed = mixed.unflatten(-1, (left.shape[-1], -1))
            mixed = (left.to(mixed.dtype)[..., None, :] @ mixed).squeeze(-2)
        return Sums(mixed[..., :-1], mixed[..., -1:], shift)
