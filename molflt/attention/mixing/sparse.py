"""Products with sparse matrices, differentiable to any order."""

import warnings
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from molflt.attention.checks import in_transform

_TRANSIENT = 2**22  # largest number of elements per piece in `_plain`


class Pattern(NamedTuple):
    """Row and column of each entry of a sparse matrix, such as a token and a mesh point."""

    begin: Tensor  # (rows + 1,) int32, start of each row in `places`
    places: Tensor  # (n,) int32, columns; a row may contain a column several times
    order: Tensor  # (n,) int32, indices of the places sorted by column
    begin_sorted: Tensor  # (columns + 1,) int32, start of each column in `order`
    rows_sorted: Tensor  # (n,) int32, rows of the places in that order

    @classmethod
    def of(cls, row: Tensor, column: Tensor, rows: int, columns: int) -> "Pattern":
        """Builds the pattern from int64 row and column indices, each (n,), sorted by row."""
        order = column.argsort(stable=True)
        starts = _begin(row, rows), _begin(column, columns)
        return cls(starts[0], column.int(), order.int(), starts[1], row[order].int())

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self.begin) - 1, len(self.begin_sorted) - 1

    def rows(self) -> Tensor:
        """Returns the row of each entry as an int32 tensor (n,)."""
        number = torch.arange(self.size[0], dtype=torch.int32, device=self.begin.device)
        return number.repeat_interleave(self.begin.diff(), output_size=len(self.places))


def _begin(index: Tensor, size: int) -> Tensor:
    begin = torch.zeros(size + 1, dtype=torch.int32, device=index.device)
    begin[1:] = torch.bincount(index, minlength=size).cumsum(0)
    return begin


def _sparse(pattern: Pattern, weight: Tensor, transposed: bool = False) -> Tensor:
    """Returns the sparse matrix (rows, columns) with entries `weight` (n,), or its transpose."""
    begin, places, size = pattern.begin, pattern.places, pattern.size
    if transposed:
        begin, places, size = pattern.begin_sorted, pattern.rows_sorted, size[::-1]
        weight = weight.index_select(0, pattern.order)
    with warnings.catch_warnings():  # torch warns that the layout is in beta
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(
            begin, places, weight, size, device=weight.device, check_invariants=False
        )


def spread(weight: Tensor, x: Tensor, pattern: Pattern) -> Tensor:
    """Computes sum_i w_ip x_i, where w (n,) are the entries: x (rows, c) -> (columns, c)."""
    if has_sparse_products(weight):
        return cast(Tensor, _Product.apply(weight, x, pattern, True))
    return _plain(weight, x, pattern.rows(), pattern.places, pattern.size[1])


def gather(weight: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
    """Computes sum_p w_ip y_p, where w (n,) are the entries: y (columns, c) -> (rows, c)."""
    if has_sparse_products(weight):
        return cast(Tensor, _Product.apply(weight, y, pattern, False))
    return _plain(weight, y, pattern.places, pattern.rows(), pattern.size[0])


def _plain(weight: Tensor, x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
    out = x.new_zeros(size, x.shape[1])
    step = max(1, _TRANSIENT // max(1, x.shape[1]))
    for start in range(0, len(source), step):
        part = slice(start, start + step)
        out = out.index_add(0, target[part], weight[part, None] * x[source[part]])
    return out


def correlate(x: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
    """Computes x_i . y_p for each entry: x (rows, c), y (columns, c) -> (n,)."""
    if not has_sparse_products(x):
        return (x[pattern.rows()] * y[pattern.places]).sum(dim=-1)
    return cast(Tensor, _Correlate.apply(x, y, pattern))


def has_sparse_products(weight: Tensor) -> bool:
    """Returns True if the device of `weight` supports products of sparse and dense matrices.

    Returns False inside `torch.func` transforms, which do not support these products.
    """
    if in_transform():
        return False
    return weight.is_cuda or (weight.device.type == "cpu" and torch.backends.mkl.is_available())


def _full_precision(x: Tensor) -> torch.autocast:
    # Sparse products do not support half precision.
    return torch.autocast(x.device.type, enabled=False)


# The derivatives of each of `spread`, `gather` and `correlate` are given by the other two.


class _Product(Function):
    """Product of a sparse matrix, or its transpose, and a dense matrix."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, weight: Tensor, x: Tensor, pattern: Pattern, spreads: bool
    ) -> Tensor:
        # Save only what a gradient needs, because the mesh of a chunk is large.
        by_weight, by_x = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        kept = weight if by_x else None, x if by_weight else None
        ctx.save_for_backward(*kept)  # type: ignore[arg-type]
        ctx.pattern, ctx.spreads = pattern, spreads  # type: ignore[attr-defined]
        with _full_precision(x):
            return _sparse(pattern, weight, spreads) @ x

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors  # type: ignore[attr-defined]
        pattern, spreads, (grad,) = ctx.pattern, ctx.spreads, grads  # type: ignore[attr-defined]
        sides = (x, grad) if spreads else (grad, x)
        by_weight = None if x is None else correlate(sides[0], sides[1], pattern)
        transposed = gather if spreads else spread
        by_x = None if weight is None else transposed(weight, grad, pattern)
        return by_weight, by_x, None, None


class _Correlate(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
        by_x, by_y = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        kept = x if by_y else None, y if by_x else None
        ctx.save_for_backward(*kept)  # type: ignore[arg-type]
        ctx.pattern = pattern  # type: ignore[attr-defined]
        with _full_precision(x):
            if len(pattern.places) > len(x) * len(y):  # too many images for sampled_addmm
                return (x @ y.mT)[pattern.rows(), pattern.places]
            places = _sparse(pattern, x.new_ones(len(pattern.places)))
            found: Tensor = torch.sparse.sampled_addmm(places, x, y.mT, beta=0.0)
            return found.values()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        pattern, (grad,) = ctx.pattern, grads  # type: ignore[attr-defined]
        by_x = None if y is None else gather(grad, y, pattern)
        by_y = None if x is None else spread(grad, x, pattern)
        return by_x, by_y, None
