"""Causal kernelized attention in linear time, with a state of constant size for decoding."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.features.base import Features, split_or_repeat
from molflt.attention.mixing.sums import Sums, _causal_mask, with_ones
from molflt.attention.numerics import recomputed

_CHUNK = 128  # tokens per chunk; fastest of 32..512 for m = 64 and d = 64 on a CPU
_CHUNKS_AT_ONCE = 8  # intermediate tensors are recomputed in the backward pass
_EMPTY = -1e30  # logarithm of an empty sum; finite, because it is subtracted


class State(NamedTuple):
    """State of the tokens processed so far: sum_j phi(k_j) [v_j, 1] = sums exp(log_max)."""

    log_max: Tensor  # running maximum of the log scale of keys, (batch, heads, m or 1, 1)
    sums: Tensor  # (batch, heads, m, dv + 1)


class KeyValues(NamedTuple):
    """State of causal softmax attention: the keys and values of all tokens so far."""

    key: Tensor  # (batch, heads, tokens, d), scaled, before any rotation
    value: Tensor  # (batch, heads, tokens, d)
    mask: Tensor | None = None  # (batch, 1, tokens), True where a key exists; None if all exist


DecodeState = KeyValues | tuple[State, ...]


def causal_linear(
    query: Features,
    key: Features,
    value: Tensor,
    log_decay: Tensor | None = None,
    state: State | None = None,
) -> tuple[Sums, State]:
    """Computes kernelized attention of each token to itself and earlier tokens, in O(N m dv) time.

    Inside each chunk of `_CHUNK` tokens, the matrix of weights is formed. A running sum is carried
    across chunks (Transformer Quality in Linear Time, arXiv:2202.10447, section 3.2).
    `_CHUNKS_AT_ONCE` chunks are computed at once and recomputed in the backward pass. Apart from
    the arguments and the sums, O(N m dv / chunk) numbers are stored.

    Each query subtracts the largest exponent of the keys that it attends to. Large later keys
    therefore do not make earlier sums underflow. `Features.bounded` raises features to a lower
    bound far below relevant values.

    Args:
        query, key, value: see `quadratic`; queries and keys are the same tokens.
        log_decay: (batch, heads, tokens), at most 0; the weight of key j for query i is multiplied
            by exp(sum of log_decay over j < l <= i).
        state: state returned by an earlier call for the preceding tokens.
    """
    tokens, span = value.shape[-2], _CHUNKS_AT_ONCE * _CHUNK
    if state is None:
        sequences, scales = value.shape[:2], 1 if key.log_scale is None else key.log_scale.shape[-1]
        log_max = value.new_full((*sequences, scales, 1), _EMPTY)
        state = State(log_max, value.new_zeros(*sequences, key.width, value.shape[-1] + 1))
    if tokens == 1:
        return _step(query, key, value, log_decay, state)
    if tokens <= span:
        return _scan(query, key, value, log_decay, state)
    values = value.split(span, dim=-2)
    decays = split_or_repeat(log_decay, span, len(values), dim=-1)
    sums = []
    for part in zip(query.split(span), key.split(span), values, decays, strict=True):
        span_sums, state = recomputed(_scan, *part, state)
        sums.append(span_sums)
    return Sums(*(torch.cat(parts, dim=-2) for parts in zip(*sums, strict=True))), state


def _log_scale(features: Features, value: Tensor) -> Tensor:
    """Returns the log scale of features, (batch, heads, tokens, m or 1); zeros if it is None."""
    return torch.zeros_like(value[..., :1]) if features.log_scale is None else features.log_scale


def _without_empty(log: Tensor) -> Tensor:
    """Replaces logarithms of empty sums with 0, because exp(_EMPTY - _EMPTY) would be 1."""
    return log.where(log > _EMPTY / 2, 0.0)


def _step(
    query: Features, key: Features, value: Tensor, log_decay: Tensor | None, state: State
) -> tuple[Sums, State]:
    """Computes `causal_linear` for one token, without the matrices of a chunk."""
    query, key = query.bounded(), key.bounded()
    log_k = _log_scale(key, value).clamp(min=_EMPTY).mT  # [b, h, m or 1, 1]
    decayed = state.log_max
    if log_decay is not None:
        decayed = decayed + log_decay[..., None]
    log_max = torch.maximum(decayed, log_k).detach()
    phi = Features(None if key.values is None else key.values.mT, log_k)  # [b, h, m, 1]
    added = phi.shifted(_without_empty(log_max))
    past = state.sums * (decayed - log_max).exp()
    sums = past.addcmul(added, with_ones(value))

    log_q = _log_scale(query, value) + log_max.mT
    row_max = _without_empty(log_q.detach().amax(dim=-1, keepdim=True))
    out = Features(query.values, log_q - row_max).materialize() @ sums
    return Sums.of(out, row_max), State(log_max, sums)


def _scan(
    query: Features, key: Features, value: Tensor, log_decay: Tensor | None, state: State
) -> tuple[Sums, State]:
    """Computes `causal_linear` for all chunks at once."""
    tokens = value.shape[-2]
    length = max(1, min(_CHUNK, tokens))
    chunks = _Chunks.of(query.bounded(), key.bounded(), value, log_decay, length)
    before, last = chunks.carry(state)
    return Sums(*(x.flatten(2, 3)[:, :, :tokens] for x in chunks.mix(before))), last


class _Chunks(NamedTuple):
    """Sequence cut into chunks; tensors have the shape (batch, heads, chunks, length, ...)."""

    query_values: Tensor | None  # (..., m)
    log_q: Tensor  # log scale of queries minus `query_max`, (..., m or 1)
    query_max: Tensor  # (..., 1)
    key_values: Tensor | None  # (..., m)
    log_k: Tensor  # (..., m or 1)
    value: Tensor  # [v, 1], (..., dv + 1)
    decay: Tensor  # running sum of log_decay inside the chunk, (..., 1)

    @classmethod
    def of(
        cls, query: Features, key: Features, value: Tensor, log_decay: Tensor | None, length: int
    ) -> "_Chunks":
        padding = -value.shape[-2] % length

        def split(x: Tensor, fill: float = 0.0) -> Tensor:
            padded = F.pad(x, (0, 0, 0, padding), value=fill) if padding else x
            return padded.unflatten(-2, (-1, length))

        log_q = split(_log_scale(query, value))
        query_max = log_q.detach().amax(dim=-1, keepdim=True)
        decay = torch.zeros_like(value[..., :1]) if log_decay is None else log_decay[..., None]
        return cls(
            None if query.values is None else split(query.values),
            log_q - query_max,
            query_max,
            None if key.values is None else split(key.values),
            split(_log_scale(key, value), _EMPTY).clamp(min=_EMPTY),
            split(with_ones(value)),
            split(decay).cumsum(dim=-2),
        )

    def carry(self, state: State) -> tuple[State, State]:
        """Returns the state before each chunk, stacked along axis 2, and the final state."""
        total = self.decay[..., -1:, :]  # [b, h, c, 1, 1]
        log_k = self.log_k + (total - self.decay)  # relative to the end of the chunk
        highest = log_k.detach().amax(dim=-2, keepdim=True)  # [b, h, c, 1, m]
        phi = Features(self.key_values, log_k).shifted(_without_empty(highest))
        added = phi.mT @ self.value  # [b, h, c, m, dv + 1]
        highest = highest.mT
        before = []
        log_max, sums = state
        for c in range(self.value.shape[2]):
            before.append(State(log_max, sums))
            decayed = log_max + total[:, :, c]
            log_max = torch.maximum(decayed.detach(), highest[:, :, c])
            new = added[:, :, c] * (highest[:, :, c] - log_max).exp()
            sums = sums * (decayed - log_max).exp() + new
        if not before:  # no token at all
            return State(*(x.unsqueeze(2)[:, :, :0] for x in state)), state
        stacked = (torch.stack(parts, dim=2) for parts in zip(*before, strict=True))
        return State(*stacked), State(log_max, sums)

    def mix(self, before: State) -> Sums:
        """Computes the sums (b, h, c, length, ...) from the state before each chunk."""
        key_max = self.log_k.detach().amax(dim=-1, keepdim=True)  # [b, h, c, key, 1]
        chunk_max = (key_max - self.decay.detach()).cummax(dim=-2).values  # over keys so far
        log_past = self.log_q + before.log_max.mT  # [b, h, c, query, m]
        past_max = log_past.detach().amax(dim=-1, keepdim=True)
        row_max = _without_empty(torch.maximum(chunk_max, past_max))  # [b, h, c, query, 1]
        key = Features(self.key_values, self.log_k).shifted(key_max)
        weights = Features(self.query_values, self.log_q).materialize() @ key.mT
        log_scale = (key_max - self.decay).mT - row_max  # [b, h, c, query, key]
        visible = _causal_mask(weights.shape[-2], weights.shape[-1], weights.device)
        weights = weights * log_scale.masked_fill(~visible, -torch.inf).exp()
        past_query = Features(self.query_values, log_past - row_max).materialize()
        sums = weights @ self.value + past_query @ before.sums
        # The running decay of the query multiplies both parts.
        return Sums.of(sums, self.query_max + row_max + self.decay)
