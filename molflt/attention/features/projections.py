"""Random projections x -> (w_1 . x, ..., w_m . x) of queries and keys, drawn separately per head.

Positive features use E exp(w . z) = exp(|z|^2 / 2), which holds for rows w with the marginal
distribution N(0, I). Dependence between rows affects only the variance. Projections are modules
because some are products of sparse factors, which are applied without forming the matrix.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.checks import at_least_one
from molflt.attention.numerics import (
    by_head,
    ceil_div,
    haar_rotation,
    next_power_of_two,
    options_of,
    rand64,
    randn64,
    to_default,
)


class Projection(nn.Module):
    """Base class for projections with `rows` random rows of width `dim` per head.

    Rows are drawn on the CPU in float64 and stored in buffers. Subclasses override `_draw` and
    `forward`.
    """

    paper = ""
    cost = "m d"
    extra_repr = options_of

    def __init__(self, heads: int, rows: int, dim: int) -> None:
        super().__init__()
        at_least_one(heads=heads, num_features=rows, dim=dim)
        self.heads = heads
        self.num_rows = rows
        self.dim = dim
        for name, drawn in self._draw_heads(None).items():
            self.register_buffer(name, to_default(drawn))

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draws the buffers of one head, keyed by name, on the CPU; real numbers are in float64."""
        raise NotImplementedError

    def _draw_heads(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        heads = [self._draw(generator) for _ in range(self.heads)]
        return {name: torch.stack([head[name] for head in heads]) for name in heads[0]}

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new rows in place from a CPU generator, by default torch's global generator.

        Equal generators give equal rows on any device; use the same seed on every rank.
        """
        for name, value in self._draw_heads(generator).items():
            self.get_buffer(name).copy_(value)

    def forward(self, *columns: Tensor) -> Tensor:
        """Computes w_s . x: (batch, heads, tokens, dim) -> (batch, heads, tokens, rows).

        `columns` is x itself, usually q d^(-1/4), or several tensors whose concatenation along the
        last axis is x. The result has the precision of x.
        """
        raise NotImplementedError(f"{type(self).__name__} must override forward(*columns)")

    def matrix(self) -> Tensor:
        """Copies the rows w_s to a tensor (heads, rows, dim) in the dtype of the buffers."""
        buffer = next(buffer for buffer in self.buffers() if buffer.is_floating_point())
        identity = torch.eye(self.dim, dtype=buffer.dtype, device=buffer.device)
        return self.forward(identity.expand(1, self.heads, -1, -1))[0].mT.contiguous()


class DenseProjection(Projection):
    """Base class for projections stored as a matrix; subclasses override `draw_rows`."""

    rows: Tensor  # (heads, rows, dim)

    @staticmethod
    def draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        """Draws the rows of one head: a float64 tensor (rows, dim) on the CPU."""
        raise NotImplementedError

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"rows": self.draw_rows(self.num_rows, self.dim, generator)}

    def forward(self, *columns: Tensor) -> Tensor:
        rows = self.rows.to(columns[0].dtype).split([x.shape[-1] for x in columns], dim=-1)
        products = (by_head(x, row.mT) for x, row in zip(columns, rows, strict=True))
        return functools.reduce(torch.add, products)

    def matrix(self) -> Tensor:
        return self.rows.clone()


class _IidProjection(DenseProjection):
    """Rows drawn independently from N(0, I); the kernel estimate is unbiased."""

    paper = "2006.03555, sec. 2.3"

    @staticmethod
    def draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        return randn64(rows, dim, generator=generator)


class OrthogonalProjection(DenseProjection):
    """Rows with marginal distribution N(0, I), orthogonal within each block of `dim` rows (R-ORF).

    Directions are the rows of Haar-distributed orthogonal matrices; norms are drawn independently
    from the chi distribution with `dim` degrees of freedom. The kernel estimate is unbiased.
    """

    paper = "2006.03555, sec. 2.4"

    @staticmethod
    def draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        blocks = [haar_rotation(dim, generator)[: rows - i] for i in range(0, rows, dim)]
        norms = randn64(rows, dim, generator=generator).norm(dim=-1)
        return norms[:, None] * torch.cat(blocks)


class _SphereProjection(DenseProjection):
    """Independent rows, uniform on the sphere of radius sqrt(dim) (sphere-PRF).

    E w = 0 and E w w^T = I, but because all norms are equal, E exp(w . z) = Gamma(d/2) I_{d/2-1}(t)
    / (t/2)^{d/2-1}, where t = sqrt(d) |z| and I is the modified Bessel function. To leading order,
    this expectation is smaller than exp(|z|^2 / 2) by the fraction |z|^4 / (4 (d + 2)): at d = 16,
    by 1.3 % for |z| = 1 and by 16 % for |z| = 2.
    """

    paper = "2106.12566, sec. 4.5"

    @staticmethod
    def draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        return math.sqrt(dim) * F.normalize(randn64(rows, dim, generator=generator), dim=-1)


class SobolProjection(DenseProjection):
    """Rows that are scrambled Sobol points, mapped to N(0, I) by the inverse normal CDF.

    The kernel estimate is unbiased. The points fill space most evenly if `rows` is a power of two.
    """

    paper = "1412.8293"

    @staticmethod
    def draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        engine = torch.quasirandom.SobolEngine
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        points = engine(dim, scramble=True, seed=seed).draw(rows, dtype=torch.float64)
        # Points are multiples of 2^-bits; the center of a cell is never 0 or 1. Only the first
        # point has single precision, in which the last cells round up to 1.
        cell = 2.0**-engine.MAXBIT
        return torch.special.ndtri(points.clamp(max=1 - cell) + cell / 2)


class _FactoredProjection(Projection):
    """Base class for projections that are products of sparse orthogonal factors.

    Subclasses override `_draw_factors` and `_rotate`. Rows form independent blocks of `size` rows.
    Their norms follow the chi distribution with `size` degrees of freedom. `_rotate` receives
    tokens along the last dimension, which gives long contiguous runs in memory.
    """

    norms: Tensor  # (heads, rows)

    @property
    def size(self) -> int:
        return self.dim

    @property
    def blocks(self) -> int:
        """Number of blocks; the last block may be incomplete."""
        return ceil_div(self.num_rows, self.size)

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draws the buffers that define the factors of all blocks of one head."""
        raise NotImplementedError

    def _rotate(self, x: Tensor) -> Tensor:
        """Applies the orthogonal part: (heads, dim, n) -> (heads, blocks, size, n)."""
        raise NotImplementedError

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        factors = self._draw_factors(generator)
        norms = randn64(self.num_rows, self.size, generator=generator).norm(dim=-1)
        # If dim is odd, Givens layers may leave a coordinate unrotated, and the odd moments of its
        # row then do not vanish. Random signs remove them.
        signs = 2 * rand64(self.num_rows, generator=generator).round() - 1
        return {**factors, "norms": norms * signs}

    def forward(self, *columns: Tensor) -> Tensor:
        x = torch.cat(columns, dim=-1)
        batch, heads, tokens, dim = x.shape
        rotated = self._rotate(x.permute(1, 3, 0, 2).reshape(heads, dim, batch * tokens))
        rotated = rotated.reshape(heads, self.blocks * self.size, batch, tokens)
        products = rotated[:, : self.num_rows] * self.norms.to(x.dtype)[..., None, None]
        # Contiguous, like a matrix product, because callers may view it.
        return products.permute(2, 0, 3, 1).contiguous()


class _HadamardProjection(_FactoredProjection):
    """Rows of H D_1 H D_2 H D_3 / p^(3/2), with Hadamard matrix H and random signs D (H-ORF).

    x is padded with zeros to p = 2^ceil(log2 dim) dimensions. E w = 0 and E w w^T = I are exact.
    The rows are close to N(0, I): for p >= 8, kernels are too small by a fraction of at most |z|^4
    / (3 p^2), to leading order. For |z| = 1 and 2, the measured fractions are 0.13 % and 1.4 % at p
    = 16, and below 0.1 % and 0.6 % at p = 64. On one CPU core, a dense matrix is faster for p <=
    128. The product was proposed in arXiv:1703.00864.
    """

    paper = "2006.03555, sec. 2.4"
    cost = "m log d"
    signs: Tensor  # (heads, blocks, 3, p), in the order of application

    @property
    def size(self) -> int:
        return next_power_of_two(self.dim)

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"signs": 2 * rand64(self.blocks, 3, self.size, generator=generator).round() - 1}

    def _rotate(self, x: Tensor) -> Tensor:
        out = F.pad(x, (0, 0, 0, self.size - self.dim))[:, None]
        signs = self.signs.to(x.dtype)[..., None] * self.size**-0.5
        for layer in range(3):
            out = _walsh_hadamard(signs[:, :, layer] * out)
        return out


