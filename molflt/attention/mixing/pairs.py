"""Corrections to a positional kernel, or to the sums, for individual pairs of tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from molflt.attention.features.base import Operand
from molflt.attention.mixing.sparse import Pattern, correlate, gather, has_sparse_products
from molflt.attention.mixing.sums import Sums, with_ones
from molflt.attention.numerics import at_least_float32, decided, pieces, products_of_all, recomputed

_TRANSIENT = 2**22  # largest number of elements per chunk of columns or pairs
_MANY = 2**18  # for more pairs, products of features are recomputed in the backward pass


class Pairs(NamedTuple):
    """Corrections to the positional kernel: one sparse matrix per head."""

    batch: Tensor  # (pairs,) index in the batch; pairs may repeat
    query: Tensor  # (pairs,) index of the query
    key: Tensor  # (pairs,) index of the key
    weight: Tensor  # (heads or 1, pairs)
    # f (heads, pairs) and s (pairs,); s exp(q_i . k_j + f) is added to A_ij
    exact: tuple[Tensor, Tensor] | None = None

    def by_query(self, batch: int, queries: int, keys: int) -> "Pairs | SortedPairs":
        """Returns the pairs sorted by query for sparse products on the CPU, otherwise unchanged."""
        compiling = torch.compiler.is_compiling()
        if compiling or self.weight.device.type != "cpu" or not has_sparse_products(self.weight):
            return self
        row, column = self.batch * queries + self.query, self.batch * keys + self.key
        order = row.argsort(stable=True)
        pattern = Pattern.of(row[order], column[order], batch * queries, batch * keys)
        return SortedPairs(pattern, self.weight.index_select(1, order))

    def dense(self, batch: int, queries: int, keys: int) -> Tensor:
        """Returns the full matrix, of shape (batch, heads or 1, queries, keys)."""
        flat = (self.batch * queries + self.query) * keys + self.key
        out = self.weight.new_zeros(self.weight.shape[0], batch * queries * keys)
        added = out.index_add(1, flat, self.weight)
        return added.view(added.shape[0], batch, queries, keys).transpose(0, 1)


class SortedPairs(NamedTuple):
    """Pairs sorted by query, as the pattern and the weights of sparse matrices."""

    pattern: Pattern  # rows are queries of all graphs, columns are keys of all graphs
    weight: Tensor  # (heads or 1, pairs)


def _pair_sums(phi_q: Tensor, phi_k: Tensor, value: Tensor, pairs: Pairs | SortedPairs) -> Tensor:
    """Returns sum_j w_ij phi_i . phi_j v_j over the pairs: (batch, heads, queries, dv)."""
    batch, heads, queries, m = phi_q.shape
    if isinstance(pairs, SortedPairs):
        return _sparse_sums(phi_q, phi_k, value, pairs)
    out = value.new_zeros(batch * queries, heads, value.shape[-1])
    weight = at_least_float32(pairs.weight).expand(heads, -1).T  # [pair, h]
    chunk = max(1, _TRANSIENT // (heads * (m + value.shape[-1])))
    parts = pieces(pairs.query.shape[0], chunk)
    several = len(parts) > 1
    for part in parts:
        b, i, j, w = pairs.batch[part], pairs.query[part], pairs.key[part], weight[part]
        messages = recomputed(_messages, phi_q, phi_k, value, w, b, i, j, several=several)
        out = out.index_add(0, b * queries + i, messages)
    return out.unflatten(0, (batch, queries)).transpose(1, 2)


def _sparse_sums(phi_q: Tensor, phi_k: Tensor, value: Tensor, pairs: SortedPairs) -> Tensor:
    """Computes `_pair_sums` one head at a time, without gathering features for each pair."""
    weight = at_least_float32(pairs.weight).expand(phi_q.shape[1], -1)
    several = weight.shape[1] > _MANY
    by_head = []
    heads = zip(phi_q.unbind(1), phi_k.unbind(1), value.unbind(1), weight, strict=True)
    for *tokens, w in heads:
        q, k, v = (x.flatten(0, 1) for x in tokens)
        by_head.append(recomputed(_sparse_sum, q, k, v, w, pairs.pattern, several=several))
    return torch.stack(by_head, dim=1).unflatten(0, (phi_q.shape[0], -1)).transpose(1, 2)


def _sparse_sum(query: Tensor, key: Tensor, value: Tensor, w: Tensor, pattern: Pattern) -> Tensor:
    """Returns the sums of one head over the pairs: (batch queries, dv)."""
    return gather(correlate(query, key, pattern) * w.to(value.dtype), value, pattern)


def _messages(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, weight: Tensor, b: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    """Returns w_ij phi_i . phi_j v_j for pairs (b, i, j): (pairs, heads, dv)."""
    product = (phi_q[b, :, i] * phi_k[b, :, j]).sum(dim=-1)  # [pair, h]
    return (product * weight)[..., None] * value[b, :, j]


def with_exact_pairs(sums: Sums, query: Operand, key: Operand, value: Tensor, pairs: Pairs) -> Sums:
    """Adds the exact terms s exp(q_i . k_j + f_ij) of pairs to sums over keys.

    The mask and the weights of the keys also apply to these terms.
    """
    assert pairs.exact is not None
    f, switch = (at_least_float32(x) for x in pairs.exact)
    logits = _exact_logits(query, key, f, pairs)  # [pair, h]
    batch, heads, queries, _ = query.x.shape
    row = pairs.batch * queries + pairs.query
    old_shift = sums.log_scale.expand(batch, heads, queries, 1).transpose(1, 2).flatten(0, 1)
    index = row[:, None].expand(-1, heads)
    shift = old_shift[..., 0].scatter_reduce(0, index, logits.detach(), "amax")  # [b n, h]
    weight = (logits - shift[row]).exp() * switch[:, None]
    value = with_ones(value)
    added = value.new_zeros(batch * queries, heads, value.shape[-1])
    parts = pieces(row.shape[0], max(1, _TRANSIENT // (heads * value.shape[-1])))
    several = len(parts) > 1
    for part in parts:
        b, j = pairs.batch[part], pairs.key[part]
        messages = recomputed(_weighted, value, weight[part], b, j, several=several)
        added = added.index_add(0, row[part], messages)
    added = added.unflatten(0, (batch, queries)).transpose(1, 2)
    shift = shift[..., None].unflatten(0, (batch, queries)).transpose(1, 2)
    scale = (sums.log_scale - shift).exp()
    numerator = sums.numerator * scale + added[..., :-1]
    return Sums(numerator, sums.normalizer * scale + added[..., -1:], shift)


def _exact_logits(query: Operand, key: Operand, f: Tensor, pairs: Pairs) -> Tensor:
    """Returns q_i . k_j + f_ij plus the log weight of key j, (pairs, heads); -inf if masked."""
    logits = (products(at_least_float32(query.x), at_least_float32(key.x), pairs) + f).T
    batch = len(query.x)
    if key.log_weight is not None:
        logits = logits + key.log_weight.expand(batch, -1, -1)[pairs.batch, :, pairs.key]
    if key.mask is not None:
        valid = key.mask.expand(batch, -1, -1)[pairs.batch, :, pairs.key]  # [pair, h or 1]
        logits = logits.masked_fill(~valid, -torch.inf)
    return logits


def _weighted(value: Tensor, weight: Tensor, b: Tensor, j: Tensor) -> Tensor:
    """Returns w_bj v_bj of pairs for weights (pairs, heads): (pairs, heads, dv)."""
    return weight[..., None] * value[b, :, j]


def products(left: Tensor, right: Tensor, pairs: Pairs) -> Tensor:
    """Computes U_i . V_j of pairs from U and V (batch or 1, heads or 1, n, p): (heads, pairs)."""
    batch = max(left.shape[0], right.shape[0])
    if decided(
        batch * left.shape[-2] * right.shape[-2] <= 4 * pairs.query.shape[0], otherwise=True
    ):
        # For few tokens, this is cheaper than gathering the factors.
        matrix = products_of_all(left, right)
        return matrix.expand(batch, -1, -1, -1)[pairs.batch, :, pairs.query, pairs.key].T
    chunk = max(1, _TRANSIENT // (left.shape[1] * left.shape[-1]))
    parts = pieces(pairs.query.shape[0], chunk)
    several = len(parts) > 1
    chunks = []
    for part in parts:
        b, i, j = pairs.batch[part], pairs.query[part], pairs.key[part]
        chunks.append(recomputed(_products, left, right, b, i, j, several=several))
    return torch.cat(chunks).T if chunks else left.new_zeros(left.shape[1], 0)


def _products(left: Tensor, right: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Returns U_i . V_j of pairs (b, i, j) from the gathered factors: (pairs, heads)."""
    return (left[b, :, i] * right[b, :, j]).sum(dim=-1)
