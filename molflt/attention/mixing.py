"""How tokens mix: pure functions of queries, keys (or their features) and values.

Shapes are (batch, heads, tokens, dim) throughout. Sums of kernelized attention run in float32 at
least, also under autocast.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention with an additive mask, O(N^2): FLT (arXiv:2302.01925), eq. 1.

    Args:
        query: (batch, heads, queries, d), scaled: logits are the plain product with the keys.
        key: (batch, heads, keys, d), scaled.
        value: (batch, heads, keys, dv).
        bias: f(r_i - r_j), broadcastable to (batch, heads, queries, keys).
        key_mask: broadcastable to (batch, heads, keys), True where a key exists.
        dropout: probability with which an attention weight is dropped.

    Returns:
        (batch, heads, queries, dv); rows without any valid key are 0.
    """
    mask = bias
    if key_mask is not None:
        valid = key_mask[..., None, :]
        mask = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias
        mask = mask.masked_fill(~valid, -torch.inf)
    if mask is not None:
        mask = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    if key.shape[-2] == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=1.0
    )
    if key_mask is not None:
        empty = ~key_mask.any(dim=-1)[..., None, None]
        out = out.masked_fill(empty, 0.0)
    return out


def quadratic(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Kernelized attention by its own N x N matrix: the oracle of `linear`, O(N^2).

    Args:
        query: features phi(q), (batch, heads, queries, m).
        key: features phi(k), zero for keys to be left out, (batch, heads, keys, m).
        value: (batch, heads, keys, dv).

    Returns:
        (batch, heads, queries, dv); rows whose normalizer is 0 are 0.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key, full = at_least_float32(query), at_least_float32(key), at_least_float32(value)
        weights = query @ key.transpose(-1, -2)
        return _divide(weights @ full, weights.sum(dim=-1, keepdim=True)).to(value.dtype)


def linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Kernelized attention in linear time: phi(Q) (phi(K)^T V), normalized. O(N m dv).

    Performer (arXiv:2009.14794), eq. 4. Arguments and result as for `quadratic`.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key, full = at_least_float32(query), at_least_float32(key), at_least_float32(value)
        context = key.transpose(-1, -2) @ full  # [b, h, m, dv]
        total = key.sum(dim=-2).unsqueeze(-1)  # [b, h, m, 1]
        return _divide(query @ context, query @ total).to(value.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32: it overflows exponentials and loses the phase of a few Å."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _divide(numerator: Tensor, normalizer: Tensor) -> Tensor:
    """numerator / normalizer, and 0 with zero gradient where no key was left."""
    empty = normalizer == 0
    return (numerator / normalizer.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
