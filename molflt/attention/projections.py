"""Random projections x -> (w_1 . x, ..., w_m . x) of queries and keys, one draw per head.

Positive features rest on E exp(w . z) = exp(|z|^2 / 2), true for rows with the marginal N(0, I);
how rows depend on each other changes the variance alone. Projections are modules because two of
them (`hadamard`, `givens`) are products of sparse factors, applied without forming their matrix.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.kernels import at_least_one

# On the CPU whatever torch's default device is: the generator lives there.
_rand = partial(torch.rand, dtype=torch.float64, device="cpu")
_randn = partial(torch.randn, dtype=torch.float64, device="cpu")


class Projection(nn.Module):
    """Base class: buffers drawn on the CPU in float64, and the product w_s . x.

    A new projection overrides `_draw` and `_project`.

    Args:
        heads: number of heads; every head has its own draw.
        rows: number of random features m.
        dim: dimension d of the projected vectors.

    Raises:
        ValueError: heads, rows or dim is below 1.
    """

    def __init__(self, heads: int, rows: int, dim: int) -> None:
        super().__init__()
        at_least_one(heads=heads, num_features=rows, dim=dim)
        self.heads = heads
        self.num_rows = rows
        self.dim = dim
        for name, drawn in self._draw_heads(None).items():
            dtype = torch.get_default_dtype() if drawn.is_floating_point() else drawn.dtype
            self.register_buffer(name, torch.empty(drawn.shape, dtype=dtype).copy_(drawn))

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Buffers of one head by name, on the CPU; real numbers in float64."""
        raise NotImplementedError

    def _project(self, *parts: Tensor) -> Tensor:
        """The projection of (batch, heads, tokens, dim) in parts, shapes already checked."""
        raise NotImplementedError

    def _draw_heads(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Buffers of all heads, which draw one after the other: (heads, ...) each."""
        heads = [self._draw(generator) for _ in range(self.heads)]
        return {name: torch.stack([head[name] for head in heads]) for name in heads[0]}

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws all rows anew, in place.

        Equal generators give equal rows, rounded to the buffers, on any device and every rank.

        Args:
            generator: CPU generator; torch's global one if None.

        Raises:
            ValueError: the generator is not on the CPU.
        """
        if generator is not None and generator.device.type != "cpu":
            got = generator.device
            raise ValueError(f"generator must be on the CPU; got {got}; use torch.Generator()")
        for name, value in self._draw_heads(generator).items():
            self.get_buffer(name).copy_(value)

    def forward(self, *parts: Tensor) -> Tensor:
        """Projects tokens x, in the precision of x.

        Args:
            parts: x, (batch, heads, tokens, dim), usually q d^(-1/4), without unit; or several
                tensors that joined along the last axis give x.

        Returns:
            w_s . x, (batch, heads, tokens, rows). ValueError if x has another shape.
        """
        width = sum(x.shape[-1] for x in parts)
        if width != self.dim or any(x.ndim != 4 or x.shape[1] != self.heads for x in parts):
            raise ValueError(
                f"x must have shape (batch, {self.heads}, tokens, {self.dim}); got "
                f"{', '.join(str(tuple(x.shape)) for x in parts)}; build it for these heads and dim"
            )
        return self._project(*parts)

    def matrix(self) -> Tensor:
        """The rows w_s themselves, (heads, rows, dim) in the dtype of the buffers: a fresh copy."""
        buffer = next(buffer for buffer in self.buffers() if buffer.is_floating_point())
        identity = torch.eye(self.dim, dtype=buffer.dtype, device=buffer.device)
        return self._project(identity.expand(1, self.heads, -1, -1))[0].mT.contiguous()

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return f"heads={self.heads}, rows={self.num_rows}, dim={self.dim}"


class DenseProjection(Projection):
    """Base class of projections stored as a matrix: O(m d) numbers; override `_draw_rows`."""

    rows: Tensor  # (heads, rows, dim)

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        """The rows of one head: (rows, dim) float64 on the CPU."""
        raise NotImplementedError

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"rows": self._draw_rows(self.num_rows, self.dim, generator)}

    def _project(self, *parts: Tensor) -> Tensor:
        rows = self.rows.to(parts[0].dtype).split([x.shape[-1] for x in parts], dim=-1)
        first, *others = (x @ row.mT for x, row in zip(parts, rows, strict=True))
        return sum(others, first)

    def matrix(self) -> Tensor:
        """As `Projection.matrix`, without a product that could round."""
        return self.rows.clone()


class IidProjection(DenseProjection):
    """Rows drawn independently from N(0, I). Unbiased."""

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        return _randn(rows, dim, generator=generator)


