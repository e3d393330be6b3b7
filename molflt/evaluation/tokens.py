"""What evaluations of models of token sequences share."""

from __future__ import annotations

from pathlib import Path

import torch

from molflt import plots
from molflt.attention import Position

__all__ = ["draw_encoding", "expect_finite", "expect_size", "read_kept"]


def read_kept(path: Path, what: str) -> bytes:
    """A file that training has put into the run; FileNotFoundError if it is not there."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the {what} of this run")
    return path.read_bytes()


def expect_size(name: str, found: int, size: int, what: str) -> None:
    """Raises ValueError for a vocabulary or a tokenizer of another number of ids than a model."""
    if found != size:
        raise ValueError(
            f"{name}: {found:,} tokens, but the checkpoint has {size:,}; expected the {what} that "
            "the model was trained with; put it back"
        )


def expect_finite(name: str, values: torch.Tensor) -> None:
    """Raises ValueError for a loss, or sums of losses, that are not finite."""
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"{name}: the probability of a token is not finite; expected a number; use another "
            "checkpoint"
        )


def draw_encoding(
    position: Position | None, scale: float, tokens: int, longest: int | None, png: Path
) -> list[Path]:
    """Draws a relative encoding over the tokens of a sequence; nothing if there is none to see.

    Args:
        position: of the stack.
        scale: distance of neighboring tokens, in the encoding's unit of length.
        tokens: of a sequence.
        longest: most tokens that the model takes.
        png: file to write.

    Returns:
        What was written.
    """
    if position is None or not plots.has_bias(position):
        return []
    reach = (min(tokens, longest or tokens) - 1) * scale
    plots.rpe_curves(position, png, reach, "tokens" if scale == 1 else f"{1 / scale:g} tokens")
    return [png]
