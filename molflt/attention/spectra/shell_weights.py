"""Spectrum on shells with one learned weight per shell."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from molflt.attention.numerics import distances, sinc
from molflt.attention.spectra.base import Spectrum


class ShellWeights(Spectrum):
    """Spectrum with one learned weight per head and shell: f_h(z) = sum_k a_hk j(2 pi k |z|).

    j is the average of a plane wave over all directions: sin(x) / x in three dimensions and cos(x)
    in one dimension. g is a density relative to the measure of the shells.

    Args:
        radii: (shells,), radii k of the `ShellNodes` that sample the spectrum; the nodes must have
            `normalized=True`.
        dim: dimension l of positions, 1 or 3.
        amplitude: standard deviation of the initial a_hk, in the unit of the mask.
    """

    paper: ClassVar[str] = "molflt"
    nodes: ClassVar[str] = "shells"
    isotropic: ClassVar[bool] = True
    on_shells: ClassVar[bool] = True

    def __init__(self, heads: int, radii: Tensor, dim: int = 3, amplitude: float = 0.1) -> None:
        super().__init__(heads, dim)
        if dim not in (1, 3):
            raise ValueError(f"dim must be 1 or 3, for which the mask is known; got {dim}")
        self.amplitude = nn.Parameter(amplitude * torch.randn(heads, len(radii)))
        self.radius = nn.Buffer(radii.clone())

    def spectrum(self, xi: Tensor) -> Tensor:
        edges = 0.5 * (self.radius[1:] + self.radius[:-1])
        shell = torch.bucketize(xi.norm(dim=-1), edges.to(xi.dtype))
        return self.amplitude.gather(1, shell.expand(self.heads, -1))

    def mask(self, delta: Tensor) -> Tensor:
        turns = 2 * distances(delta)[..., None] * self.radius  # [b, ..., k]
        waves = sinc(turns) if self.dim == 3 else (math.pi * turns).cos()
        return (waves @ self.amplitude.T.to(waves)).movedim(-1, 1)
