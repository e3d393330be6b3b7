"""Queries and keys in parts, [N1, q], which most feature maps take without joining them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Projected(NamedTuple):
    """A part of which only what maps with a random projection ask for is known."""

    products: Tensor
    """w_s . x, (batch, heads, tokens, m)"""
    square: Tensor
    """|x|^2, (batch, heads, tokens, 1)"""


Part = Tensor | Projected


def joined(*parts: Part) -> Tensor:
    """Parts along their last axis as one tensor; a single one is not copied.

    Raises:
        ValueError: a part is known by its projections alone.
    """
    whole = [part for part in parts if isinstance(part, Tensor)]
    if len(whole) < len(parts):
        raise ValueError(
            "this feature map needs the factors of the encoding themselves; got their random "
            "projections, as for reciprocal nodes; use 'positive', 'relu' or another random map"
        )
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=-1)


def squared_norm(*parts: Part) -> Tensor:
    """|x|^2 of x in parts: (..., n, .) -> (..., n, 1).

    By inner products: squares would keep a copy of x for the backward pass, and norms have no
    second derivative at 0.
    """
    first, *others = (
        x.square if isinstance(x, Projected) else torch.linalg.vecdot(x, x).unsqueeze(-1)
        for x in parts
    )
    return sum(others, first)


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last axis; 0 where x is 0, and smooth there."""
    return x * (squared_norm(x) + 1e-24).rsqrt()
