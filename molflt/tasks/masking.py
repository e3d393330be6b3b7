"""Hidden tokens and swapped parts of BERT (arXiv:1810.04805), section 3.1.

Random numbers are arguments: training draws new ones at each step, and validation derives them from
the tokens of each sequence, independent of the batch.
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
        """Draws new numbers for ids (batch, length) with torch's default generator."""
        whole = torch.rand(3, *tokens.shape, device=tokens.device)
        return Draws(whole, torch.rand(len(tokens), device=tokens.device))

    @staticmethod
    def of_content(tokens: Tensor, there: Tensor) -> Draws:
        """Derives the numbers of each sequence from its tokens, independent of batch and padding.

        Args:
            tokens: ids (batch, length).
            there: mask of existing tokens (batch, length); draws are 1 elsewhere.
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
    """Hides tokens.

    Args:
        tokens: ids (batch, length).
        there: mask of existing tokens (batch, length).
        draws: (3, batch, length), uniform in [0, 1), for the choice of hidden tokens, the kind of
            replacement, and the random token.
        mask_id: id of the mask, a scalar.
        ordinary: (vocabulary,) bool, ids that may be hidden or drawn.
        rate: share of ordinary tokens to hide.
        mask_share: share of these replaced by `mask_id`.
        random_share: share of these replaced by a random ordinary id; the rest is unchanged.

    Returns:
        Input ids and targets (-1 if not hidden), (batch, length) each.
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
    """Gives half of the pairs the second part of the previous sequence in the batch.

    Args:
        tokens: ids (batch, length); nothing is swapped in a batch of one.
        types: (batch, length), 1 in the second part and the padding behind it; equal in all rows.
        there: mask of existing tokens (batch, length).
        draws: (batch,), uniform in [0, 1).

    Returns:
        Tokens, mask of existing tokens, and labels (batch,): 0 for original pairs, 1 for swapped
        ones.
    """
    wrong = (draws < 0.5) & torch.tensor(len(tokens) > 1, device=tokens.device)
    moved = wrong[:, None] & (types == 1)
    return (
        torch.where(moved, tokens.roll(1, dims=0), tokens),
        torch.where(moved, there.roll(1, dims=0), there),
        wrong.long(),
    )
