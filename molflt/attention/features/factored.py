"""Random projections by sparse orthogonal factors, applied without forming their product."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from molflt.attention.features.projections import Projection, _rand, _randn


class _FactoredProjection(Projection):
    """Base class of sparse orthogonal factors; override `_draw_factors` and `_rotate`.

    Rows form independent blocks of `size`. Their norms are drawn from the chi distribution with
    `size` degrees of freedom. Internally, tokens are the last dimension, which gives long
    contiguous runs in memory.
    """

    norms: Tensor  # (heads, rows)

    @property
    def size(self) -> int:
        return self.dim

    @property
    def blocks(self) -> int:
        """Returns the number of blocks; the last one may be used only in part."""
        return -(-self.num_rows // self.size)

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns the buffers of one head that define the factors of its blocks."""
        raise NotImplementedError

    def _rotate(self, x: Tensor) -> Tensor:
        """Applies the orthogonal part: (heads, dim, n) -> (heads, blocks, size, n)."""
        raise NotImplementedError

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        factors = self._draw_factors(generator)
        norms = _randn(self.num_rows, self.size, generator=generator).norm(dim=-1)
        # Rotations leave odd moments where a coordinate never moves (odd dim); a sign removes them.
        signs = 2 * _rand(self.num_rows, generator=generator).round() - 1
        return {**factors, "norms": norms * signs}

    def forward(self, *columns: Tensor) -> Tensor:
        x = torch.cat(columns, dim=-1)
        batch, heads, tokens, dim = x.shape
        rotated = self._rotate(x.permute(1, 3, 0, 2).reshape(heads, dim, batch * tokens))
        rows = rotated.reshape(heads, self.blocks * self.size, batch, tokens)[:, : self.num_rows]
        # Contiguous, like a matrix product, because callers may view it.
        scaled = rows * self.norms.to(x.dtype)[..., None, None]
        return scaled.permute(2, 0, 3, 1).contiguous()


class _HadamardProjection(_FactoredProjection):
    """Rows of H D_1 H D_2 H D_3 / p^(3/2), with Hadamard matrix H and random signs D (H-ORF).

    x is padded with zeros to p = 2^ceil(log2 dim) dimensions. The p rows of a block are orthogonal
    there, and in `dim` dimensions if `dim` is a power of two. This takes O(m log d) operations and
    O(m) numbers. On one CPU core, it is slower than a dense matrix up to p = 128, equal near 256
    and faster beyond. FAVOR (arXiv:2006.03555), section 2.4; the product is from arXiv:1703.00864.

    E w = 0 and E w w^T = I hold exactly. Uniform directions in p dimensions, with norms from the
    chi distribution with p degrees of freedom, would give rows N(0, I_p) and N(0, I) for the first
    `dim` coordinates. The rows are close to this: E (w . z)^4 = 3 |z|^4 (1 + 2/p) (1 - 2/p + 4 (3 -
    2 s) / (3 p^2)), where s = sum_i z_i^4 / |z|^4. For p >= 8, the worst z is along an axis. The
    kernel is then too small by the fraction |z|^4 / (3 p^2) to leading order. Measured errors for
    |z| = 1 and 2 are 0.13 % and 1.4 % at p = 16, and below 0.1 % and 0.6 % at p = 64.
    """

    paper = "2006.03555, sec. 2.4"
    cost = "m log d"
    signs: Tensor  # (heads, blocks, 3, p), in the order of application

    @property
    def size(self) -> int:
        return 1 << (self.dim - 1).bit_length()

    def _draw_factors(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"signs": 2 * _rand(self.blocks, 3, self.size, generator=generator).round() - 1}

    def _rotate(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, self.size - self.dim))[:, None]
        signs = self.signs.to(x.dtype)[..., None] * self.size**-0.5
        for layer in range(3):
            padded = _walsh_hadamard(signs[:, :, layer] * padded)
        return padded


class _GivensProjection(_FactoredProjection):
    """Rows of a product of random Givens rotations (G-ORF).

    A layer permutes the coordinates at random and rotates the dim // 2 pairs (2 k, 2 k + 1) by
    angles uniform on the circle. Every block has L = `LAYERS_PER_LEVEL` ceil(log2 dim) layers of
    its own. This takes O(m log d) operations but is memory-bound: on a CPU, it is 10x slower than a
    dense matrix at d = 64. FAVOR (arXiv:2006.03555), section 2.4; Choromanski et al. 2019, Unifying
    orthogonal Monte Carlo.

    Blocks are orthogonal, and E w = 0 and E w w^T = I hold exactly. Averaged over a block, E (w .
    z)^4 = 3 |z|^4 (1 + e r^L), where r = 3/4 - 3 / (4 (d - 1)) for even d, r = 3/4 - 1 / (2 d) for
    odd d, and e = (d + 2) / 3 sum_i z_i^4 / |z|^4 - 1 <= (d - 1) / 3. The worst case is a
    coordinate axis; with c layers per level, the excess falls as d^(1 - 0.415 c). In this case,
    measured at d = 64 for c = 3, 4 and 6, the kernel is too large by 1.1 %, 0.2 % and 0.01 % at |z|
    = 1, and by 20 %, 3 % and 0.1 % at |z| = 2.
    """

    paper = "2006.03555, sec. 2.4"
    cost = "m log d"
    LAYERS_PER_LEVEL = 4

    order: Tensor  # (heads, blocks, layers, dim), permutations along the last axis
    angles: Tensor  # (heads, blocks, layers, dim // 2), in radians

    @property
    def layers(self) -> int:
        """Returns the number of layers per block, at least one."""
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
        # Vectors of all heads and blocks are stacked, and each starts at `base`; the first layer
        # reads the single vector that the blocks of a head share.
        vectors = torch.arange(heads * self.blocks, device=x.device).view(heads, self.blocks, 1)
        base = vectors // self.blocks * dim
        for layer in range(self.layers):
            source = (base + self.order[:, :, layer]).flatten()
            moved = x.flatten(0, -2).index_select(0, source).view(heads, self.blocks, dim, n)
            pairs = moved[:, :, :even].reshape(heads * self.blocks * (dim // 2), 2, n)
            turned = rotations[:, :, layer].reshape(len(pairs), 2, 2) @ pairs
            x = turned.view(heads, self.blocks, even, n)
            if dim % 2:  # avoids a copy by torch.cat
                x = torch.cat((x, moved[:, :, even:]), dim=2)
            base = vectors * dim
        return x


def _walsh_hadamard(x: Tensor) -> Tensor:
    """Applies the unnormalized Sylvester-Hadamard matrix H along the second-to-last dimension.

    H of order p is a Kronecker product of log8(p) factors of order 8 (the last may be smaller). On
    one CPU core, they take 0.55 to 0.85 of the time of log2(p) butterflies for p = 16 to 1024.
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
