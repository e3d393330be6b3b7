"""Softmax attention, and kernelized attention computed from its matrix or in linear time.

Shapes are (batch, heads, tokens, dim) throughout. Other linear-time forms are in `toeplitz`,
`mesh` and `causal`.
"""

import functools
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from molflt.attention.checks import in_transform
from molflt.attention.features import Features
from molflt.attention.features.base import Operand, split_or_repeat
from molflt.attention.mixing.pairs import _TRANSIENT, Pairs, SortedPairs, _pair_sums
from molflt.attention.mixing.sums import (
    Sums,
    _causal_mask,
    _per_token,
    _stabilize,
    _stable_query,
    with_ones,
)
from molflt.attention.numerics import at_least_float32, decided, finite, recomputed

_AT_ONCE = 2**22  # maximum number of elements in a chunk of tokens
_LONG = 2**24  # chunks are used if all tokens together need this many elements
_LEAST = 1024  # minimum number of tokens per chunk
_COMPILED = 8  # columns per chunk in compiled code


def softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Computes softmax attention with an additive mask in O(N^2) (FLT, arXiv:2302.01925, eq. 1).

    Args:
        query: (batch, heads, queries, d), scaled; products of queries and keys are the logits.
        key: (batch, heads, keys, d), scaled.
        value: (batch, heads, keys, dv).
        bias: f(r_i - r_j), broadcastable to (batch, heads, queries, keys).
        key_mask: broadcastable to (batch, heads, keys), True where a key exists. The result
            is 0 for queries without keys.
        dropout: probability of dropping an attention weight.
        causal: each query attends to keys up to its position, and the last query to all keys.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if keys == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    valid = None if key_mask is None else key_mask[..., None, :]
    if causal and (valid is not None or bias is not None or queries != keys):
        past = _causal_mask(queries, keys, query.device)
        valid = past if valid is None else valid & past
        causal = False
    mask = bias
    if valid is not None:
        mask = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias
        mask = mask.masked_fill(~valid, -torch.inf)
    if mask is not None:
        mask = mask.to(query.dtype).expand(*query.shape[:-1], keys)
    # Fused kernels support neither vmap with a learned mask nor forward derivatives.
    transformed = not torch.compiler.is_compiling() and in_transform()
    with sdpa_kernel(SDPBackend.MATH) if transformed else nullcontext():
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=1.0
        )
    if valid is not None:
        out = out.masked_fill(~valid.any(dim=-1, keepdim=True), 0.0)
    return out


def joined_bias(
    bias: Tensor | None, log_weight: Tensor | None, query: Tensor, key: Tensor
) -> Tensor | None:
    """Returns the term that softmax adds to its logits: the bias plus the log weights of keys."""
    sizes = query.shape[-2], key.shape[-2]
    if bias is not None and bias.shape[-2:] != sizes:
        raise ValueError(
            f"the encoding must have {sizes[0]} queries and {sizes[1]} keys; got "
            f"{tuple(bias.shape[-2:])}; in decoding, pass the key_positions of all tokens so far"
        )
    if log_weight is None:
        return bias
    log_weight = log_weight[:, :, None]
    return log_weight if bias is None else log_weight + bias


