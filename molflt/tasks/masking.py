"""Gaps in sequences of any tokens, and parts that do not belong together.

BERT (arXiv:1810.04805), section 3.1. Draws are arguments: training takes new ones at each step,
validation those that a sequence has by what is in it, whatever the batch.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Draws", "hide", "swap_parts"]


class Draws(NamedTuple):
    """Uniform numbers in [0, 1)."""

    tokens: Tensor
    """(3, batch, length)"""
    sequences: Tensor
    """(batch,)"""

    @staticmethod
    def new(tokens: Tensor) -> Draws:
        """New ones, of torch's generator for the device of ids (batch, length)."""
        whole = torch.rand(3, *tokens.shape, device=tokens.device)
        return Draws(whole, torch.rand(len(tokens), device=tokens.device))

    @staticmethod
    def of_content(tokens: Tensor, there: Tensor) -> Draws:
        """Those of each sequence by its own tokens: the same in every batch, with any padding.

        Args:
            tokens: ids (batch, length).
            there: (batch, length), True where there is a token; elsewhere draws are 1.
        """
        whole = torch.ones(3, *tokens.shape)
        each = torch.empty(len(tokens))
        for i, (row, mask) in enumerate(zip(tokens.cpu(), there.cpu(), strict=True)):
            own = row[mask].to(torch.int64)
            digest = hashlib.sha256(own.numpy().tobytes()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            whole[:, i, mask] = torch.rand(3, len(own), generator=generator)
            each[i] = torch.rand((), generator=generator)
        return Draws(whole.to(tokens.device), each.to(tokens.device))


def hide(
    tokens: Tensor,
    there: Tensor,
    draws: Tensor,
    mask_id: Tensor,
    ordinary: Tensor,
    rate: float = 0.15,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Makes gaps.

    Args:
        tokens: ids (batch, length).
        there: (batch, length), True where there is a token.
        draws: (3, batch, length), uniform in [0, 1): which tokens are to be told, what becomes of
            them, and what stands there instead.
        mask_id: of the token that stands in a gap, a number.
        ordinary: (vocabulary,) bool, ids that may be hidden, and drawn.
        rate: share of the ordinary tokens that are to be told.
        mask_share: share of these that become `mask_id`.
        random_share: share of these that become any ordinary id; the rest stay as they are.

    Returns:
        What the model sees, and what it is to tell, -1 elsewhere; (batch, length) each.
    """
    told = there & ordinary[tokens] & (draws[0] < rate)
    anything = ordinary.nonzero()[:, 0]
    index = (draws[2].clamp(max=1 - 2**-24) * len(anything)).long()
    masked = told & (draws[1] < mask_share)
    replaced = told & ~masked & (draws[1] < mask_share + random_share)
    seen = torch.where(masked, mask_id.to(tokens.dtype), tokens)
    seen = torch.where(replaced, anything[index].to(tokens.dtype), seen)
    return seen, tokens.where(told, -1)


def swap_parts(
    tokens: Tensor, types: Tensor, there: Tensor, draws: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives half of the pairs the second part of the sequence before them in the batch.

    Args:
        tokens: ids (batch, length), at least two sequences, or nothing is swapped.
        types: (batch, length), 1 in the second part and the padding behind; alike in all rows.
        there: (batch, length), True where there is a token.
        draws: (batch,), uniform in [0, 1).

    Returns:
        Tokens, which of them exist, and the label of each pair (batch,): 0 if its parts follow each
        other, 1 if not.
    """
    wrong = (draws < 0.5) & torch.tensor(len(tokens) > 1, device=tokens.device)
    moved = wrong[:, None] & (types == 1)
    return (
        torch.where(moved, tokens.roll(1, dims=0), tokens),
        torch.where(moved, there.roll(1, dims=0), there),
        wrong.long(),
    )
