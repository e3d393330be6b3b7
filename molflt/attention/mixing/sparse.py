"""Products with sparse matrices, differentiable to any order."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from molflt.attention.checks import in_transform
from molflt.attention.numerics import pieces

_TRANSIENT = 2**22  # largest number of elements per piece in `_plain`

# torch warns once that the layout is in beta. Later, other threads would also lose their warnings.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0], [], [], (0, 0), device="cpu", check_invariants=False)


class Pattern(NamedTuple):
    """Row and column of each entry of a sparse matrix, such as a token and a mesh point."""

    begin: Tensor  # (rows + 1,) int32, start of each row in `places`
    places: Tensor  # (n,) int32, column of each entry; a row may contain a column several times
    order: Tensor  # (n,) int32, indices of the entries sorted by column
    begin_sorted: Tensor  # (columns + 1,) int32, start of each column in `order`
    rows_sorted: Tensor  # (n,) int32, rows of the entries in that order

    @classmethod
    def of(cls, row: Tensor, column: Tensor, rows: int, columns: int) -> "Pattern":
        """Builds the pattern from int64 row and column indices, each (n,), sorted by row."""
        order = column.argsort(stable=True)
        begin, begin_sorted = _begin(row, rows), _begin(column, columns)
        return cls(begin, column.int(), order.int(), begin_sorted, row[order].int())

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self.begin) - 1, len(self.begin_sorted) - 1

    def rows(self) -> Tensor:
        """Returns the row of each entry as an int32 tensor (n,)."""
        row = torch.arange(self.size[0], dtype=torch.int32, device=self.begin.device)
        return row.repeat_interleave(self.begin.diff(), output_size=len(self.places))


def _begin(index: Tensor, size: int) -> Tensor:
    """Returns the start of each run of 0 to size - 1 in sorted indices: (size + 1,) int32."""
    return F.pad(torch.bincount(index, minlength=size).cumsum(0), (1, 0)).int()


def _sparse(pattern: Pattern, weight: Tensor, transposed: bool = False) -> Tensor:
    """Returns the sparse matrix (rows, columns) with entries `weight` (n,), or its transpose."""
    begin, places, size = pattern.begin, pattern.places, pattern.size
    if transposed:
        begin, places, size = pattern.begin_sorted, pattern.rows_sorted, size[::-1]
        weight = weight.index_select(0, pattern.order)
    return torch.sparse_csr_tensor(
        begin, places, weight, size, device=weight.device, check_invariants=False
    )


def spread(weight: Tensor, x: Tensor, pattern: Pattern) -> Tensor:
    """Computes sum_i w_ip x_i, where w (n,) are the entries: x (rows, c) -> (columns, c)."""
    if has_sparse_products(weight):
        return _Product.apply(weight, x, pattern, True)
    return _plain(weight, x, pattern.rows(), pattern.places, pattern.size[1])


def gather(weight: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
    """Computes sum_p w_ip y_p, where w (n,) are the entries: y (columns, c) -> (rows, c)."""
    if has_sparse_products(weight):
        return _Product.apply(weight, y, pattern, False)
    return _plain(weight, y, pattern.places, pattern.rows(), pattern.size[0])


def _plain(weight: Tensor, x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
    """Adds w_n x_source(n) to row target(n) of the result (size, c), for each entry n."""
    out = x.new_zeros(size, x.shape[1])
    for part in pieces(len(source), max(1, _TRANSIENT // max(1, x.shape[1]))):
        out = out.index_add(0, target[part], weight[part, None] * x[source[part]])
    return out


def correlate(x: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
    """Computes x_i . y_p for each entry: x (rows, c), y (columns, c) -> (n,)."""
    if not has_sparse_products(x):
        return (x[pattern.rows()] * y[pattern.places]).sum(dim=-1)
    return _Correlate.apply(x, y, pattern)


def has_sparse_products(weight: Tensor) -> bool:
    """Returns True if the device of `weight` supports products of sparse and dense matrices.

    Returns False inside `torch.func` transforms, which do not support these products.
    """
    if in_transform():
        return False
    return weight.is_cuda or (weight.device.type == "cpu" and torch.backends.mkl.is_available())


# The derivatives of each of `spread`, `gather` and `correlate` are given by the other two. Sparse
# products do not support half precision.


class _Product(Function):
    """Product of a sparse matrix, or its transpose, and a dense matrix."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, pattern: Pattern, spreads: bool) -> Tensor:
        # Save only what a gradient needs, because the mesh of a chunk is large.
        by_weight, by_x = ctx.needs_input_grad[:2]
        ctx.save_for_backward(weight if by_x else None, x if by_weight else None)
        ctx.pattern, ctx.spreads = pattern, spreads
        with torch.autocast(x.device.type, enabled=False):
            return _sparse(pattern, weight, spreads) @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, x = ctx.saved_tensors
        of_rows, of_columns = (x, grad) if ctx.spreads else (grad, x)
        by_weight = None if x is None else correlate(of_rows, of_columns, ctx.pattern)
        transposed = gather if ctx.spreads else spread
        by_x = None if weight is None else transposed(weight, grad, ctx.pattern)
        return by_weight, by_x, None, None


class _Correlate(Function):
    """Products of rows of two matrices, one for each entry of a pattern."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
        by_x, by_y = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if by_y else None, y if by_x else None)
        ctx.pattern = pattern
        with torch.autocast(x.device.type, enabled=False):
            if len(pattern.places) > len(x) * len(y):  # sampled_addmm needs fewer entries
                return (x @ y.mT)[pattern.rows(), pattern.places]
            places = _sparse(pattern, x.new_ones(len(pattern.places)))
            return torch.sparse.sampled_addmm(places, x, y.mT, beta=0.0).values()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        by_x = None if y is None else gather(grad, y, ctx.pattern)
        by_y = None if x is None else spread(grad, x, ctx.pattern)
        return by_x, by_y, None