def quadratic(
    query: Features,
    key: Features,
    value: Tensor,
    causal: bool = False,
    kernel: Tensor | None = None,
    log_kernel: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Sums:
    """Computes kernelized attention in O(N^2), as a reference for all linear-time forms.

    A_ij = phi(q_i) . phi(k_j) kernel_ij exp(log_kernel_ij) prod_(j < l <= i) exp(log_decay_l)

    Args:
        query: (batch, heads, queries, m).
        key: (batch, heads, keys, m), zero for excluded keys.
        value: (batch, heads, keys, dv).
        causal: each query attends to keys up to its position, and the last query to all keys.
        kernel: positional kernel, broadcastable to (batch, heads, queries, keys).
        log_kernel: logarithm of a positive kernel, with the same shape.
        log_decay: (batch, heads, keys), at most 0; requires `causal` and as many queries as keys.
    """
    logs = [] if log_kernel is None else [log_kernel.to(value.dtype)]
    if log_decay is not None:
        total = log_decay.cumsum(dim=-1)
        logs.append(total[..., :, None] - total[..., None, :])
    if causal:
        # Later keys must not scale a query. Each token is therefore scaled by itself, and each
        # row by its largest visible entry.
        phi_q, top = _per_token(query.bounded())
        phi_k, key_log = _per_token(key.bounded())
        shift = phi_q.new_zeros(()) if top is None else finite(top)
        past = _causal_mask(query.tokens, key.tokens, value.device)
        logs.append(torch.zeros_like(past, dtype=phi_q.dtype).masked_fill(~past, -torch.inf))
        if key_log is not None:
            logs.append(key_log.mT)
    else:
        phi_q, phi_k, shift = _stabilize(query, key)
    weights = phi_q @ phi_k.mT
    if kernel is not None:
        weights = weights * kernel.to(weights.dtype)
    if logs and key.tokens:
        log_scale = functools.reduce(torch.add, logs)
        row_max = finite(log_scale.detach().amax(dim=-1, keepdim=True))
        weights = weights * (log_scale - row_max).exp()
        shift = shift + row_max
    normalizer = weights.sum(dim=-1, keepdim=True)
    return Sums(weights @ value, normalizer, shift.expand_as(normalizer))


def linear(query: Features, key: Features, value: Tensor) -> Sums:
    """Computes phi(Q) (phi(K)^T V) and phi(Q) (phi(K)^T 1) in O(N m dv); see `quadratic`."""
    phi_q, phi_k, shift = _stabilize(query, key)
    context = phi_k.mT @ value  # [b, h, m, dv]
    total = phi_k.sum(dim=-2).unsqueeze(-1)  # [b, h, m, 1]
    return Sums(phi_q @ context, phi_q @ total, shift)


def linear_with_kernel(
    query: Features,
    key: Features,
    value: Tensor,
    kernel: tuple[Tensor, Tensor],
    pairs: Pairs | SortedPairs | None = None,
) -> Sums:
    """Computes sums with A_ij = (U_i . V_j + w_ij) phi(q_i) . phi(k_j) in linear time.

    With few columns, the outer sum runs over the columns of U and V, sum_s U_is phi(q_i) . [sum_j
    V_js v_j phi(k_j)]. With many columns, it runs over the features, sum_a phi_a(q_i) U_i . [sum_j
    V_j phi_a(k_j) v_j]. Chunks of this sum are recomputed in the backward pass.

    Args:
        query, key, value: see `quadratic`.
        kernel: U (batch or 1, heads or 1, queries, p) and V (batch or 1, heads or 1, keys, p).
        pairs: w_ij, corrections for individual pairs.
    """
    phi_q, phi_k, shift = _stabilize(query, key)
    value = with_ones(value)
    left, right = (factor.to(value.dtype) for factor in kernel)
    sums = torch.zeros_like(phi_q[..., :1]).expand(*phi_q.shape[:-1], value.shape[-1])
    # Multiplies values by features or by columns, whichever are fewer, and then uses matmul.
    if decided(left.shape[-1] > phi_q.shape[-1], otherwise=True):
        outer_q, outer_k, inner_q, inner_k = phi_q, phi_k, left, right
    else:
        outer_q, outer_k, inner_q, inner_k = left, right, phi_q, phi_k
    # Compiled code has the same number of chunks for all sizes.
    compiling = torch.compiler.is_compiling()
    chunk = _COMPILED if compiling else max(1, _TRANSIENT // max(1, value.numel()))
    several = chunk < outer_q.shape[-1]
    for u, v in zip(outer_q.split(chunk, dim=-1), outer_k.split(chunk, dim=-1), strict=True):
        sums = sums + recomputed(_grouped, inner_q, inner_k, value, u, v, several=several)
    if pairs is not None:
        sums = sums + _pair_sums(phi_q, phi_k, value, pairs)
    return Sums.of(sums, shift)


def _grouped(query: Tensor, key: Tensor, value: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns sum_s left_is query_i . [sum_j key_j right_js v_j]: (batch, heads, queries, dv)."""
    products = (right[..., :, None] * value[..., None, :]).flatten(-2)  # [b, h, key, s dv]
    mixed = query @ (key.mT @ products)
    left = left.expand(*mixed.shape[:-1], -1)
    return torch.einsum("bhns,bhnsv->bhnv", left, mixed.unflatten(-1, (right.shape[-1], -1)))


def matrix_is_cheaper(
    queries: int, keys: int, features: int, dim: int, columns: int | None = None
) -> bool:
    """Returns True if `quadratic` takes fewer multiplications than the same sums in linear time.

    For m features, values of width dv and a kernel of p columns (if any), the numbers are queries *
    keys * (m + dv + p) and (queries + keys) * m * dv * p. The second number is doubled if p > m,
    because products are then recomputed in the backward pass. For sizes unknown at compile time,
    the result is True only with a kernel.
    """
    p = 1 if columns is None else columns
    by_matrix = queries * keys * (features + dim + p)
    by_sums = (queries + keys) * features * dim * p
    if decided(p > features, otherwise=True):
        by_sums *= 2
    return decided(by_matrix < by_sums, otherwise=columns is not None)


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
