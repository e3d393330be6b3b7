"""How tokens mix: pure functions of queries, keys (or their features) and values.

Shapes are (batch, heads, tokens, dim) throughout. Sums of kernelized attention run in float32 at
least, also under autocast. The linear-time forms for ordered tokens are in `causal` and `toeplitz`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NORMALIZE = ("masked", "unmasked", "none")


class Features(NamedTuple):
    """Features phi = values * exp(log_scale) of queries or keys; None stands for 1 and for 0.

    Exponential maps overflow when they are evaluated too early. They give their logarithm instead,
    and the mixing subtracts what cancels in the ratio of its sums.
    """

    values: Tensor | None
    """(batch, heads, tokens, m)"""
    log_scale: Tensor | None = None
    """(batch, heads, tokens, m) or (batch, heads, tokens, 1)"""

    @property
    def width(self) -> int:
        """Number of features m."""
        tensor = self.log_scale if self.values is None else self.values
        return tensor.shape[-1]  # type: ignore[union-attr]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        tensor = self.log_scale if self.values is None else self.values
        return tensor.shape[-2]  # type: ignore[union-attr]

    def materialize(self) -> Tensor:
        """phi itself, without any stabilizer."""
        return self.shifted(torch.zeros(()))

    def shifted(self, shift: Tensor) -> Tensor:
        """values * exp(log_scale - shift)."""
        if self.log_scale is None:
            return self.values  # type: ignore[return-value]
        scale = (self.log_scale - shift.to(self.log_scale)).exp()
        return scale if self.values is None else self.values * scale

    def masked(self, mask: Tensor | None) -> "Features":
        """Features that are 0 where `mask` (broadcastable to batch, heads, tokens) is False."""
        if mask is None:
            return self
        out = ~mask[..., None]
        values, log_scale = self
        return Features(
            None if values is None else values.masked_fill(out, 0.0),
            None if log_scale is None else log_scale.masked_fill(out, -torch.inf),
        )

    def scaled(self, log_factor: Tensor) -> "Features":
        """Features times exp(log_factor), (batch, heads, tokens)."""
        factor = log_factor[..., None]
        return Features(self.values, factor if self.log_scale is None else self.log_scale + factor)

    def times(self, factors: Tensor) -> "Features":
        """Row-wise Kronecker product with (batch, heads, tokens, p): m p features.

        Products phi_i . phi_j are multiplied by factors_i . factors_j.
        """
        p = factors.shape[-1]
        values, log_scale = self
        ones = factors.new_ones(()).expand(*factors.shape[:-1], self.width)
        values = ones if values is None else values
        outer = (values[..., :, None] * factors[..., None, :]).flatten(-2)
        if log_scale is not None and log_scale.shape[-1] > 1:
            log_scale = log_scale.repeat_interleave(p, dim=-1)
        return Features(outer, log_scale)

    def bounded(self) -> "Features":
        """Features at least e^-61 (float32) or e^-495 (float64) of the largest of their token.

        Of a query's largest feature every key then has enough for a normalizer that neither
        underflows nor has a gradient that overflows, where features cannot be shifted to the size
        of their partners because those may come later.
        """
        if self.log_scale is None or self.log_scale.shape[-1] == 1:
            return self
        largest = self.log_scale.detach().amax(dim=-1, keepdim=True)
        reach = 0.7 * math.log(torch.finfo(self.log_scale.dtype).tiny)
        return Features(self.values, torch.maximum(self.log_scale, largest + reach))

    def full(self) -> "Features":
        """In float32 at least."""
        return Features(*(None if part is None else at_least_float32(part) for part in self))


class Sums(NamedTuple):
    """Numerator and normalizer of kernelized attention, both to be multiplied by exp(log_scale)."""

    numerator: Tensor
    """sum_j A_ij v_j, (batch, heads, queries, dv)"""
    normalizer: Tensor
    """sum_j A_ij, (batch, heads, queries, 1)"""
    log_scale: Tensor
    """(batch, heads, queries, 1), or a scalar 0"""

    def ratio(self, floor: float = 0.0) -> Tensor:
        """sum_j A_ij v_j / sum_j A_ij; 0 with zero gradient where no key was left.

        Args:
            floor: normalizers below it in absolute value are replaced by it, with their sign. It
                is relative to the largest feature product, which the stabilizer makes about 1.
        """
        return _divide(self.numerator, self.normalizer, floor)

    def ratio_to(self, other: "Sums", floor: float = 0.0) -> Tensor:
        """sum_j A_ij v_j over the normalizer of other sums."""
        return _divide(
            self.numerator * (self.log_scale - other.log_scale).exp(), other.normalizer, floor
        )

    def extensive(self) -> Tensor:
        """sum_j A_ij v_j itself; overflows where the kernel does."""
        return self.numerator * self.log_scale.exp()


def softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Softmax attention with an additive mask, O(N^2): FLT (arXiv:2302.01925), eq. 1.

    Args:
        query: (batch, heads, queries, d), scaled: logits are the plain product with the keys.
        key: (batch, heads, keys, d), scaled.
        value: (batch, heads, keys, dv).
        bias: f(r_i - r_j), broadcastable to (batch, heads, queries, keys).
        key_mask: broadcastable to (batch, heads, keys), True where a key exists.
        dropout: probability with which an attention weight is dropped.
        causal: each query sees the keys up to its own place; the last query sees all keys.

    Returns:
        (batch, heads, queries, dv); rows without any valid key are 0.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if keys == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    valid = None if key_mask is None else key_mask[..., None, :]
    if causal and (valid is not None or bias is not None or queries != keys):
        past = causal_mask(queries, keys, query.device)
        valid = past if valid is None else valid & past
        causal = False
    mask = bias
    if valid is not None:
        mask = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias
        mask = mask.masked_fill(~valid, -torch.inf)
    if mask is not None:
        mask = mask.to(query.dtype).expand(*query.shape[:-1], keys)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=1.0
    )
    if valid is not None:
        out = out.masked_fill(~valid.any(dim=-1, keepdim=True), 0.0)
    return out


def quadratic(
    query: Features,
    key: Features,
    value: Tensor,
    causal: bool = False,
    kernel: Tensor | None = None,
    log_kernel: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Sums:
    """Kernelized attention by its own N x N matrix: the oracle of all linear-time forms, O(N^2).

    A_ij = phi(q_i) . phi(k_j) kernel_ij exp(log_kernel_ij) prod_(j < l <= i) exp(log_decay_l)

    Args:
        query: (batch, heads, queries, m).
        key: (batch, heads, keys, m), zero for keys to be left out.
        value: (batch, heads, keys, dv).
        causal: each query sees the keys up to its own place; the last query sees all keys.
        kernel: positional kernel, broadcastable to (batch, heads, queries, keys).
        log_kernel: logarithm of a positive one, of the same shape.
        log_decay: (batch, heads, keys), at most 0; needs `causal` and as many queries as keys.
    """
    with torch.autocast(value.device.type, enabled=False):
        phi_q, phi_k, shift = stabilize(query.full(), key.full())
        weights = phi_q @ phi_k.transpose(-1, -2)
        if kernel is not None:
            weights = weights * at_least_float32(kernel)
        if log_decay is not None:
            total = at_least_float32(log_decay).cumsum(dim=-1)
            decay = total[..., :, None] - total[..., None, :]
            log_kernel = decay if log_kernel is None else log_kernel + decay
        past = causal_mask(phi_q.shape[-2], phi_k.shape[-2], value.device) if causal else None
        if log_kernel is not None:
            log_kernel = at_least_float32(log_kernel)
            if past is not None:
                log_kernel = log_kernel.masked_fill(~past, -torch.inf)
            weights = weights * log_kernel.exp()
        elif past is not None:
            weights = weights * past
        full = at_least_float32(value)
        return Sums(weights @ full, weights.sum(dim=-1, keepdim=True), shift)


def linear(query: Features, key: Features, value: Tensor) -> Sums:
    """Kernelized attention in linear time: phi(Q) (phi(K)^T V) and phi(Q) (phi(K)^T 1). O(N m dv).

    Performer (arXiv:2009.14794), eq. 4. Arguments and result as for `quadratic`.
    """
    with torch.autocast(value.device.type, enabled=False):
        phi_q, phi_k, shift = stabilize(query.full(), key.full())
        context = phi_k.transpose(-1, -2) @ at_least_float32(value)  # [b, h, m, dv]
        total = phi_k.sum(dim=-2).unsqueeze(-1)  # [b, h, m, 1]
        return Sums(phi_q @ context, phi_q @ total, shift)


def cheaper(queries: int, keys: int, features: int, dim: int, columns: int = 1) -> str:
    """Which of two forms of the same sums takes less time: "quadratic" or "linear".

    Counts multiplications: queries keys (m + dv + p) against (queries + keys) m dv p.
    `scripts/backends.py` measures both beside this choice.

    Args:
        queries: number of queries.
        keys: number of keys.
        features: m.
        dim: dv, width of the values.
        columns: p, of the positional kernel's factors; 1 without one.
    """
    quadratic = queries * keys * (features + dim + columns)
    return "quadratic" if quadratic < (queries + keys) * features * dim * columns else "linear"


def drop_keys(key: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    """Random (batch, heads, keys) mask; the normalizer makes rescaling by 1 / (1 - rate) moot."""
    kept = torch.rand(key.shape[:-1], device=key.device) >= rate
    return kept if mask is None else kept & mask


def stabilize(query: Features, key: Features) -> tuple[Tensor, Tensor, Tensor]:
    """Features of a whole sequence in a range without overflow, and what was taken off.

    The key's maximum over the valid tokens of the same sequence, one per feature, is moved to the
    query's side, where the maximum over features is then subtracted. Both shifts cancel in the
    ratio of sums, so nothing is detached from the gradient and nothing leaks between sequences;
    and the largest term of every normalizer of positive features is exactly 1 x 1, so that no
    normalizer can underflow.

    Returns:
        phi_q, phi_k and the logarithm, per query, of what the products have to be multiplied by.
    """
    log_k, key_max = key.log_scale, None
    if log_k is not None and log_k.shape[-2]:
        key_max = log_k.detach().amax(dim=-2, keepdim=True)
        key_max = torch.where(key_max.isfinite(), key_max, 0.0)  # no valid key at all
    phi_k = key.materialize() if key_max is None else key.shifted(key_max)
    phi_q, query_max = stable_query(query, key_max)
    return phi_q, phi_k, query_max


def stable_query(query: Features, key_max: Tensor | None) -> tuple[Tensor, Tensor]:
    """phi_q with the key's maxima, from which the largest exponent is taken off, and that."""
    log_q = query.log_scale
    if key_max is not None:
        log_q = key_max.expand(*key_max.shape[:2], query.tokens, -1) + (
            0 if log_q is None else log_q
        )
    if log_q is None:
        phi_q = query.materialize()
        return phi_q, phi_q.new_zeros(())
    query_max = log_q.detach().amax(dim=-1, keepdim=True)
    # In this order of operations the largest exponent is exactly 0.
    return Features(query.values, log_q).shifted(query_max), query_max


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(queries, keys) bool, True up to the query's own place; the last query sees all keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32: it overflows exponentials and loses the phase of a few Å."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _divide(numerator: Tensor, normalizer: Tensor, floor: float) -> Tensor:
    """numerator / normalizer, and 0 with zero gradient where no key was left."""
    empty = normalizer == 0
    if floor:
        least = torch.copysign(torch.full_like(normalizer, floor), normalizer)
        normalizer = torch.where(normalizer.abs() < floor, least, normalizer)
    # A quotient, not a reciprocal: the gradient of that one overflows below 1e-19.
    return (numerator / normalizer.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