class OrthogonalProjection(DenseProjection):
    """Rows with the marginal N(0, I), orthogonal within each block of `dim` rows (R-ORF).

    Directions are the rows of Haar-distributed orthogonal matrices; norms are drawn independently
    from the chi distribution with `dim` degrees of freedom, so that every single row is an exact
    standard normal and the kernel estimate stays unbiased.
    Performer (arXiv:2009.14794), section 2.4; FAVOR (arXiv:2006.03555), section 2.4.
    """

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        blocks = []
        for start in range(0, rows, dim):
            q, r = torch.linalg.qr(_randn(dim, dim, generator=generator))
            # Without the sign of diag(R), LAPACK's choice of signs makes Q depart from Haar
            # measure, which biases the estimator.
            q = q * torch.sign(torch.diagonal(r))
            blocks.append(q[: rows - start])
        norms = _randn(rows, dim, generator=generator).norm(dim=-1)
        return norms[:, None] * torch.cat(blocks)


class SphereProjection(DenseProjection):
    """Rows independent and uniform on the sphere of radius sqrt(dim) (sphere-PRF).

    E w = 0 and E w w^T = I, but equal norms make E exp(w . z) = Gamma(d/2) I_{d/2-1}(t) /
    (t/2)^{d/2-1}, t = sqrt(d) |z|, I the modified Bessel function. That is below exp(|z|^2 / 2) by
    the fraction |z|^4 / (4 (d + 2)) to leading order: at d = 16 (64) by 1.3 % (0.4 %) for |z| = 1
    and by 16 % (5 %) for |z| = 2. Kernelized attention with RPE (arXiv:2106.12566), section 4.5.
    """

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        return math.sqrt(dim) * F.normalize(_randn(rows, dim, generator=generator), dim=-1)


class SobolProjection(DenseProjection):
    """Rows from scrambled Sobol points, mapped to N(0, I) by the inverse normal distribution.

    The scramble's random shift makes every single point uniform, so each row is N(0, I) and the
    estimate unbiased; together they fill space evenly, best if `rows` is a power of two.
    Quasi-Monte Carlo feature maps (arXiv:1412.8293).

    Raises:
        ValueError: dim exceeds the table of Sobol's direction numbers (21201).
    """

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        engine = torch.quasirandom.SobolEngine
        if dim > engine.MAXDIM:
            raise ValueError(f"dim must be at most {engine.MAXDIM}; got {dim}; use 'orthogonal'")
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        points = engine(dim, scramble=True, seed=seed).draw(rows, dtype=torch.float64)
        # Points are multiples of 2^-bits; the middle of the cell is never 0 or 1. Only the first
        # one comes in single precision, where the last cells round up to 1.
        cell = 2.0**-engine.MAXBIT
        return torch.special.ndtri(points.clamp(max=1 - cell) + cell / 2)


