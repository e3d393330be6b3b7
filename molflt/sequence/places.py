"""Base class for token sequence models: positions, embeddings, and checks of ids."""

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from molflt.attention import Attention, Position, Stack
from molflt.attention.checks import (
    at_least_one,
    known_names,
    no_effect,
    one_of,
    positive,
    readable,
    tensors,
    whole,
)
from molflt.attention.keys import check_mask
from molflt.attention.positions import PositionName, known_options
from molflt.attention.positions.base import ABSOLUTE, sinusoids
from molflt.attention.positions.grid import expect_unit_scale
from molflt.attention.stack import Redrawn


class TokenModel(Redrawn):
    """Base class for token sequence models: a stack of blocks applied to embeddings and positions.

    Relative encodings use the position index times `position_scale`. Subclasses build the
    embeddings and further layers, and then call `_set_places`, which creates `places`.

    Args:
        vocabulary: number of token ids; `molflt train` takes it from the data.
        dim: width of tokens.
        heads: number of attention heads, a divisor of `dim`.
        absolute: encoding of positions, added to embeddings: "none" (sufficient with relative
            encodings in causal models, because causal attention depends on the number of earlier
            tokens), "sinusoidal" (arXiv:1706.03762, section 3.5) or "learned".
        causal: each token attends only to itself and to earlier tokens.
        max_length: maximum sequence length, and the default size of "learned" positions, of tables
            of encodings (`max_tokens`) and of mixers with a matrix over all tokens, which need it.
            With positions or a table, their size is the only limit. None for no limit.
        position: "none" or a key of `molflt.attention.POSITIONS`; the encoding is shared by all
            layers but differs between heads.
        position_options: further arguments of the encoding; `dim` defaults to 1.
        position_scale: distance between neighboring tokens, in the unit of length of the encoding;
            1 by default; must be 1 for encodings with a table of offsets.
        embedding_dropout: dropout of embeddings.
        stack: further arguments of `molflt.attention.Stack`.
    """

    _stack_name: ClassVar = "stack"
    _axes: ClassVar[tuple[int, ...]] = (1,)  # supported dimensions of relative encodings
    places: nn.Embedding | None

    def __init__(
        self,
        vocabulary: int | None,
        dim: int,
        heads: int,
        absolute: str,
        causal: bool,
        max_length: int | None = None,
        position: PositionName = "none",
        position_options: dict[str, Any] | None = None,
        position_scale: float | None = None,
        embedding_dropout: float = 0.0,
        **stack: Any,
    ) -> None:
        known_names(type(self), stack, TokenModel, Stack, Attention)
        super().__init__()
        at_least_one(dim=dim, heads=heads)
        if vocabulary is None:
            raise ValueError("vocabulary must be the number of token ids; take it from the data")
        at_least_one(vocabulary=vocabulary, max_length=1 if max_length is None else max_length)
        one_of("absolute", absolute, ABSOLUTE)
        if absolute == "learned" and max_length is None:
            raise ValueError("absolute='learned' needs max_length, the longest sequence; set it")
        if position == "none":
            no_effect("with position='none'", position_scale=position_scale)
        self.vocabulary = vocabulary
        self.dim = dim
        self.absolute = absolute
        self.max_length = max_length
        self.position_scale = 1.0 if position_scale is None else position_scale
        positive(position_scale=self.position_scale)
        limit = {} if max_length is None else {"max_tokens": max_length}
        options = {**known_options(position, dim=1, **limit), **(position_options or {})}
        self._position_options = options
        blocks = Stack(
            dim, heads, causal=causal, position=position, position_options=options, **stack
        )
        self.add_module(self._stack_name, blocks)
        if blocks.position is not None:
            one_of("position_options dim", blocks.position.dim, self._axes)
            expect_unit_scale(blocks.position, self.position_scale)
        self.embedding_dropout = nn.Dropout(embedding_dropout)

    def _set_places(self, std: float) -> None:
        self.places = None
        if self.absolute == "learned" and self.max_length is not None:
            self.places = embedding(self.max_length, self.dim, std)

    @property
    def _relative(self) -> Position | None:
        return cast(Stack, self.get_submodule(self._stack_name)).position

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens that the model accepts at once; None for no limit."""
        return self._table if self._table is not None else self.max_length

    @property
    def _table(self) -> int | None:
        # maximum number of tokens for learned positions and tables of relative encodings
        table = None if self._relative is None else self._relative.longest
        limits = [] if table is None else [math.ceil(table / self.position_scale)]
        if self.places is not None:
            limits.append(self.places.num_embeddings)
        return min(limits) if limits else None  # torch.compile rejects `default`

    def _ids(self, name: str, tokens: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Checks ids (batch, n); returns them and their indices (n,), which begin at `start`."""
        tensors(**{name: tokens})
        if tokens.ndim != 2:
            raise ValueError(
                f"{name} must be ids of shape (batch, length); got shape {tuple(tokens.shape)}"
            )
        whole(name, tokens, 0, self.vocabulary - 1, "ids of the vocabulary")
        end, longest = start + tokens.shape[1], self.longest
        if longest is not None and end > longest:
            raise ValueError(
                f"expected at most {longest} tokens; got {end}; shorten the sequence, or train "
                "with a larger max_length (or max_tokens of the position)"
            )
        return tokens.long(), torch.arange(start, end, device=tokens.device)

    def _with_places(self, x: Tensor, index: Tensor) -> Tensor:
        """Adds the absolute encoding of token indices (n,) to embeddings (batch, n, dim)."""
        if self.places is not None:
            return x + self.places(index)
        if self.absolute == "sinusoidal":
            return x + sinusoids(index, self.dim).to(x.dtype)
        return x

    def _positions(self, index: Tensor) -> Tensor | None:
        """Returns positions (1, n, l) of token indices (n,); None without a relative encoding."""
        if self._relative is None:
            return None
        # float16 cannot represent odd numbers above 2048, and bfloat16 cannot above 256
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        return self._coordinates(index).to(dtype)[None] * self.position_scale

    def _coordinates(self, index: Tensor) -> Tensor:
        return index[:, None]


def expect_first(name: str, mask: Tensor, tokens: Tensor) -> None:
    """Raises ValueError for a mask that is not (batch, length), or that pads on the left.

    Padding before the first token would shift the positions of all tokens. It is detected only if
    the values can be read on the CPU.
    """
    check_mask(mask, tokens.shape, name)
    if readable(mask) and bool((left := ~mask[:, :1] & mask).any()):
        row = int(left.any(dim=1).nonzero()[0])
        raise ValueError(
            f"{name} is False for the first token of row {row}, but positions count from this "
            "token; expected padding after the tokens; got padding before them; pad on the right"
        )


def embedding(count: int, dim: int, std: float) -> nn.Embedding:
    """Draws embeddings from a normal distribution with standard deviation `std`."""
    layer = nn.Embedding(count, dim)
    nn.init.normal_(layer.weight, std=std)
    return layer


def expect_targets(hidden: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """Returns a mask (batch, length) that is False where the target is -1.

    The shape of `hidden` is (batch, length, ...).
    """
    if targets.shape != hidden.shape[:2]:
        raise ValueError(
            f"targets must be (batch, length), {tuple(hidden.shape[:2])}; got "
            f"{tuple(targets.shape)}; pass one for each token, or -1"
        )
    signed = targets.clamp(min=-1) if targets.is_signed() else targets
    whole("targets", signed, -1, vocabulary - 1, "ids, or -1 for none")
    return targets.long() >= 0
