"""Masks and weights of keys."""

from typing import TypedDict

import torch
from torch import Tensor, nn

from molflt.attention.checks import readable, tensors, whole
from molflt.attention.numerics import at_least_float32, finite


class Keys(TypedDict, total=False):
    """Keyword arguments that describe keys, for `forward` of layers, blocks and stacks.

    Tokens of masked keys may contain any values; infinities and NaN are treated as 0.
    """

    key_mask: Tensor | None
    """(batch, keys) bool, True where a key exists"""
    key_weight: Tensor | None
    """(batch, keys), positive and finite; the weight of key j multiplies A_ij for all queries i"""
    key_index: Tensor | None
    """(batch, keys), index of the token that each key copies; by default, key j copies token j.
    Periodic images of an atom are keys with the index of the atom but with separate positions."""


def check_width(dim: int, layer: nn.Module | None = None, **tokens: Tensor | None) -> None:
    """Raises an error unless arguments are None or (batch, tokens, dim) in the dtype of `layer`."""
    tensors(**tokens)
    weight = None if layer is None else next(layer.parameters(), None)
    for name, x in tokens.items():
        if x is not None and (x.ndim != 3 or x.shape[-1] != dim):
            raise ValueError(f"{name} must have shape (batch, tokens, {dim}); got {tuple(x.shape)}")
        if x is None or weight is None or x.dtype == weight.dtype:
            continue
        # Quantized weights do not have the dtype of tokens.
        if weight.is_floating_point() and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"{name} must be {weight.dtype}, as the weights; got {x.dtype}; convert one of them"
            )


def check_mask(mask: Tensor | None, shape: torch.Size, name: str = "key_mask") -> None:
    """Raises TypeError or ValueError unless a mask is None or a bool tensor of this shape."""
    tensors(**{name: mask})
    if mask is not None and (mask.dtype is not torch.bool or mask.shape != shape):
        raise ValueError(
            f"{name} must be bool of shape {tuple(shape)}; got {mask.dtype} of {tuple(mask.shape)}"
        )


def log_weights(key_weight: Tensor | None, key_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Returns the logarithms of weights: (batch, keys) -> (batch, 1, keys); 0 for masked keys."""
    if key_weight is None:
        return None
    tensors(key_weight=key_weight)
    expected = key.shape[0], key.shape[2]
    if key_weight.shape != expected:
        raise ValueError(f"key_weight must have shape {expected}; got {tuple(key_weight.shape)}")
    weight = key_weight.to(at_least_float32(key).dtype)
    if key_mask is not None:  # before the logarithm, whose derivative at 0 is infinite
        weight = weight.masked_fill(~key_mask, 1.0)
    least = torch.finfo(weight.dtype).tiny  # below this, the slope 1 / weight overflows
    if readable(weight):
        invalid = ~((weight >= least) & weight.isfinite())
        if bool(invalid.any()):
            raise ValueError(
                f"key_weight must be finite and at least {least:.3g} in {weight.dtype}; got "
                f"{key_weight[invalid][0].item():g}; exclude keys with key_mask"
            )
    return weight.log()[:, None]


def _finite_if_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Replaces infinities and NaN with 0 where the mask is False: (b, n, .), (b, n) -> (b, n, .)"""
    return torch.where(mask[..., None], x, finite(x))


def finite_positions(
    positions: Tensor | None, key_positions: Tensor | None, keys: Keys
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the positions of queries and keys; infinities and NaN of masked keys become 0."""
    if positions is not None and key_positions is None and keys.get("key_index") is not None:
        raise ValueError("key_index needs positions of keys; pass key_positions, (batch, keys, l)")
    key_mask = keys.get("key_mask")
    if key_mask is None or positions is None:
        return positions, key_positions
    if key_positions is not None:
        return positions, _finite_if_masked(key_positions, key_mask)
    return _finite_if_masked(positions, key_mask), None


def without_masked(
    x: Tensor,
    key_mask: Tensor | None,
    key_index: Tensor | None = None,
    context: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens for queries and for keys; see `Attention.forward` for the arguments.

    In tokens for keys, (batch, source tokens, dim), masked tokens are 0, because 0 times infinity
    would be NaN in sums and gradients. In tokens for queries, (batch, tokens, dim), masked tokens
    keep their finite values.
    """
    source = x if context is None else context
    tensors(key_index=key_index)
    if key_index is not None:
        if key_index.shape[:-1] != source.shape[:1]:
            raise ValueError(
                f"key_index must have shape ({len(source)}, keys); got {tuple(key_index.shape)}"
            )
        whole("key_index", key_index, 0, source.shape[1] - 1, "the places of tokens")
    if key_mask is None:
        return x, source
    check_mask(key_mask, source.shape[:2] if key_index is None else key_index.shape)
    used = key_mask
    if key_index is not None:  # tokens that at least one unmasked key copies
        unused = torch.zeros(source.shape[:2], dtype=torch.uint8, device=source.device)
        used = unused.scatter_reduce(1, key_index, key_mask.to(unused.dtype), "amax").bool()
    if context is None:
        x = _finite_if_masked(x, used)
    return x, source.masked_fill(~used[..., None], 0.0)
