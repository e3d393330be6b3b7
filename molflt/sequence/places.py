"""Shared by models of token sequences: checks of ids, places of tokens."""

import math

import torch
from torch import Tensor, nn

from molflt.attention import Position, Stack
from molflt.attention.checks import one_of, tensors, whole
from molflt.attention.positions.absolute import ABSOLUTE, sinusoids


def embedding(count: int, dim: int, std: float) -> nn.Embedding:
    """Embeddings drawn from a normal distribution of that width."""
    made = nn.Embedding(count, dim)
    nn.init.normal_(made.weight, std=std)
    return made


def longest_of(
    position: Position | None,
    position_scale: float,
    places: nn.Embedding | None,
    max_length: int | None = None,
) -> int | None:
    """Most tokens that a model takes; None without a limit.

    Args:
        position: the encoding.
        position_scale: distance of neighboring tokens, in its unit of length.
        places: one vector per place.
        max_length: the limit of models without a table and learned places.
    """
    table = None if position is None else position.longest
    limits = [] if table is None else [math.ceil(table / position_scale)]
    if places is not None:
        limits.append(places.num_embeddings)
    return min(limits, default=max_length)


def expect_targets(hidden: Tensor, targets: Tensor, vocabulary: int, none: str) -> Tensor:
    """Returns a mask of tokens with a target, (batch, length) bool.

    Args:
        hidden: (batch, length, dim).
        targets: ids (batch, length), -1 for none.
        vocabulary: number of ids.
        none: what -1 means, for messages.

    Raises:
        TypeError: something else than tensors.
        ValueError: targets of another shape, or out of range.
    """
    tensors(hidden=hidden, targets=targets)
    if targets.shape != hidden.shape[:2]:
        raise ValueError(
            f"targets must be (batch, length), {tuple(hidden.shape[:2])}; got "
            f"{tuple(targets.shape)}; give one for each token, -1 where there is {none}"
        )
    whole("targets", targets.clamp(min=-1), -1, vocabulary - 1, "ids, or none")
    return targets >= 0


def expected_vocabulary(vocabulary: int | None) -> int:
    """The number of token ids; ValueError unless there is one."""
    if vocabulary is None or vocabulary < 1:
        raise ValueError(
            f"vocabulary must be the number of token ids, at least 1; got {vocabulary}; take it "
            "from the data"
        )
    return vocabulary


def expect_line(position: Position | None) -> None:
    """Raises ValueError for an encoding of more than one dimension."""
    if position is not None and position.dim != 1:
        raise ValueError(
            f"tokens have one coordinate; got position_options dim={position.dim}; leave it out"
        )


def check_places(
    absolute: str, max_length: int | None, position_scale: float | None, dim: int
) -> None:
    """Raises ValueError for options of places that do not go together."""
    one_of("absolute", absolute, ABSOLUTE)
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1; got {max_length}")
    if absolute == "learned" and max_length is None:
        raise ValueError("absolute='learned' needs max_length, the longest sequence; set it")
    if absolute == "sinusoidal" and dim % 2:
        raise ValueError(f"absolute='sinusoidal' needs an even dim; got {dim}")
    if position_scale is not None and not position_scale > 0:
        raise ValueError(f"position_scale must be positive; got {position_scale}")


def expect_length(length: int, longest: int | None) -> None:
    """Raises ValueError for more tokens than a model can be given at once."""
    if longest is not None and length > longest:
        raise ValueError(
            f"the model takes at most {longest} tokens; got {length}; cut the sequence, or train "
            "with a larger max_length (or max_tokens of the position)"
        )


def with_places(x: Tensor, index: Tensor, absolute: str, places: nn.Embedding | None) -> Tensor:
    """Embeddings (batch, n, dim) with what tells their places, of index (n,), apart."""
    if places is not None:
        return x + places(index)
    return x + sinusoids(index, x.shape[-1]).to(x.dtype) if absolute == "sinusoidal" else x


def positions_of(index: Tensor, stack: Stack, scale: float, dtype: torch.dtype) -> Tensor | None:
    """Index (n,) as positions (1, n, 1) in the encoding's unit; None without an encoding.

    At least float32: half precision cannot represent odd numbers beyond 2048, nor bfloat16 beyond
        256.
    """
    if stack.position is None:
        return None
    return (index.to(torch.promote_types(dtype, torch.float32)) * scale)[None, :, None]
