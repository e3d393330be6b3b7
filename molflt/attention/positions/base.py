"""Base class for relative positional encodings."""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from molflt.attention.checks import is_traced
from molflt.attention.encodings import Encoding
from molflt.attention.keys import check_width
from molflt.attention.numerics import at_least_float32, options_of

MIXINGS = ("linear", "quadratic", "softmax")
MixingName = Literal["linear", "quadratic", "softmax", "auto", "triton"]

ABSOLUTE = ("none", "sinusoidal", "learned")  # encodings added to tokens before attention
ADDED = ("f", "added to the logit")
AS_FACTOR = ("f", "exp f multiplies the weight")


class Position(nn.Module):
    """Base class for positional encodings.

    A new encoding overrides `forward`, sets its class attributes and is registered in `POSITIONS`.
    """

    paper: ClassVar[str] = ""  #: source of the encoding
    cost: ClassVar[str] = ""  #: operations for N tokens, m features and values of width d
    dim: int = 1  #: dimension l of the positions
    mixings: ClassVar[tuple[str, ...]] = MIXINGS  #: supported mixings
    decodes: ClassVar[bool] = True  #: True if linear causal attention has a state of constant size
    #: True if training should redraw its random numbers along with random features. Nodes of a
    #: spectrum are kept, because the mask is learned with them.
    redraws: ClassVar[bool] = False
    weighs: ClassVar[bool] = True  #: False if the encoding only rotates queries and keys
    placement: ClassVar[tuple[str, str]] = ADDED  #: plotted quantity, and how it enters attention
    grid: ClassVar[bool] = False  #: True if tokens must be ordered along a regular grid
    longest: int | None = None  #: upper bound on positions along every axis, if they have one
    extra_repr = options_of

    def width(self, head_dim: int) -> int:
        """Returns the input width of the feature map for heads of width `head_dim`."""
        return head_dim

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        """Evaluates the encoding.

        Args:
            mixing: one of `mixings`.
            positions: positions of the queries, (batch, queries, l).
            key_positions: (batch, keys, l); the same object as `positions` if the two are equal.
        """
        raise NotImplementedError(f"{type(self).__name__} must override forward")

    def check(self, mixing: str, gate: bool, heads: int, head_dim: int) -> None:
        """Raises ValueError if attention with these choices and sizes cannot use the encoding.

        An encoding that depends on `heads` or `head_dim` has the number as an attribute. All heads
        share an encoding of one head.
        """
        name = type(self).__name__
        allowed = {"heads": (heads, 1), "head_dim": (head_dim,)}
        for size, numbers in allowed.items():
            own = getattr(self, size, numbers[0])
            if own not in numbers:
                raise ValueError(
                    f"{name} was built for {size}={own}; got attention with {size}={numbers[0]}; "
                    "use the same number"
                )
        if mixing not in self.mixings:
            raise ValueError(
                f"{name} does not support mixing={mixing!r}; expected {' or '.join(self.mixings)}"
            )
        if gate and not self.decodes:
            raise ValueError(
                f"gate=True needs a running state, which {name} does not have; use gate=False"
            )

    def use_for(self, mixing: str) -> None:
        """Freezes parameters that a mixing does not use."""

    def check_range(self, positions: Tensor, max_tokens: int, integers: bool = False) -> None:
        """Raises ValueError unless positions are in [0, max_tokens) and, if required, integers."""
        if is_traced() or not positions.numel():
            return
        low, high = (float(end) for end in positions.detach().aminmax())
        # NaN fails this comparison.
        if not (low >= 0 and high < max_tokens):
            raise ValueError(
                f"positions of {type(self).__name__} must be in [0, {max_tokens}); got {low:g} to "
                f"{high:g}; count from 0, fill padding with 0, or raise max_tokens"
            )
        if integers and not (positions == positions.long()).all():
            raise ValueError(f"positions of {type(self).__name__} must be integers; got fractions")

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new random numbers in place; use the same seed on all ranks."""


class Positioned(nn.Module):
    """Base class for modules that can own a position."""

    position: Position | None
    dim: int  #: width of tokens
    __call__: Callable[..., Tensor]

    def __init__(self, position: Position | None) -> None:
        super().__init__()
        if not (position is None or isinstance(position, Position)):
            raise TypeError(f"position must be a Position of make_position; got {position!r}")
        self.position = position

    def _evaluate(
        self, mixing: str, x: Tensor, positions: Tensor | None, key_positions: Tensor | None
    ) -> Encoding | None:
        """Evaluates the position for tokens x, or returns None if the module has no position."""
        check_width(self.dim, x=x)
        position, name = self.position, type(self).__name__.lower()
        if position is None:
            if positions is not None or key_positions is not None:
                raise ValueError(f"got positions, but the {name} was built without position=...")
            return None
        if positions is None:
            raise ValueError(
                f"{type(position).__name__} needs positions, (batch, tokens, {position.dim})"
            )
        keys = positions if key_positions is None else key_positions
        check_width(position.dim, positions=positions, key_positions=keys)
        if positions.shape[1] != x.shape[1] or positions.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"positions must have one row for each token of x, {tuple(x.shape[:2])}, or one "
                f"sequence for all; got {tuple(positions.shape[:2])}"
            )
        return position(mixing, positions, keys)

    def share_position(self) -> None:
        """Transfers the parameters of the position to the enclosing module.

        It remains accessible here but unregistered: a parameter has one name in a checkpoint.
        """
        position = self.position
        if position is not None:
            self._modules.pop("position", None)
            object.__setattr__(self, "position", position)


def check_tokens(count: int, x: Tensor) -> None:
    """Raises ValueError unless x, (batch, heads, tokens, d), has one token per position."""
    if x.shape[2] != count:
        raise ValueError(
            f"the encoding has {count} positions; got {x.shape[2]} tokens; in decoding, pass the "
            "key_positions of all tokens so far"
        )


def differences(positions: Tensor, key_positions: Tensor) -> Tensor:
    """Returns r_i - r_j: (batch, queries, l), (batch, keys, l) -> (batch, queries, keys, l)."""
    return _real(positions)[:, :, None] - _real(key_positions)[:, None]


def _real(positions: Tensor) -> Tensor:
    """Converts positions to at least float32, and integers to float64, for accurate phases."""
    return at_least_float32(positions) if positions.is_floating_point() else positions.double()


def sinusoids(index: Tensor, dim: int) -> Tensor:
    """Returns sinusoidal encodings (arXiv:1706.03762, section 3.5): (n,) -> float64 (n, dim)."""
    # In float32, the phase at position 10^4 would have only 3 digits.
    half = torch.arange((dim + 1) // 2, dtype=torch.float64, device=index.device)
    phase = index.double()[:, None] * torch.pow(10000.0, -2 * half / dim)
    return torch.cat((phase.sin(), phase.cos()), dim=-1)[:, :dim]
