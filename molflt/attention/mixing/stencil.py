"""Sums over the points of a mesh near each token: products with a sparse matrix, differentiable."""

import warnings
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from molflt.attention.checks import in_transform


class Stencil(NamedTuple):
    """Which points of a mesh each token touches: places of a sparse matrix of tokens x points."""

    places: Tensor
    """(tokens, s) int32, points; a point may appear several times"""
    points: int
    order: Tensor
    """(tokens s,) int32, the places, counted through, sorted by their points"""
    begin: Tensor
    """(points + 1,) int32, where in `order` each point's places begin"""

    @classmethod
    def of(cls, places: Tensor, points: int) -> "Stencil":
        """Sorts the places.

        Args:
            places: (tokens, s), points of the mesh.
            points: their number.
        """
        flat = places.flatten().to(torch.int32)
        begin = torch.zeros(points + 1, dtype=torch.int32, device=flat.device)
        begin[1:] = torch.bincount(flat, minlength=points).cumsum(0)
        return cls(flat.view(places.shape), points, flat.argsort().to(torch.int32), begin)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.places)

    def matrix(self, weight: Tensor) -> Tensor:
        """The sparse matrix (tokens, points) of weights (tokens, s)."""
        step = self.places.shape[1]
        begin = torch.arange(self.tokens + 1, dtype=torch.int32, device=weight.device) * step
        size = (self.tokens, self.points)
        return _sparse(begin, self.places.flatten(), weight.flatten(), size)

    def transposed(self, weight: Tensor) -> Tensor:
        """The sparse matrix (points, tokens) of the same weights."""
        tokens = self.order // self.places.shape[1]
        size = (self.points, self.tokens)
        return _sparse(self.begin, tokens, weight.flatten()[self.order], size)


def _sparse(begin: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():  # that this layout is a beta version
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(begin, columns, values, size)


def spread(weight: Tensor, x: Tensor, stencil: Stencil) -> Tensor:
    """What tokens put on the points: sum_i w_ip x_i.

    Args:
        weight: (tokens, s).
        x: (tokens, channels).
        stencil: the places of the weights.

    Returns:
        (points, channels).
    """
    if _has_sparse_products(weight):
        return cast(Tensor, _Product.apply(weight, x, stencil, True))
    out = x.new_zeros(stencil.points, x.shape[1])
    for place, w in zip(stencil.places.unbind(1), weight.unbind(1), strict=True):
        out = out.index_add(0, place, w[:, None] * x)
    return out


def gather(weight: Tensor, y: Tensor, stencil: Stencil) -> Tensor:
    """What tokens read from the points, sum_p w_ip y_p: (points, channels) -> (tokens, channels).

    Arguments as for `spread`.
    """
    if _has_sparse_products(weight):
        return cast(Tensor, _Product.apply(weight, y, stencil, False))
    places = zip(stencil.places.unbind(1), weight.unbind(1), strict=True)
    return sum((w[:, None] * y[place] for place, w in places), y.new_zeros(1))


def _correlate(x: Tensor, y: Tensor, stencil: Stencil) -> Tensor:
    """x_i . y_p at each place: (tokens, channels) and (points, channels) -> (tokens, s)."""
    return cast(Tensor, _Correlate.apply(x, y, stencil))


def _has_sparse_products(weight: Tensor) -> bool:
    """Whether the library has products of a sparse and a dense matrix here; transforms have not."""
    if in_transform():
        return False
    return weight.is_cuda or (weight.device.type == "cpu" and torch.backends.mkl.is_available())


# The three products are the derivatives of one another: gradients of any order.


class _Product(Function):
    """Of the sparse matrix, transposed to spread, with a dense one."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, weight: Tensor, x: Tensor, stencil: Stencil, spreads: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.stencil, ctx.spreads = stencil, spreads  # type: ignore[attr-defined]
        return (stencil.transposed(weight) if spreads else stencil.matrix(weight)) @ x

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight, x = ctx.saved_tensors  # type: ignore[attr-defined]
        stencil, (grad,) = ctx.stencil, grads  # type: ignore[attr-defined]
        if ctx.spreads:  # type: ignore[attr-defined]
            return _correlate(x, grad, stencil), gather(weight, grad, stencil), None, None
        return _correlate(grad, x, stencil), spread(weight, grad, stencil), None, None


class _Correlate(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor, stencil: Stencil) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.stencil = stencil  # type: ignore[attr-defined]
        places = stencil.matrix(x.new_ones(stencil.places.shape))
        found = torch.sparse.sampled_addmm(places, x, y.mT, beta=0.0)
        return found.values().view(stencil.places.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        stencil, (grad,) = ctx.stencil, grads  # type: ignore[attr-defined]
        return gather(grad, y, stencil), spread(grad, x, stencil), None
