"""Kernelized attention with a positional kernel on a grid, computed by Toeplitz products.

As in NPRF (arXiv:2106.12566), section 3.2, A_ij = phi(q_i) . phi(k_j) c_(j-i), in one dimension or
on an H x W grid. Sums are computed with fast Fourier transforms or from blocks of the matrix.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.checks import readable
from molflt.attention.features import Features
from molflt.attention.mixing.sums import Sums, _per_token, _stabilize, with_ones
from molflt.attention.numerics import ceil_div, finite, recomputed

METHODS = ("auto", "fft", "blocks")
_BLOCK = 128  # queries per block: fastest of 64..512 on a CPU
# Numbers transformed at once, unless one column of all sequences and heads has more. On a CPU, 2^20
# fits into the cache and takes 2/3 of the time of 2^24; other devices prefer few large transforms.
_TRANSIENT = {"cpu": 2**20}
_TRANSIENT_ELSEWHERE = 2**24
# Largest |log(c)| + |log scale of a key| for sums without a scale for each row: exp(-20) times the
# smallest product of bounded features, exp(-61), has a reciprocal in float32, as gradients need.
_LARGEST_LOG = 20.0


def toeplitz(
    query: Features,
    key: Features,
    value: Tensor,
    log_kernel: Tensor,
    causal: bool = False,
    method: str = "auto",
) -> Sums:
    """Computes kernelized attention with a kernel c = exp(log_kernel) that depends on the offset.

    "fft" (NPRF, arXiv:2106.12566, eqs. 11-13) takes O(m dv N log N) time and O(N) memory. Rounding
    errors are relative to the largest key and the largest c of the whole sequence, including later
    keys in causal attention; rows with much smaller terms lose precision.

    "blocks" takes O(N^2 (m + dv)) time and O(N x block) memory. Unless all scales are moderate,
    each row is scaled separately, and therefore accurate. In causal attention, later keys affect
    this choice, and thereby the last digits, but nothing else.

    Args:
        query, key, value, causal: see `quadratic`.
        log_kernel: (heads or 1, queries + keys - 1), with entry [j - i + queries - 1] for query i
            and key j. For tokens that fill an H x W grid from its start in row-major order, (heads
            or 1, 2H - 1, 2W - 1), with entry [dy + H - 1, dx + W - 1], where (dy, dx) is the offset
            of key j from query i. Entries are -inf where the kernel vanishes.
        method: one of `METHODS`; "auto" chooses by size, but never "fft" for causal attention.
    """
    queries, keys = query.tokens, value.shape[-2]
    layout = _Layout.of(log_kernel, queries, keys)
    if 0 in (queries, keys, len(value)):
        zeros = value.new_zeros(*value.shape[:2], queries, value.shape[-1] + 1)
        return Sums.of(zeros, zeros.new_zeros(()))
    if method == "auto":
        method = "blocks" if causal else _faster(layout, query.width, value.shape[-1])
    kernel = layout.cut(log_kernel.to(value.dtype))
    if causal:
        kernel = kernel.masked_fill(layout.future(kernel), -torch.inf)
    value = with_ones(value)
    if method == "fft":
        sums, log_scale = _by_fft(query, key, value, kernel, layout)
    else:
        sums, log_scale = _by_blocks(query, key, value, kernel, layout, causal)
    return Sums.of(sums, log_scale.expand_as(sums[..., -1:]))


def dense_log_kernel(log_kernel: Tensor, queries: int, keys: int) -> Tensor:
    """Expands a kernel in the format of `toeplitz` to its matrix (heads, queries, keys)."""
    layout = _Layout.of(log_kernel, queries, keys)
    if queries == 0 or keys == 0:
        return log_kernel.new_zeros(len(log_kernel), queries, keys)
    return _reversed(layout.cut(log_kernel), layout.key)[:, -queries:, :keys].flip(1)


def toeplitz_matmul(kernel: Tensor, x: Tensor) -> Tensor:
    """Computes sum_j kernel[j - i + rows - 1] x_j by FFT, in O(L log L) for L rows and columns.

    Shapes: kernel (heads, rows + columns - 1), x (heads, columns, r) -> (heads, rows, r).
    """
    columns = x.shape[-2]
    layout = _Layout((kernel.shape[-1] + 1 - columns,), (columns,))
    spectrum = layout.spectrum(kernel)[:, None]
    return layout.convolve(x.mT, spectrum).mT


class _Layout(NamedTuple):
    """Shapes of the grids of queries and keys: (tokens,), or (rows, W), padded to full rows."""

    query: tuple[int, ...]
    key: tuple[int, ...]

    @classmethod
    def of(cls, log_kernel: Tensor, queries: int, keys: int) -> "_Layout":
        shape = tuple(log_kernel.shape[1:])
        if len(shape) == 1 and (shape[0] == queries + keys - 1 or queries * keys == 0):
            return cls((queries,), (keys,))
        if len(shape) == 2 and shape[0] % 2 and shape[1] % 2:
            height, width = ((size + 1) // 2 for size in shape)
            if max(queries, keys) <= height * width:
                return cls((ceil_div(queries, width), width), (ceil_div(keys, width), width))
        raise ValueError(
            f"log_kernel must be (heads, {queries + keys - 1}), or (heads, 2H - 1, 2W - 1) with "
            f"H W at least {max(queries, keys)}; got {tuple(log_kernel.shape)}"
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the transforms, long enough to avoid aliasing."""
        return tuple(_fast_length(n + k - 1) for n, k in zip(self.query, self.key, strict=True))

    @property
    def width(self) -> int:
        """Number of tokens per row of the first axis."""
        return math.prod(self.query[1:])

    def cut(self, kernel: Tensor) -> Tensor:
        """Selects the offsets that occur: n + k - 1 along an axis with n queries and k keys."""
        if len(self.query) == 1:
            return kernel
        height = (kernel.shape[1] + 1) // 2
        return kernel[:, height - self.query[0] : height - 1 + self.key[0]]

    def future(self, kernel: Tensor) -> Tensor:
        """Returns a mask of offsets, True where the key follows the query in row-major order."""
        offsets = torch.arange(kernel[0].numel(), device=kernel.device).view(kernel.shape[1:])
        if len(self.query) == 1:
            return offsets >= self.key[0]  # j - i > keys - queries
        return offsets > kernel[0].numel() // 2

    def spectrum(self, kernel: Tensor) -> Tensor:
        """Returns the Fourier transform, for `convolve`, of a kernel in the format of `cut`."""
        axes = tuple(range(1, kernel.ndim))
        padding: list[int] = []
        for n, size in zip(self.lengths, kernel.shape[1:], strict=True):
            padding = [0, n - size, *padding]  # `F.pad` begins with the last axis
        kernel = F.pad(kernel.flip(axes), padding)
        return torch.fft.rfftn(kernel.roll([1 - k for k in self.key], axes), dim=axes)

    def convolve(self, x: Tensor, spectrum: Tensor) -> Tensor:
        """Multiplies by the Toeplitz matrix: (..., keys) -> (..., queries), padded to full rows."""
        axes = tuple(range(-len(self.key), 0))
        if padding := math.prod(self.key) - x.shape[-1]:
            x = F.pad(x, (0, padding))
        x = torch.fft.rfftn(x.unflatten(-1, self.key), s=self.lengths, dim=axes) * spectrum
        x = torch.fft.irfftn(x, s=self.lengths, dim=axes)
        for axis, n in zip(axes, self.query, strict=True):
            x = x.narrow(axis, 0, n)
        return x.flatten(-len(self.query))


