"""Random nodes by importance sampling: xi_s ~ p and c_s = 1 / (r p(xi_s)) (FLT v1, eqs. 4-5)."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one, positive
from molflt.attention.features.projections import (
    DenseProjection,
    OrthogonalProjection,
    SobolProjection,
)
from molflt.attention.nodes.base import Nodes
from molflt.attention.numerics import randn64
from molflt.attention.spectra import ShiftInvariant


class GaussianNodes(Nodes):
    """Monte Carlo nodes xi = sigma eps with fixed eps ~ N(0, I) and a learnable sigma per head.

    The weights are c_s = 1 / (r p(xi_s)) with p = N(0, sigma^2 I). The estimate of the mask is
    unbiased for every sigma for which its expectation exists. Source: FLT (arXiv:2302.01925v1), eq.
    5 and OC20 experiment. The paper's language models use `sigma=1.0, learn_sigma=False`.

    The variance is finite only if g falls faster than sqrt(p). For a Gaussian mask of width w, this
    requires sigma > 1 / (2 sqrt(2) pi w). With power-law tails, it is never finite.

    Args:
        heads: number of heads; each has separate nodes and a separate sigma.
        num_nodes: number of nodes r.
        dim: dimension l of positions.
        sigma: initial standard deviation, in cycles per unit of length.
        learn_sigma: make sigma a parameter; otherwise it is a constant buffer.
    """

    paper: ClassVar[str] = "2302.01925v1, eq. 5"
    random: ClassVar[bool] = True

    def __init__(
        self,
        heads: int,
        num_nodes: int = 16,
        dim: int = 3,
        sigma: float = 0.15,
        learn_sigma: bool = True,
    ) -> None:
        super().__init__()
        at_least_one(heads=heads, num_nodes=num_nodes, dim=dim)
        positive(sigma=sigma)
        self.num_nodes = num_nodes
        self.dim = dim
        log_sigma = torch.full((heads,), math.log(sigma))
        self.log_sigma = nn.Parameter(log_sigma) if learn_sigma else nn.Buffer(log_sigma)
        self.eps = nn.Buffer(torch.empty(heads, num_nodes, dim))
        self.redraw_()

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        return randn64(self.eps.shape, generator=generator)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        self.eps.copy_(self._draw(generator))

    def forward(self) -> tuple[Tensor, Tensor]:
        log_volume = self.dim * (self.log_sigma[:, None] + 0.5 * math.log(2 * math.pi))
        log_density = -0.5 * self.eps.square().sum(dim=-1) - log_volume
        nodes = self.log_sigma.exp()[:, None, None] * self.eps
        return nodes, (-log_density).exp() / self.num_nodes


class _StructuredNodes(GaussianNodes):
    """Base class for Gaussian nodes whose eps are the rows of a projection."""

    paper: ClassVar[str] = "molflt"
    _rows: type[DenseProjection]

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        rows = self._rows.draw_rows
        return torch.stack([rows(self.num_nodes, self.dim, generator) for _ in self.eps])


class OrthogonalNodes(_StructuredNodes):
    """Unbiased Gaussian nodes whose eps are orthogonal within each block of l nodes.

    The norms of eps follow the chi distribution. In three dimensions, the error is hardly smaller
    than that of `GaussianNodes`, whose arguments it takes: a block contains only three nodes.
    """

    _rows = OrthogonalProjection


class SobolNodes(_StructuredNodes):
    """Unbiased Gaussian nodes whose eps are scrambled Sobol points mapped to normal variables.

    The error falls nearly as 1 / r for smooth masks and is smallest if r is a power of two. Takes
    the same arguments as `GaussianNodes`.
    """

    _rows = SobolProjection


class DensityNodes(Nodes):
    """Nodes drawn from the spectral density of a shift-invariant kernel, xi = u / length.

    For the spectrum g = C p of a kernel of amplitude C, every coefficient c_s g(xi_s) is C / r.
    This density is optimal in the sense of Theorem 4.2 of FLT (arXiv:2302.01925; eq. 7 of version
    1 and appendix A.4). The draws u are fixed, and the length remains learnable.

    Args:
        density: kernel from whose spectral density nodes are drawn. It is not registered as a
            submodule, to avoid saving its parameters twice.
        num_nodes: number of nodes r.
    """

    paper: ClassVar[str] = "2302.01925v1, eq. 7"
    random: ClassVar[bool] = True

    def __init__(self, density: ShiftInvariant, num_nodes: int = 16) -> None:
        super().__init__()
        if not isinstance(density, ShiftInvariant):
            raise ValueError(f"nodes='density' needs a kernel; got {type(density).__name__}")
        at_least_one(num_nodes=num_nodes)
        self.num_nodes = num_nodes
        self.dim = density.dim
        self._density = (density,)  # a tuple hides it from the registration of submodules
        self.unit = nn.Buffer(torch.empty(density.heads, num_nodes, density.dim))
        self.redraw_()

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        self.unit.copy_(self._density[0].draw(self.num_nodes, generator))

    def forward(self) -> tuple[Tensor, Tensor]:
        density = self._density[0]
        nodes = self.unit / density.log_length.exp()[:, None, None]
        log_density = density.unit_log_density(self.unit) + self.dim * density.log_length[:, None]
        return nodes, (-log_density).exp() / self.num_nodes
