"""Linear attention over many tokens in chunks, without storing the features of all tokens."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.features.base import Operand, split_or_repeat
from molflt.attention.mixing.sums import Sums, _stable_query, with_ones
from molflt.attention.numerics import at_least_float32, decided, finite, recomputed

_AT_ONCE = 2**22  # maximum number of elements in a chunk of tokens
_LONG = 2**24  # chunks are used if all tokens together need this many elements
_LEAST = 1024  # minimum number of tokens per chunk


def chunk_size(query: Operand, key: Operand, value: Tensor, columns: int = 0) -> int:
    """Returns the number of tokens per chunk, or 0 if all tokens are processed at once.

    `columns` is the number of columns p of the kernel, if any.
    """
    graphs, heads, queries, _ = query.x.shape
    keys = key.x.shape[2]
    widths = query.feature_map.width, columns * (value.shape[-1] + 1)
    sizes = (width * n * graphs * heads for width in widths for n in (queries, keys))
    if all(decided(size < _LONG, otherwise=True) for size in sizes):
        return 0
    size = max(_LEAST, _AT_ONCE // max(1, graphs * heads * max(widths)))
    return size if max(queries, keys) > size else 0


def linear_in_chunks(
    query: Operand,
    key: Operand,
    value: Tensor,
    size: int,
    kernel: tuple[Tensor, Tensor] | None = None,
) -> Sums:
    """Computes `linear`, or `linear_with_kernel` without pairs, in chunks of `size` tokens.

    Features and products of values and kernel are recomputed in the backward pass.
    """
    left, right = (None, None) if kernel is None else kernel
    queries, keys, values = query.split(size), key.split(size), value.split(size, dim=-2)
    rights = split_or_repeat(right, size, len(keys))
    total = functools.reduce(
        KeySums.plus,
        (recomputed(key_sums, *part) for part in zip(keys, values, rights, strict=True)),
    )
    lefts = split_or_repeat(left, size, len(queries))
    chunks = [recomputed(query_sums, q, total, u) for q, u in zip(queries, lefts, strict=True)]
    numerators, normalizers, log_scales = zip(*chunks, strict=True)
    scalar = log_scales[0].ndim == 0  # without logarithms, every chunk has the log scale 0
    log_scale = log_scales[0] if scalar else torch.cat(log_scales, dim=-2)
    return Sums(torch.cat(numerators, dim=-2), torch.cat(normalizers, dim=-2), log_scale)


class KeySums(NamedTuple):
    """Sums over the keys of linear attention: sum_j phi(k_j) [v_j, 1] = context exp(log_max).

    log_max is the maximum over keys of the logarithm of each feature. It cancels in ratios.
    """

    context: Tensor  # (batch, heads, m, dv + 1); (dv + 1) p columns with a positional kernel
    # (b, h, 1, m or 1), -inf if all keys are masked; None if features have no logs, or without keys
    log_max: Tensor | None

    def plus(self, added: "KeySums") -> "KeySums":
        """Returns the sums over the keys of both `self` and `added`."""
        if self.log_max is None or added.log_max is None:
            return KeySums(self.context + added.context, None)
        log_max = torch.maximum(self.log_max, added.log_max)
        scale = (self.log_max - finite(log_max)).exp().mT
        added_scale = (added.log_max - finite(log_max)).exp().mT
        return KeySums(self.context * scale + added.context * added_scale, log_max)


def key_sums(key: Operand, value: Tensor, right: Tensor | None = None) -> KeySums:
    """Computes sums over keys; `value` is (batch, heads, keys, dv) and `right` is the factor V."""
    phi = key.features()
    with torch.autocast(value.device.type, enabled=False):
        value = with_ones(at_least_float32(value))
        if right is not None:
            value = (right.to(value.dtype)[..., :, None] * value[..., None, :]).flatten(-2)
        if phi.log_scale is None or not phi.tokens:
            return KeySums(phi.materialize().mT @ value, None)
        log_max = phi.log_scale.detach().amax(dim=-2, keepdim=True)
        return KeySums(phi.shifted(finite(log_max)).mT @ value, log_max)


def query_sums(query: Operand, keys: KeySums, left: Tensor | None = None) -> Sums:
    """Computes sums for each query from sums over keys; `left` is the factor U of the kernel."""
    with torch.autocast(keys.context.device.type, enabled=False):
        log_max = None if keys.log_max is None else finite(keys.log_max)  # infinite if masked
        phi_q, shift = _stable_query(query.features(), log_max)
        mixed = phi_q @ keys.context
        if left is not None:
            mixed = mixed.unflatten(-1, (left.shape[-1], -1))
            mixed = (left.to(mixed.dtype)[..., None, :] @ mixed).squeeze(-2)
        return Sums.of(mixed, shift)