def _by_fft(
    query: Features, key: Features, value: Tensor, kernel: Tensor, layout: _Layout
) -> tuple[Tensor, Tensor]:
    """Returns sums (batch, heads, queries, dv + 1) and their log scale, by Fourier transforms."""
    phi_q, phi_k, shift = _stabilize(query, key)
    offsets = tuple(range(1, kernel.ndim))
    top = finite(kernel.detach().amax(dim=offsets, keepdim=True))
    spectrum = layout.spectrum((kernel - top).exp())[:, None, None]
    columns = value.mT  # transforms are fastest along the last axis
    limit = _TRANSIENT.get(value.device.type, _TRANSIENT_ELSEWHERE)
    # Numbers of pairs of a feature and a column, of columns and of features per transform
    at_once = max(1, limit // max(1, phi_q[..., 0, 0].numel() * math.prod(layout.lengths)))
    columns_at_once = min(at_once, columns.shape[2])
    features_at_once = max(1, at_once // columns_at_once)
    several = at_once < phi_q.shape[-1] * columns.shape[2]
    sums = []
    for some in columns.split(columns_at_once, dim=2):
        features = (x.split(features_at_once, dim=-1) for x in (phi_q, phi_k))
        products = (
            recomputed(_fft_product, q, k, some, spectrum, layout, several=several)
            for q, k in zip(*features, strict=True)
        )
        sums.append(functools.reduce(torch.add, products))
    # Transforms leave rounding noise in empty sums. The terms of each row are therefore counted in
    # float64, where rounding errors stay below 1/2.
    valid = (phi_k.detach() != 0).any(dim=-1).double()
    visible = layout.spectrum((kernel.detach() > -torch.inf).double())
    terms = layout.convolve(valid, visible)[..., : phi_q.shape[-2], None]
    empty = terms < 0.5
    return torch.cat(sums, dim=-1).masked_fill(empty, 0.0), shift + top.view(1, -1, 1, 1)


def _fft_product(
    phi_q: Tensor, phi_k: Tensor, columns: Tensor, spectrum: Tensor, layout: _Layout
) -> Tensor:
    """Returns the sums over some features for some columns: (batch, heads, queries, columns)."""
    moments = phi_k.mT[..., None, :] * columns[:, :, None]  # [b, h, feature, column, key]
    mixed = layout.convolve(moments, spectrum)[..., : phi_q.shape[-2]]
    return (phi_q.mT[..., None, :] * mixed).sum(dim=2).mT


def _by_blocks(
    query: Features, key: Features, value: Tensor, kernel: Tensor, layout: _Layout, causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns sums (batch, heads, queries, dv + 1) and their log scale, from blocks of the matrix.

    A block has the queries of some rows of the grid (single tokens in one dimension).
    """
    queries, keys = query.tokens, key.tokens
    query, key = (query.bounded(), key.bounded()) if causal else _move_maximum(query, key)
    phi_q, query_log = _per_token(query)
    phi_k, key_log = _per_token(key)
    rows, width = layout.query[0], layout.width
    rows_at_once = max(1, _BLOCK // width)
    one_scale = _one_scale_suffices(kernel, key_log)
    if one_scale:
        kernel = kernel.exp()
        if key_log is not None:
            phi_k, key_log = phi_k * key_log.exp(), None
    blocks = []
    for start in range(0, rows, rows_at_once):
        stop = min(start + rows_at_once, rows)
        # Uses at least one key; for queries before all keys, the kernel is 0.
        visible = min(keys, max(1, stop * width + keys - queries)) if causal else keys
        # The first row of the kernel is the offset 1 - rows.
        window = kernel[:, rows - stop : rows - 1 - start + ceil_div(visible, width)]
        block = phi_q[:, :, start * width : stop * width]
        logs = None if key_log is None else key_log[:, :, :visible]
        inputs = block, phi_k[:, :, :visible], logs, value[:, :, :visible], window
        several = rows_at_once < rows
        blocks.append(recomputed(_block_product, *inputs, layout, one_scale, several=several))
    sums, log_scale = (torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True))
    return sums, log_scale if query_log is None else log_scale + finite(query_log)


def _block_product(
    phi_q: Tensor,
    phi_k: Tensor,
    key_log: Tensor | None,
    value: Tensor,
    window: Tensor,
    layout: _Layout,
    one_scale: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the sums of one block and the log scale of each row.

    `window` contains the offsets of the block: factors if `one_scale`, and otherwise logarithms.
    """
    queries, keys = phi_q.shape[-2], phi_k.shape[-2]
    key_grid = ceil_div(keys, layout.width), *layout.key[1:]
    scale = _reversed(window, key_grid)[:, -queries:, :keys]  # [h, reversed queries, keys]
    row_max = window.new_zeros(())
    if not one_scale:
        scale = scale if key_log is None else scale + key_log.mT
        row_max = finite(scale.detach().amax(dim=-1, keepdim=True))
        scale = (scale - row_max).exp()
    weights = (phi_q.flip(2) @ phi_k.mT) * scale
    return (weights @ value).flip(2), row_max.expand(*weights.shape[:-1], 1).flip(2)


def _faster(layout: _Layout, m: int, dv: int) -> str:
    """Returns the faster method for m features and values of width dv."""
    # Fitted to times of a forward and backward pass in float32 (one CPU thread, m = 16, 64, 128,
    # dv = 16, 64, N = 1024, 2048): "fft" takes 1.6 ns m (dv + 1) L log2 L for transforms of length
    # L, and "blocks" takes 5.3 ns N^2 (1 + (m + dv) / 59). For dv = 64 and the three m, the times
    # are equal at N = 3400, 11000 and 17000.
    length = math.prod(layout.lengths)
    by_fft = m * (dv + 1) * length * math.log2(max(length, 2))
    pairs = math.prod(layout.query) * math.prod(layout.key)
    by_blocks = 3.3 * pairs * (1 + (m + dv) / 59)
    return "fft" if by_fft < by_blocks else "blocks"


def _one_scale_suffices(kernel: Tensor, key_log: Tensor | None) -> bool:
    """Returns True if rows do not need separate scales; False if unknown, as in compiled code."""
    if not readable(kernel):
        return False
    logs = [x.detach() for x in (kernel, key_log) if x is not None and x.numel()]
    largest = (log.masked_fill(log == -torch.inf, 0.0).abs().amax() for log in logs)
    return bool(sum(largest) < _LARGEST_LOG)


def _reversed(kernel: Tensor, key: tuple[int, ...]) -> Tensor:
    """Expands a kernel from `_Layout.cut` to its matrix (heads, reversed queries, keys)."""
    axes = len(key)
    for axis in range(axes):
        kernel = kernel.unfold(axis + 1, key[axis], 1)  # the gradient needs no scattered sums
    return kernel.flatten(axes + 1).flatten(1, axes)


def _move_maximum(query: Features, key: Features) -> tuple[Features, Features]:
    """Moves the maximum over keys of each feature from the keys to the queries."""
    if key.log_scale is None:
        return query, key
    top = finite(key.log_scale.detach().amax(dim=-2, keepdim=True))
    log_q = top if query.log_scale is None else query.log_scale + top
    return Features(query.values, log_q), Features(key.values, key.log_scale - top)


def _fast_length(n: int) -> int:
    """Returns the smallest integer >= n that has no prime factor above 5."""
    while True:
        cofactor = n
        for prime in (2, 3, 5):
            while cofactor % prime == 0:
                cofactor //= prime
        if cofactor == 1:
            return n
        n += 1
