"""Families of shifted and rotated functions with a known minimum.

A function is f(x) = base(z) with z = z* + k R (x - x*). Here z* is the minimizer of the base, R is
a rotation drawn from the Haar measure, x* is the minimizer of f, and k maps the search domain
[-5, 5]^d to the published domain of the base. The minimum of every function is 0.

The training family, "rastrigin_like", is a quadratic form plus cosines, as in LOIS
(arXiv:1911.03787) and Open-L2O (arXiv:2103.12828), shifted to have a minimum of 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from molflt.attention.numerics import haar_rotation, rand64

HALF_WIDTH = 5.0  # half width of the search domain, which is centered at 0
_FARTHEST = 4.0  # bound on the coordinates of the minimizer

_Shape = Mapping[str, Tensor]


class Family(NamedTuple):
    """Family of functions."""

    base: Callable[[Tensor, _Shape], Tensor]
    """maps z (batch, ..., d) and the drawn parameters to values (batch, ...)"""
    half_width: float  # half width of the published domain of the base
    minimizer: float = 0.0  # each coordinate of z*
    draw: Callable[[int, torch.Generator], dict[str, Tensor]] = lambda dimension, generator: {}
    """draws the parameters of one function, given its dimension and a generator"""
    least_dimension: int = 1


def _sphere(z: Tensor, shape: _Shape) -> Tensor:
    return z.square().sum(dim=-1)


def _ellipsoid(z: Tensor, shape: _Shape) -> Tensor:
    exponents = 6 * torch.linspace(0, 1, z.shape[-1], dtype=z.dtype, device=z.device)
    return (10**exponents * z.square()).sum(dim=-1)


def _rosenbrock(z: Tensor, shape: _Shape) -> Tensor:
    first, second = z[..., :-1], z[..., 1:]
    return (100 * (second - first.square()).square() + (1 - first).square()).sum(dim=-1)


def _rastrigin(z: Tensor, shape: _Shape) -> Tensor:
    return (z.square() + 10 * (1 - (2 * math.pi * z).cos())).sum(dim=-1)


def _ackley(z: Tensor, shape: _Shape) -> Tensor:
    # the tiny number makes the gradient 0 instead of NaN at the minimum
    root = (z.square().mean(dim=-1) + 1e-300).sqrt()
    waves = (2 * math.pi * z).cos().mean(dim=-1)
    return 20 * -torch.expm1(-0.2 * root) + math.e * -torch.expm1(waves - 1)


def _griewank(z: Tensor, shape: _Shape) -> Tensor:
    axis = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    return z.square().sum(dim=-1) / 4000 + 1 - (z / axis.sqrt()).cos().prod(dim=-1)


def _levy(z: Tensor, shape: _Shape) -> Tensor:
    w = 1 + (z - 1) / 4
    first, last, inner = w[..., 0], w[..., -1], w[..., :-1]
    waves = 1 + 10 * (math.pi * inner + 1).sin().square()
    ends = (math.pi * first).sin().square()
    ends = ends + (last - 1).square() * (1 + (2 * math.pi * last).sin().square())
    return ends + ((inner - 1).square() * waves).sum(dim=-1)


def _rastrigin_like(z: Tensor, shape: _Shape) -> Tensor:
    axis = [len(z), *(1,) * (z.ndim - 2), -1]
    curvature, depth, pulse = (shape[key].view(axis) for key in ("curvature", "depth", "pulse"))
    return (curvature * z.square() + depth * (1 - (pulse * z).cos())).sum(dim=-1)


def _draw_rastrigin_like(dimension: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draws a condition number in [1, 100], depths in [0, 20], and 0.5 to 1.5 waves per length."""
    condition, depth, waves = rand64(3, generator=generator)
    factors = rand64(dimension, generator=generator)
    exponents = torch.linspace(-0.5, 0.5, dimension, dtype=torch.float64, device="cpu")
    return {
        "curvature": 10 ** (2 * condition * exponents),
        "depth": 20 * depth * (0.5 + 0.5 * factors),
        "pulse": 2 * math.pi * (0.5 + waves)[None],
    }


FAMILIES = {
    "rastrigin_like": Family(_rastrigin_like, 5.12, draw=_draw_rastrigin_like),
    "rastrigin": Family(_rastrigin, 5.12),
    "sphere": Family(_sphere, 5.0),
    "ellipsoid": Family(_ellipsoid, 5.0),
    "rosenbrock": Family(_rosenbrock, 2.048, 1.0, least_dimension=2),
    "ackley": Family(_ackley, 32.768),
    "griewank": Family(_griewank, 600.0),
    "levy": Family(_levy, 10.0, 1.0),
}
"""families by name; the first is used for training"""

UNSEEN = ("ellipsoid", "rosenbrock", "ackley", "griewank", "levy")
"""families for tests, which training does not use"""


class Functions(NamedTuple):
    """Batch of functions of one family, one for each population; all tensors are float64."""

    family: str
    minimizer: Tensor  # x*, (batch, d)
    rotation: Tensor  # R, (batch, d, d)
    shape: dict[str, Tensor]  # further drawn parameters, each (batch, ...)

    @classmethod
    def draw(cls, family: str, dimension: int, generators: Sequence[torch.Generator]) -> Self:
        """Draws one function from each CPU generator, independently of the other functions."""
        kind = FAMILIES[family]
        if dimension < kind.least_dimension:
            raise ValueError(
                f"{family} needs at least {kind.least_dimension} dimensions; got {dimension}"
            )
        minimizers, rotations, shapes = [], [], []
        for generator in generators:
            minimizers.append(_FARTHEST * (2 * rand64(dimension, generator=generator) - 1))
            rotations.append(haar_rotation(dimension, generator))
            shapes.append(kind.draw(dimension, generator))
        shape = {name: torch.stack([drawn[name] for drawn in shapes]) for name in shapes[0]}
        return cls(family, torch.stack(minimizers), torch.stack(rotations), shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes differentiable values (batch, ...) at points (batch, ..., d)."""
        kind = FAMILIES[self.family]
        moved = x.reshape(len(x), -1, x.shape[-1]) - self.minimizer[:, None]
        turned = (moved @ self.rotation.mT).view(x.shape)
        return kind.base(kind.minimizer + kind.half_width / HALF_WIDTH * turned, self.shape)

    def only(self, index: int) -> Self:
        """Returns a batch that contains only the function with this index."""
        return tree_map_only(Tensor, lambda drawn: drawn[index : index + 1], self)

    def to(self, device: torch.device) -> Self:
        """Returns the functions, moved to a device."""
        return tree_map_only(Tensor, lambda drawn: drawn.to(device), self)
