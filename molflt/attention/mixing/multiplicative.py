"""Sums with a factorized positional kernel that multiplies the products of features."""

import torch
from torch import Tensor

from molflt.attention.features import Features
from molflt.attention.mixing.pairs import _TRANSIENT, Pairs, SortedPairs, _pair_sums
from molflt.attention.mixing.sums import Sums, _stabilize
from molflt.attention.numerics import at_least_float32, recomputed, undecided

_COMPILED = 8  # columns per chunk in compiled code


def linear_with_kernel(
    query: Features,
    key: Features,
    value: Tensor,
    kernel: tuple[Tensor, Tensor],
    pairs: Pairs | SortedPairs | None = None,
) -> Sums:
    """Computes sums with A_ij = (U_i . V_j + w_ij) phi(q_i) . phi(k_j) in linear time.

    The sums run over the columns of U and V, sum_s U_is phi(q_i) . [sum_j V_js v_j phi(k_j)], or,
    with many columns, over the features, sum_a phi_a(q_i) U_i . [sum_j V_j phi_a(k_j) v_j]. The (N,
    m p) Kronecker product is never formed. Chunks of columns, features and pairs are recomputed in
    the backward pass. The cost is O(N m p dv + pairs (m + dv)).

    Args:
        query: (batch, heads, queries, m).
        key: (batch, heads, keys, m), zero for excluded keys.
        value: (batch, heads, keys, dv).
        kernel: U (batch or 1, heads or 1, queries, p) and V (batch or 1, heads or 1, keys, p).
        pairs: w_ij, corrections for single pairs.
    """
    with torch.autocast(value.device.type, enabled=False):
        phi_q, phi_k, shift = _stabilize(query.at_least_float32(), key.at_least_float32())
        value = at_least_float32(value)
        value = torch.cat((value, torch.ones_like(value[..., :1])), dim=-1)
        left, right = (factor.to(value.dtype) for factor in kernel)
        sums = torch.zeros_like(phi_q[..., :1]).expand(*phi_q.shape[:-1], value.shape[-1])
        # Multiplies values by features or by columns, whichever are fewer; the rest are matmuls.
        by_feature = undecided(left.shape[-1] > phi_q.shape[-1], True)
        parts, rest = ((phi_q, phi_k), (left, right))[:: 1 if by_feature else -1]
        # Compiled code has the same number of chunks for all sizes.
        compiling = torch.compiler.is_compiling()
        chunk = _COMPILED if compiling else max(1, _TRANSIENT // max(1, value.numel()))
        for u, v in zip(*(part.split(chunk, dim=-1) for part in parts), strict=True):
            several = chunk < parts[0].shape[-1]
            sums = sums + recomputed(_grouped, *rest, value, u, v, several=several)
        if pairs is not None:
            sums = sums + _pair_sums(phi_q, phi_k, value, pairs)
        return Sums(sums[..., :-1], sums[..., -1:], shift)


def _grouped(query: Tensor, key: Tensor, value: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns sum_s left_is query_i . [sum_j key_j right_js v_j], (batch, heads, queries, dv)."""
    columns = right.shape[-1]
    waves = (right[..., :, None] * value[..., None, :]).flatten(-2)  # [b, h, key, s dv]
    mixed = query @ (key.transpose(-1, -2) @ waves)
    return torch.einsum(
        "bhns,bhnsv->bhnv", left.expand(*mixed.shape[:-1], -1), mixed.unflatten(-1, (columns, -1))
    )
