"""Encodings based on angles proportional to position: the rotary and cosFormer encodings."""

import functools
import math

import torch
from torch import Tensor

from molflt.attention.checks import at_least_one, positive
from molflt.attention.encodings import Encoding, Kernel, Rotation
from molflt.attention.numerics import at_least_float32
from molflt.attention.positions.base import Position, _real, check_tokens


class RotaryPosition(Position):
    """Rotary encoding: rotates pairs of coordinates by angles proportional to the position.

    Pair p of axis a is rotated by theta_p r_a, where theta_p = base^(-p / P) for P pairs per axis.
    This is RoFormer (arXiv:2104.09864), section 3.2.2, with adjacent pairs as in its eq. 34. In
    several dimensions, axes have equally many pairs; the remaining coordinates do not rotate.

    The product of a rotated query and key depends only on r_i - r_j, and so does softmax attention.
    Feature maps receive queries and keys separately. Maps that estimate exp(q . k) without bias
    keep this property in expectation over their draws; other maps (elu, relu, learned maps) do not
    have it. RoFormer's eq. 19 rotates after the feature map; products can then become negative.

    Args:
        head_dim: width d of queries and keys, at least 2 `dim`.
        dim: dimension l of positions.
        base: approximate ratio of the fastest to the slowest frequency; one unit of length rotates
            the first pair by one radian.
    """

    weighs = False
    paper = "2104.09864, sec. 3.2.2"
    cost = "N m d"

    def __init__(self, head_dim: int, dim: int = 1, base: float = 10000.0) -> None:
        super().__init__()
        at_least_one(dim=dim)
        if head_dim < 2 * dim:
            raise ValueError(f"head_dim must be at least {2 * dim} for {dim} axes; got {head_dim}")
        positive(base=base)
        self.head_dim = head_dim
        self.dim = dim
        self.base = base
        self.pairs = head_dim // (2 * dim)  # per axis

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        turn = functools.partial(_rotate, self._waves(positions))
        return Rotation(turn, functools.partial(_rotate, self._waves(key_positions)))

    def _waves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of the angles at positions (b, n, l), each (b, 1, n, l P)."""
        positions = _real(positions)
        steps = torch.arange(self.pairs, dtype=positions.dtype, device=positions.device)
        angles = positions[..., None] * torch.pow(self.base, -steps / self.pairs)  # [b, n, l, P]
        angles = angles.flatten(-2).unsqueeze(1)
        return angles.cos(), angles.sin()


class CosinePosition(Position):
    """cosFormer's re-weighting: multiplies phi_i . phi_j by cos(pi (i - j) / 2M).

    This is a positional kernel of rank 2 with U_i = V_i = [cos, sin](pi i / 2M), positive for
    |i - j| < M. In the authors' code, M is the length of the batch, and outputs depend on padding.

    Args:
        max_tokens: M, in units of length (1 for tokens). Positions are in [0, M).
    """

    paper = "2202.08791, eq. 10"
    cost = "N m 2d"
    mixings = ("linear", "quadratic")

    def __init__(self, max_tokens: int = 512) -> None:
        super().__init__()
        at_least_one(max_tokens=max_tokens)
        self.max_tokens = self.longest = max_tokens

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        return Kernel(self._waves(positions), self._waves(key_positions))

    def _waves(self, positions: Tensor) -> Tensor:
        """Returns [cos, sin] of pi i / 2M: (b, n, 1) -> (b, 1, n, 2)."""
        self.check_range(positions, self.max_tokens)
        angles = _real(positions).unsqueeze(1) * (0.5 * math.pi / self.max_tokens)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rotate(waves: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Rotates adjacent pairs of coordinates of x (batch, heads, n, d) and keeps its dtype."""
    check_tokens(waves[0].shape[-2], x)
    full = at_least_float32(x)
    cos, sin = (wave.to(full.dtype) for wave in waves)
    turning = 2 * cos.shape[-1]
    first, second = full[..., :turning].unflatten(-1, (-1, 2)).unbind(dim=-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return torch.cat((turned.flatten(-2), full[..., turning:]), dim=-1).to(x.dtype)
