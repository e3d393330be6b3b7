"""Positional encodings for tokens on a grid, with a learned number per offset j - i."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.checks import at_least_one, is_traced, one_of
from molflt.attention.encodings import Bias, Encoding, Factors, Toeplitz
from molflt.attention.mixing.toeplitz import METHODS, toeplitz_matmul
from molflt.attention.numerics import at_least_float32
from molflt.attention.positions.base import ADDED, AS_FACTOR, Position, differences

_TOLERANCE = 1e-3  # tolerance of grid positions, in units of the spacing


class ToeplitzPosition(Position):
    """Table with a learnable number b_(j-i) for each head and offset.

    Softmax adds b to its logits. Kernelized attention multiplies phi(q_i) . phi(k_j) by
    exp(b_(j-i)) (NPRF, arXiv:2106.12566, section 3.2). As in Swin (arXiv:2103.14030), a
    two-dimensional table has one number for each pair of offsets (dy, dx).

    Softmax looks up differences of positions, rounded to integers, and tokens can be in any order.
    Linear and quadratic mixing compute offsets from the order of tokens and check that positions
    agree with this order. Positions must increase by 1 from token to token (on a two-dimensional
    grid row by row, from the start of a row), and the first key must be at the position of the
    first query. Padding must continue these positions and is also checked.

    Args:
        max_tokens: length L of the longest sequence, for 2L - 1 offsets; ignored with `shape`.
        shape: rows H and columns W of a two-dimensional grid with positions (row, column).
        std: standard deviation of the initial b.
        method: algorithm of linear mixing: "fft", "blocks" or "auto" (the faster of the two).
    """

    placement = AS_FACTOR
    paper = "2106.12566, sec. 3.2"
    cost = "m d N log N; causal N² (m + d)"
    decodes = False
    grid = True

    def __init__(
        self,
        heads: int,
        max_tokens: int = 512,
        shape: tuple[int, int] | None = None,
        std: float = 0.02,
        method: str = "auto",
    ) -> None:
        super().__init__()
        one_of("method", method, METHODS)
        self.heads, self.method = heads, method
        self.shape = (max_tokens,) if shape is None else tuple(shape)
        at_least_one(heads=heads, **{"max_tokens or a side of shape": min(self.shape)})
        self.dim = len(self.shape)
        self.longest = max(self.shape)
        self.table = nn.Parameter(std * torch.randn(heads, *(2 * n - 1 for n in self.shape)))

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        if mixing == "softmax":
            return Bias(self.bias(positions, key_positions))
        width = None if self.dim == 1 else self.shape[1]
        _expect_grid(self, positions, key_positions, width)
        queries, keys = positions.shape[1], key_positions.shape[1]
        tokens, capacity = max(queries, keys), math.prod(self.shape)
        if tokens > capacity:
            raise ValueError(f"{tokens} tokens exceed {capacity} places; raise max_tokens or shape")
        if self.dim == 2:
            return Toeplitz(self.table, self.method)
        start = capacity - queries  # entry of the offset 1 - queries
        table = self.table[:, start : start + max(0, queries + keys - 1)]
        return Toeplitz(table, self.method)

    def bias(self, positions: Tensor, key_positions: Tensor) -> Tensor:
        offsets = _offsets(positions, key_positions)
        index = torch.zeros_like(offsets[..., 0])
        checked = not is_traced() and offsets.numel()
        for offset, n in zip(offsets.unbind(dim=-1), self.shape, strict=True):
            if checked and offset.abs().max() >= n:
                raise ValueError(
                    f"positions of {type(self).__name__} must differ by at most {n - 1}; got "
                    f"{int(offset.abs().max())}; raise max_tokens or shape"
                )
            index = index * (2 * n - 1) + offset.clamp(1 - n, n - 1) + (n - 1)
        return _look_up(self.table.flatten(1), index)


class BucketedPosition(Position):
    """T5's relative positions: a learnable bias b for each head and each bucket of offsets j - i.

    See T5 (arXiv:1910.10683), section 2.1. In each direction, half of the buckets contain one
    distance each, and the other half contain distances up to `max_distance` on a logarithmic scale.
    The last bucket also contains all larger distances. Positions have the same format as for
    `ToeplitzPosition`, but their range is not limited.

    Args:
        num_buckets: total number of buckets for both directions.
        max_distance: distance at and beyond which all tokens are in the last bucket.
        bidirectional: use half of the buckets for keys after the query. Otherwise these keys share
            the bucket of distance 0, as in T5's decoder, and buckets are finer.
        std: standard deviation of the initial b.
    """

    placement = AS_FACTOR
    paper = "1910.10683, sec. 2.1"
    cost = "m d N log N; causal N² (m + d)"
    decodes = False
    grid = True

    def __init__(
        self,
        heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        at_least_one(heads=heads)
        directions = 2 if bidirectional else 1
        size = num_buckets // directions
        exact = size // 2  # number of buckets that contain a single distance
        if num_buckets % directions or size < 2 or max_distance <= exact:
            raise ValueError(
                "expected equally many buckets per direction, at least 2, and max_distance above "
                f"half of them; got {num_buckets=}, {max_distance=}, {bidirectional=}"
            )
        self.heads, self.bidirectional = heads, bidirectional
        self.table = nn.Parameter(std * torch.randn(heads, num_buckets))
        # A table makes rounding at the edges of buckets the same on every device; float32 as in T5.
        # It is not a buffer, because buffers on the meta device have no values.
        distance = torch.arange(max_distance + 1, device="cpu")
        log_distance = torch.log(distance.clamp(min=1).float() / exact)
        steps = log_distance / math.log(max_distance / exact) * (size - exact)
        far = exact + steps.long()
        self.buckets = torch.where(distance < exact, distance, far.clamp(max=size - 1)).tolist()

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        if mixing == "softmax":
            bucket = self.bucket(_offsets(positions, key_positions)[..., 0])
            return Bias(_look_up(self.table, bucket))
        _expect_grid(self, positions, key_positions)
        queries, keys = positions.shape[1], key_positions.shape[1]
        offsets = torch.arange(1 - queries, max(keys, 1 - queries), device=self.table.device)
        return Toeplitz(_look_up(self.table, self.bucket(offsets)[None])[0])

    def bucket(self, offset: Tensor) -> Tensor:
        """Returns the bucket of each integer offset j - i; `offset` may have any shape."""
        size = self.table.shape[1]
        buckets = torch.tensor(self.buckets, device=offset.device)
        if not self.bidirectional:
            return buckets[(-offset).clamp(0, len(buckets) - 1)]
        near = buckets[offset.abs().clamp(max=len(buckets) - 1)]
        return near + (offset > 0) * (size // 2)


class LowRankPosition(ToeplitzPosition):
    """Factors of a learnable Toeplitz mask N_ij = b_(j-i), prepended to queries and keys.

    This is FLT's Factor-Performer (arXiv:2302.01925v1, section 4.2.1). N is multiplied by random
    vectors, and an orthonormal basis Q of the products gives N ~= Q (Q^T N) (Halko et al.,
    arXiv:0909.4061, algorithms 4.1 and 4.4). Products with N are computed by FFT in O(L r log L),
    once for all sequences. The paper's variant could not be trained because of Gram-Schmidt
    orthogonalization; Householder reflections yield a basis even for masks of rank below r.

    Q is treated as a constant in each evaluation. The gradient is computed for Q Q^T N with the
    current Q. This expression is linear in N, and its gradient is finite for every mask; for r = L,
    it is the gradient of N itself. Columns of both factors are scaled to the same norm.

    Tokens can be in any order, and linear causal attention has a state of constant size. Feature
    maps receive the factors separately, and each factor depends on the positions themselves, not
    only on their differences. Softmax uses the table.

    Args:
        max_tokens: L; positions, including those of padding, are integers in [0, L).
        rank: number of prepended columns r, at most L.
        std: standard deviation of the initial b.
    """

    placement = ADDED
    paper = "2302.01925v1, sec. 4.2.1"
    cost = "N m (d + r)"
    decodes = True
    grid = False
    floor = 1e-4  # smallest norm of a column; balancing divides by it

    def __init__(
        self, heads: int, max_tokens: int = 512, rank: int = 32, std: float = 0.02
    ) -> None:
        super().__init__(heads, max_tokens=max_tokens, std=std)
        at_least_one(rank=rank)
        if rank > max_tokens:
            raise ValueError(f"rank must be at most max_tokens={max_tokens}; got {rank=}")
        self.rank = rank
        self.probe = nn.Buffer(torch.randn(max_tokens, rank))

    def width(self, head_dim: int) -> int:
        return head_dim + self.rank

    def forward(self, mixing: str, positions: Tensor, key_positions: Tensor) -> Encoding:
        if mixing == "softmax":
            return Bias(self.bias(positions, key_positions))
        left, right = self.factors()
        return Factors(self._rows(left, positions), self._rows(right, key_positions))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Returns N1 and N2 for all positions, each of shape (heads, L, r): N ~= N1 N2^T."""
        with torch.autocast(self.table.device.type, enabled=False):
            table = at_least_float32(self.table)
            fixed = table.detach()  # unlike `no_grad`, also in forward mode
            probe = self.probe.to(table.dtype).expand(len(table), -1, -1)
            basis = torch.linalg.qr(toeplitz_matmul(fixed, probe)).Q
            # One product with N N^T, orthonormalized after each factor, because rounding would
            # leave only the dominant direction. For Gaussian masks with a width of L / 5, L = 64
            # and 4 to 10 columns, the squared error is at most 1.4 times the smallest possible
            # error; without the product, it is 5 to 80 times as large as the smallest.
            basis = torch.linalg.qr(toeplitz_matmul(fixed.flip(-1), basis)).Q
            basis = torch.linalg.qr(toeplitz_matmul(fixed, basis)).Q
            right = toeplitz_matmul(table.flip(-1), basis)  # N^T Q
            norm = right.detach().norm(dim=1, keepdim=True)
            balance = norm.clamp(min=self.floor).sqrt()
            return basis * balance, right / balance

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        self.probe.copy_(torch.randn(self.probe.shape, generator=generator, device="cpu"))

    def _rows(self, factor: Tensor, positions: Tensor) -> Tensor:
        """Looks up rows of (heads, L, r) by position: (batch, n, 1) -> (batch, heads, n, r)."""
        self.check_range(positions, self.shape[0], integers=True)
        index = positions[..., 0].long().clamp(0, self.shape[0] - 1)
        rows = F.embedding(index, factor.transpose(0, 1).flatten(1))
        return rows.unflatten(-1, (-1, self.rank)).transpose(1, 2)


