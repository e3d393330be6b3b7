"""Products with sparse matrices, differentiable to any order."""

import warnings
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from molflt.attention.checks import in_transform

_TRANSIENT = 2**22  # numbers that one piece of the plain form may hold at once


class Pattern(NamedTuple):
    """Pattern of a sparse matrix: mesh points of each token, or keys of each query."""

    begin: Tensor
    """(rows + 1,) int32, start of each row in `places`"""
    places: Tensor
    """(n,) int32, columns; a row may contain a column several times"""
    order: Tensor
    """(n,) int32, indices of the places sorted by column"""
    begin_sorted: Tensor
    """(columns + 1,) int32, start of each column in `order`"""
    rows_sorted: Tensor
    """(n,) int32, rows of the places in that order"""

    @classmethod
    def of(cls, row: Tensor, column: Tensor, rows: int, columns: int) -> "Pattern":
        """Builds the pattern from the rows and columns (n,) int64 of places sorted by row."""
        order = column.argsort(stable=True)
        return cls(
            _begin(row, rows),
            column.int(),
            order.int(),
            _begin(column, columns),
            row[order].int(),
        )

    @property
    def size(self) -> tuple[int, int]:
        """Returns the numbers of rows and columns."""
        return len(self.begin) - 1, len(self.begin_sorted) - 1

    def rows(self) -> Tensor:
        """Returns the row of each place, (n,) int32."""
        number = torch.arange(self.size[0], dtype=torch.int32, device=self.begin.device)
        return number.repeat_interleave(self.begin.diff(), output_size=len(self.places))

    def turned(self, weight: Tensor) -> Tensor:
        """Returns weights (n,) sorted by column."""
        return weight.index_select(0, self.order)

    def matrix(self, weight: Tensor) -> Tensor:
        """Returns the sparse matrix (rows, columns) of weights (n,)."""
        return _sparse(self.begin, self.places, weight, self.size)

    def transposed(self, turned: Tensor) -> Tensor:
        """Returns the sparse matrix (columns, rows) of weights sorted by column."""
        return _sparse(self.begin_sorted, self.rows_sorted, turned, self.size[::-1])


def _begin(index: Tensor, size: int) -> Tensor:
    begin = torch.zeros(size + 1, dtype=torch.int32, device=index.device)
    begin[1:] = torch.bincount(index, minlength=size).cumsum(0)
    return begin


def _sparse(begin: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():  # torch warns that the layout is in beta
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(
            begin, columns, values, size, device=values.device, check_invariants=False
        )


def spread(weight: Tensor, x: Tensor, pattern: Pattern, turned: Tensor | None = None) -> Tensor:
    """Multiplies the transposed matrix by x, sum_i w_ip x_i: from tokens to points.

    Args:
        weight: (n,).
        x: (rows, channels); the result is (columns, channels).
        pattern: places of the weights.
        turned: `pattern.turned(weight)`, if already computed.
    """
    if has_sparse_products(weight):
        return cast(Tensor, _Product.apply(weight, x, pattern, True, turned))
    return _plain(weight, x, pattern.rows(), pattern.places, pattern.size[1])


def gather(weight: Tensor, y: Tensor, pattern: Pattern, turned: Tensor | None = None) -> Tensor:
    """Multiplies the matrix by y: from points (columns, channels) to tokens (rows, channels)."""
    if has_sparse_products(weight):
        return cast(Tensor, _Product.apply(weight, y, pattern, False, turned))
    return _plain(weight, y, pattern.places, pattern.rows(), pattern.size[0])


def _plain(weight: Tensor, x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
    out = x.new_zeros(size, x.shape[1])
    step = max(1, _TRANSIENT // max(1, x.shape[1]))
    for start in range(0, len(source), step):
        part = slice(start, start + step)
        out = out.index_add(0, target[part], weight[part, None] * x[source[part]])
    return out


def correlate(x: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
    """Returns x_i . y_p at each place: (rows, channels) and (columns, channels) -> (n,)."""
    if not has_sparse_products(x):
        return (x[pattern.rows()] * y[pattern.places]).sum(dim=-1)
    return cast(Tensor, _Correlate.apply(x, y, pattern))


def has_sparse_products(weight: Tensor) -> bool:
    """Returns True if sparse-dense products are supported here; transforms do not support them."""
    if in_transform():
        return False
    return weight.is_cuda or (weight.device.type == "cpu" and torch.backends.mkl.is_available())


def _as_given(x: Tensor) -> torch.autocast:
    """Turns off autocast, because sparse products do not support half precision."""
    return torch.autocast(x.device.type, enabled=False)


# The derivatives of each product are the other two, which allows derivatives of any order.


class _Product(Function):
    """Product of the sparse matrix, or its transpose, and a dense matrix."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        weight: Tensor,
        x: Tensor,
        pattern: Pattern,
        spreads: bool,
        turned: Tensor | None,
    ) -> Tensor:
        # Save only what a gradient needs: the mesh of a chunk is large.
        by_weight, by_x = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        kept = weight if by_x else None, x if by_weight else None
        ctx.save_for_backward(*kept)  # type: ignore[arg-type]
        ctx.pattern, ctx.spreads = pattern, spreads  # type: ignore[attr-defined]
        ctx.turned = turned  # type: ignore[attr-defined]
        with _as_given(x):
            if not spreads:
                return pattern.matrix(weight) @ x
            return pattern.transposed(pattern.turned(weight) if turned is None else turned) @ x

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors  # type: ignore[attr-defined]
        pattern, turned, (grad,) = ctx.pattern, ctx.turned, grads  # type: ignore[attr-defined]
        if ctx.spreads:  # type: ignore[attr-defined]
            by_weight = None if x is None else correlate(x, grad, pattern)
            by_x = None if weight is None else gather(weight, grad, pattern, turned)
        else:
            by_weight = None if x is None else correlate(grad, x, pattern)
            by_x = None if weight is None else spread(weight, grad, pattern, turned)
        return by_weight, by_x, None, None, None


class _Correlate(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
        by_x, by_y = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        kept = x if by_y else None, y if by_x else None
        ctx.save_for_backward(*kept)  # type: ignore[arg-type]
        ctx.pattern = pattern  # type: ignore[attr-defined]
        with _as_given(x):
            if len(pattern.places) > len(x) * len(y):  # many images, too many for sampled_addmm
                return (x @ y.mT)[pattern.rows(), pattern.places]
            places = pattern.matrix(x.new_ones(len(pattern.places)))
            found: Tensor = torch.sparse.sampled_addmm(places, x, y.mT, beta=0.0)
            return found.values()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        pattern, (grad,) = ctx.pattern, grads  # type: ignore[attr-defined]
        by_x = None if y is None else gather(grad, y, pattern)
        by_y = None if x is None else spread(grad, x, pattern)
        return by_x, by_y, None
