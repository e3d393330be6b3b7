"""Random projections x -> (w_1 . x, ..., w_m . x) of queries and keys, one draw per head.

Positive features use E exp(w . z) = exp(|z|^2 / 2), which holds for rows with marginal distribution
N(0, I). Dependence between rows affects only the variance. Projections are modules because two of
them (`hadamard`, `givens`) are products of sparse factors, which are applied without forming the
matrix.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.checks import at_least_one, on_cpu
from molflt.attention.numerics import by_head

# On the CPU, regardless of torch's default device, because the generator is there.
_rand = partial(torch.rand, dtype=torch.float64, device="cpu")
_randn = partial(torch.randn, dtype=torch.float64, device="cpu")


class Projection(nn.Module):
    """Base class: draws buffers on the CPU in float64 and computes the products w_s . x.

    A new projection overrides `_draw` and `forward`.

    Args:
        heads: number of heads; every head has its own draw.
        rows: number of random features m.
        dim: dimension d of the projected vectors.

    Attributes:
        paper: source of the projection: arXiv number and location.
        cost: cost of projecting one token.
    """

    paper = ""
    cost = "m d"

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
        """Returns the buffers of one head by name, on the CPU, with real numbers in float64."""
        raise NotImplementedError

    def _draw_heads(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draws the buffers of all heads, one head after the other, (heads, ...) each."""
        heads = [self._draw(generator) for _ in range(self.heads)]
        return {name: torch.stack([head[name] for head in heads]) for name in heads[0]}

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new rows in place, from torch's global generator or a given one on the CPU.

        Equal generators give equal rows on any device, up to rounding to the dtype of the buffers.
        Use the same seed on every rank.
        """
        on_cpu(generator)
        for name, value in self._draw_heads(generator).items():
            self.get_buffer(name).copy_(value)

    def forward(self, *columns: Tensor) -> Tensor:
        """Projects tokens x in the precision of x.

        Args:
            columns: x, (batch, heads, tokens, dim), usually q d^(-1/4), dimensionless; or several
                tensors whose concatenation along the last axis is x.

        Returns:
            w_s . x, (batch, heads, tokens, rows).
        """
        raise NotImplementedError(f"{type(self).__name__} must override forward(*columns)")

    def matrix(self) -> Tensor:
        """Returns a new copy of the rows w_s, (heads, rows, dim), in the dtype of the buffers."""
        buffer = next(buffer for buffer in self.buffers() if buffer.is_floating_point())
        identity = torch.eye(self.dim, dtype=buffer.dtype, device=buffer.device)
        return self.forward(identity.expand(1, self.heads, -1, -1))[0].mT.contiguous()

    def extra_repr(self) -> str:
        return f"heads={self.heads}, rows={self.num_rows}, dim={self.dim}"


class DenseProjection(Projection):
    """Base class of projections stored as a matrix of O(m d) numbers; override `_draw_rows`."""

    rows: Tensor  # (heads, rows, dim)

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        """Returns the rows of one head, (rows, dim), in float64 on the CPU."""
        raise NotImplementedError

    def _draw(self, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"rows": self._draw_rows(self.num_rows, self.dim, generator)}

    def forward(self, *columns: Tensor) -> Tensor:
        rows = self.rows.to(columns[0].dtype).split([x.shape[-1] for x in columns], dim=-1)
        first, *others = (by_head(x, row.mT) for x, row in zip(columns, rows, strict=True))
        return sum(others, first)

    def matrix(self) -> Tensor:
        return self.rows.clone()


class _IidProjection(DenseProjection):
    """Rows drawn independently from N(0, I); unbiased."""

    paper = "2006.03555, sec. 2.3"

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        return _randn(rows, dim, generator=generator)


class OrthogonalProjection(DenseProjection):
    """Rows with marginal distribution N(0, I), orthogonal within each block of `dim` rows (R-ORF).

    Directions are the rows of Haar-distributed orthogonal matrices; norms are drawn independently
    from the chi distribution with `dim` degrees of freedom. Every row is then exactly standard
    normal, and the kernel estimate remains unbiased. Performer (arXiv:2009.14794), section 2.4;
    FAVOR (arXiv:2006.03555), section 2.4.
    """

    paper = "2006.03555, sec. 2.4"

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        blocks = []
        for start in range(0, rows, dim):
            q, r = torch.linalg.qr(_randn(dim, dim, generator=generator))
            # Without the sign of diag(R), LAPACK's choice of signs makes Q deviate from the
            # Haar measure, which biases the estimator.
            q = q * torch.sign(torch.diagonal(r))
            blocks.append(q[: rows - start])
        norms = _randn(rows, dim, generator=generator).norm(dim=-1)
        return norms[:, None] * torch.cat(blocks)


class _SphereProjection(DenseProjection):
    """Independent rows, uniform on the sphere of radius sqrt(dim) (sphere-PRF).

    E w = 0 and E w w^T = I, but because all norms are equal, E exp(w . z) = Gamma(d/2) I_{d/2-1}(t)
    / (t/2)^{d/2-1}, where t = sqrt(d) |z| and I is the modified Bessel function. To leading order,
    this is smaller than exp(|z|^2 / 2) by the fraction |z|^4 / (4 (d + 2)). At d = 16 (64), it is
    smaller by 1.3 % (0.4 %) for |z| = 1 and by 16 % (5 %) for |z| = 2. Kernelized attention with
    RPE (arXiv:2106.12566), section 4.5.
    """

    paper = "2106.12566, sec. 4.5"

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        return math.sqrt(dim) * F.normalize(_randn(rows, dim, generator=generator), dim=-1)


class SobolProjection(DenseProjection):
    """Rows from scrambled Sobol points, mapped to N(0, I) by the inverse normal CDF.

    The random shift of the scrambling makes every point uniform; therefore each row is N(0, I) and
    the estimate is unbiased. Together, the points fill space evenly, and most evenly if `rows` is a
    power of two. Quasi-Monte Carlo feature maps (arXiv:1412.8293).
    """

    paper = "1412.8293"

    @staticmethod
    def _draw_rows(rows: int, dim: int, generator: torch.Generator | None) -> Tensor:
        engine = torch.quasirandom.SobolEngine
        if dim > engine.MAXDIM:
            raise ValueError(f"dim must be at most {engine.MAXDIM}; got {dim}; use 'orthogonal'")
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        points = engine(dim, scramble=True, seed=seed).draw(rows, dtype=torch.float64)
        # Points are multiples of 2^-bits; the center of a cell is never 0 or 1. Only the first
        # point has single precision, in which the last cells round up to 1.
        cell = 2.0**-engine.MAXBIT
        return torch.special.ndtri(points.clamp(max=1 - cell) + cell / 2)