class FactoredProjection(Projection):
    """Base class of products of sparse orthogonal factors; override `_draw_factors`, `_rotate`.

    Rows come in independent blocks of `size`; norms are drawn from the chi distribution with `size`
    degrees of freedom. Inside, tokens come last, in long contiguous runs.
    """

    norms: Tensor  # (heads, rows)

    @property
    def size(self) -> int:
        """Rows per block."""
        return self.dim

    @property
    def blocks(self) -> int:
        """Number of blocks, the last one perhaps not used up."""
        return -(-self.num_rows // self.size)

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Buffers of one head that define the factors of its blocks."""
        raise NotImplementedError

    def _rotate(self, x: Tensor) -> Tensor:
        """Orthogonal part: (heads, dim, n) -> (heads, blocks, size, n)."""
        raise NotImplementedError

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        factors = self._draw_factors(generator)
        norms = _randn(self.num_rows, self.size, generator=generator).norm(dim=-1)
        # Rotations leave odd moments where a coordinate never moves (odd dim); a sign removes them.
        signs = 2 * _rand(self.num_rows, generator=generator).round() - 1
        return {**factors, "norms": norms * signs}

    def _project(self, *parts: Tensor) -> Tensor:
        x = torch.cat(parts, dim=-1)
        batch, heads, tokens, dim = x.shape
        rotated = self._rotate(x.permute(1, 3, 0, 2).reshape(heads, dim, batch * tokens))
        rows = rotated.reshape(heads, self.blocks * self.size, batch, tokens)[:, : self.num_rows]
        # Contiguous as a matrix product would be, so that callers may view it.
        scaled = rows * self.norms.to(x.dtype)[..., None, None]
        return scaled.permute(2, 0, 3, 1).contiguous()


class HadamardProjection(FactoredProjection):
    """Rows of H D_1 H D_2 H D_3 / p^(3/2): Hadamard matrices and random signs (H-ORF).

    x is padded with zeros to p = 2^ceil(log2 dim): p orthogonal rows per block in p dimensions,
    hence in `dim` where that is a power of two. O(m log d) operations, O(m) numbers; on one CPU
    core slower than a dense matrix up to p = 128, equal near 256, faster beyond.
    FAVOR (arXiv:2006.03555), section 2.4; the product is that of arXiv:1703.00864.

    E w = 0 and E w w^T = I exactly: directions uniform in p dimensions with norms of p degrees of
    freedom would make rows N(0, I_p), and their first `dim` coordinates N(0, I). They nearly are:
    E (w . z)^4 = 3 |z|^4 (1 + 2/p) (1 - 2/p + 4 (3 - 2 s) / (3 p^2)), s = sum_i z_i^4 / |z|^4.
    For p >= 8 the worst z is an axis: the kernel is low by the fraction |z|^4 / (3 p^2) to leading
    order; measured 0.13 % at p = 16, |z| = 1 and 1.4 % at |z| = 2; below 0.1 % and 0.6 % at p = 64.
    """

    signs: Tensor  # (heads, blocks, 3, p), in the order of application

    @property
    def size(self) -> int:
        """p, the power of two to which dim is padded."""
        return 1 << (self.dim - 1).bit_length()

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"signs": 2 * _rand(self.blocks, 3, self.size, generator=generator).round() - 1}

    def _rotate(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, self.size - self.dim))[:, None]
        signs = self.signs.to(x.dtype)[..., None] * self.size**-0.5
        for layer in range(3):
            padded = _walsh_hadamard(signs[:, :, layer] * padded)
        return padded


class GivensProjection(FactoredProjection):
    """Rows of a product of random Givens rotations (G-ORF).

    A layer permutes the coordinates at random and rotates pairs (2 k, 2 k + 1) by angles uniform
    on the circle, dim // 2 at a time. Every block has L = `LAYERS_PER_LEVEL` ceil(log2 dim) layers
    of its own. O(m log d) operations, bound by memory: on a CPU 10x slower than dense at d = 64.
    FAVOR (arXiv:2006.03555), section 2.4; Choromanski et al. 2019, Unifying orthogonal Monte Carlo.

    Blocks are orthogonal, E w = 0 and E w w^T = I exactly. E (w . z)^4 = 3 |z|^4 (1 + e r^L) in the
    mean over a block, with r = 3/4 - 3 / (4 (d - 1)) for even and 3/4 - 1 / (2 d) for odd d, and
    e = (d + 2) / 3 sum_i z_i^4 / |z|^4 - 1 <= (d - 1) / 3, the worst case a coordinate axis: with c
    layers per level the excess falls as d^(1 - 0.415 c). There, measured at d = 64, the kernel is
    high by 1.1 %, 0.2 %, 0.01 % for c = 3, 4, 6 at |z| = 1 and by 20 %, 3 %, 0.1 % at |z| = 2.
    """

    LAYERS_PER_LEVEL = 4

    order: Tensor  # (heads, blocks, layers, dim), each last axis a permutation
    angles: Tensor  # (heads, blocks, layers, dim // 2), radian

    @property
    def layers(self) -> int:
        """Layers per block; at least one."""
        return max(1, self.LAYERS_PER_LEVEL * (self.dim - 1).bit_length())

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        keys = _rand(self.blocks, self.layers, self.dim, generator=generator)
        turns = _rand(self.blocks, self.layers, self.dim // 2, generator=generator)
        return {"order": keys.argsort(dim=-1), "angles": 2 * math.pi * turns}

    def _rotate(self, x: Tensor) -> Tensor:
        heads, dim, n = x.shape
        even = dim - dim % 2
        cos, sin = self.angles.to(x.dtype).cos(), self.angles.to(x.dtype).sin()
        rotations = torch.stack((cos, -sin, sin, cos), dim=-1)
        # Vectors of all heads and blocks lie below one another, `base` says where each begins; the
        # first layer reads the one vector that the blocks of a head share.
        vectors = torch.arange(heads * self.blocks, device=x.device).view(heads, self.blocks, 1)
        base = vectors // self.blocks * dim
        for layer in range(self.layers):
            source = (base + self.order[:, :, layer]).flatten()
            moved = x.flatten(0, -2).index_select(0, source).view(heads, self.blocks, dim, n)
            pairs = moved[:, :, :even].reshape(heads * self.blocks * (dim // 2), 2, n)
            turned = rotations[:, :, layer].reshape(len(pairs), 2, 2) @ pairs
            x = turned.view(heads, self.blocks, even, n)
            if dim % 2:  # otherwise torch.cat would copy for nothing
                x = torch.cat((x, moved[:, :, even:]), dim=2)
            base = vectors * dim
        return x


def _walsh_hadamard(x: Tensor) -> Tensor:
    """H x along the last dimension but one, H the Sylvester-Hadamard matrix, not normalized.

    H of order p is a Kronecker product of log8(p) factors of order 8 (the last may be smaller). On
    one CPU core they take 0.55 to 0.85 of the time of log2(p) butterflies, p = 16 ... 1024.
    """
    size, n = x.shape[-2:]
    vectors, flat, stride = math.prod(x.shape[:-2]), x, 1
    while stride < size:
        radix = min(8, size // stride)
        index = torch.arange(radix, device=x.device)
        common = index[:, None] & index
        factor = (1 - 2 * ((common ^ (common >> 1) ^ (common >> 2)) & 1)).to(x.dtype)
        flat = factor @ flat.reshape(vectors * size // (stride * radix), radix, stride * n)
        stride *= radix
    return flat.view(x.shape)


PROJECTIONS: dict[str, type[Projection]] = {
    "iid": IidProjection,
    "orthogonal": OrthogonalProjection,
    "hadamard": HadamardProjection,
    "givens": GivensProjection,
    "sphere": SphereProjection,
    "sobol": SobolProjection,
}