def expect_unit_scale(position: Position, scale: float) -> None:
    """Raises ValueError for a table of integer offsets if positions are multiplied by a scale."""
    if isinstance(position, ToeplitzPosition | BucketedPosition) and scale != 1:
        name = type(position).__name__
        raise ValueError(
            f"{name} is a table of integer offsets; got position_scale={scale:g}; set it to 1"
        )


def _offsets(positions: Tensor, key_positions: Tensor) -> Tensor:
    """Returns r_j - r_i as integers, of shape (batch, queries, keys, l)."""
    return (-differences(positions, key_positions)).round().long()


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """Looks up entries of a table (heads, size) by index (batch, ...): (batch, heads, ...)."""
    return F.embedding(index, table.T).movedim(-1, 1)


def _expect_grid(
    position: Position, positions: Tensor, key_positions: Tensor, width: int | None = None
) -> None:
    """Raises ValueError unless tokens are in order on a grid with rows of `width` tokens."""
    if is_traced():
        return
    name = type(position).__name__
    for r in (positions, key_positions):
        index = torch.arange(r.shape[1], device=r.device)
        axes = (index,) if width is None else (index // width, index % width)
        error = (r - r[:, :1] - torch.stack(axes, dim=-1)).abs()
        if not (error <= _TOLERANCE).all():  # NaN also fails
            raise ValueError(
                f"{name} needs tokens in order on a grid, positions 0, 1, 2, ... or row by row, in "
                "every sequence, including padding; sort the tokens, or use mixing='softmax'"
            )
    start = (positions[:, :1] - key_positions[:, :1]).abs()
    if not (start <= _TOLERANCE).all():
        raise ValueError(
            f"{name} needs the first key at the position of the first query; use mixing='softmax'"
        )