class _GivensProjection(_FactoredProjection):
    """Rows of a product of random Givens rotations (G-ORF).

    A layer permutes the coordinates at random and rotates the dim // 2 pairs (2 k, 2 k + 1) by
    uniformly distributed angles. Each block has `LAYERS_PER_LEVEL` ceil(log2 dim) separate layers.
    E w = 0 and E w w^T = I are exact. The error is largest for z along an axis: at d = 64, the
    kernel is too large by 0.2 % at |z| = 1 and by 3 % at |z| = 2. On a CPU, a dense matrix is 10
    times faster at d = 64. Source: Choromanski et al. 2019, Unifying orthogonal Monte Carlo.
    """

    paper = "2006.03555, sec. 2.4"
    cost = "m log d"
    LAYERS_PER_LEVEL = 4

    order: Tensor  # (heads, blocks, layers, dim), permutations along the last axis
    angles: Tensor  # (heads, blocks, layers, dim // 2), in radians

    @property
    def layers(self) -> int:
        return max(1, self.LAYERS_PER_LEVEL * (self.dim - 1).bit_length())

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        keys = rand64(self.blocks, self.layers, self.dim, generator=generator)
        turns = rand64(self.blocks, self.layers, self.dim // 2, generator=generator)
        return {"order": keys.argsort(dim=-1), "angles": 2 * math.pi * turns}

    def _rotate(self, x: Tensor) -> Tensor:
        heads, dim, n = x.shape
        even = dim - dim % 2
        cos, sin = self.angles.to(x.dtype).cos(), self.angles.to(x.dtype).sin()
        rotations = torch.stack((cos, -sin, sin, cos), dim=-1)
        # Vectors of all heads and blocks are stacked, and each starts at `base`; the first layer
        # reads the single vector that the blocks of a head share.
        vectors = torch.arange(heads * self.blocks, device=x.device).view(heads, self.blocks, 1)
        base = vectors // self.blocks * dim
        for layer in range(self.layers):
            source = (base + self.order[:, :, layer]).flatten()
            permuted = x.flatten(0, -2).index_select(0, source).view(heads, self.blocks, dim, n)
            pairs = permuted[:, :, :even].reshape(heads * self.blocks * (dim // 2), 2, n)
            rotated = rotations[:, :, layer].reshape(len(pairs), 2, 2) @ pairs
            x = rotated.view(heads, self.blocks, even, n)
            if dim % 2:  # avoids a copy by torch.cat
                x = torch.cat((x, permuted[:, :, even:]), dim=2)
            base = vectors * dim
        return x


def _walsh_hadamard(x: Tensor) -> Tensor:
    """Applies the unnormalized Sylvester-Hadamard matrix H along the second-to-last dimension."""
    size, n = x.shape[-2:]
    vectors = math.prod(x.shape[:-2])
    out, stride = x, 1
    while stride < size:
        radix = min(8, size // stride)  # factors of order 8 are faster than butterflies
        index = torch.arange(radix, device=x.device)
        bits = index[:, None] & index  # entry (i, j) of H is -1 where the number of bits is odd
        factor = (1 - 2 * ((bits ^ (bits >> 1) ^ (bits >> 2)) & 1)).to(x.dtype)
        out = factor @ out.reshape(vectors * size // (stride * radix), radix, stride * n)
        stride *= radix
    return out.view(x.shape)


PROJECTIONS: dict[str, type[Projection]] = {
    "iid": _IidProjection,
    "orthogonal": OrthogonalProjection,
    "hadamard": _HadamardProjection,
    "givens": _GivensProjection,
    "sphere": _SphereProjection,
    "sobol": SobolProjection,
}
