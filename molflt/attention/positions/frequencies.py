"""Random features of Fourier factors with nodes on the reciprocal lattice of each graph."""

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one
from molflt.attention.features.base import NUM_FEATURES, Projected
from molflt.attention.numerics import at_least_float32


class FrequencyProjection(nn.Module):
    """Random projection of Fourier factors whose rows are functions of the frequency.

    The number of nodes of a reciprocal lattice differs between graphs, their order depends on the
    choice of the cell, and each node represents xi and -xi. The normal variables that multiply the
    cos and sin columns of a node are therefore computed from its frequency:

        eta(xi) = Phi^-1(frac(u . xi + (v . xi)(w . xi) + b)),
        (eta(xi) + eta(-xi)) / sqrt(2) for cos,  (eta(xi) - eta(-xi)) / sqrt(2) for sin.

    Over the draws of u, v, w (normal) and b (uniform), every eta is exactly normal. Those of
    different nodes are independent to the extent that 2 pi |u . (xi - xi')| is large, as in cells
    up to about `LENGTH`. Rounding errors of xi change eta by a similar amount.

    Args:
        heads: number of heads; every head has its own rows.
        num_features: number of rows m, the same as in the feature map.
        dim: dimension l of frequencies.
    """

    LENGTH = 100.0  # Å, standard deviation of u
    BEND = 30.0  # Å, the same of v and w; breaks linear relations among lattice vectors

    vectors: Tensor  # (3, heads, m, l): u, v, w
    turns: Tensor  # (heads, m): b

    def __init__(self, heads: int, num_features: int = NUM_FEATURES, dim: int = 3) -> None:
        super().__init__()
        at_least_one(heads=heads, num_features=num_features, dim=dim)
        self.register_buffer("vectors", torch.empty(3, heads, num_features, dim))
        self.register_buffer("turns", torch.empty(heads, num_features))
        self.redraw_()

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        drawn = torch.randn(
            self.vectors.shape, dtype=torch.float64, generator=generator, device="cpu"
        )
        lengths = [self.LENGTH, self.BEND, self.BEND]
        scale = torch.tensor(lengths, dtype=torch.float64, device="cpu")
        self.vectors.copy_(drawn * scale[:, None, None, None])
        turns = torch.rand(self.turns.shape, dtype=torch.float64, generator=generator, device="cpu")
        self.turns.copy_(turns)

    def rows(self, nodes: Tensor) -> Tensor:
        """Returns the normal variables of the columns: (batch, r, l) -> (batch, heads, 2r, m).

        Frequencies are treated as constants, and gradients do not flow through the rows.
        """
        xi = nodes.detach().double()[:, None]  # [b, 1, r, l]
        u, v, w = (xi @ vector.double().mT for vector in self.vectors)  # [b, h, r, m]
        even = v * w + self.turns.double()[:, None]
        ahead, behind = (_normal(even + u), _normal(even - u))
        # At xi = 0 both are the same variable.
        origin = (xi == 0).all(dim=-1, keepdim=True)
        scale = torch.where(origin, 0.5, 0.5**0.5)
        return torch.cat(((ahead + behind) * scale, (ahead - behind) * scale), dim=2)

    def forward(self, factors: tuple[Tensor, Tensor], nodes: Tensor) -> tuple[Projected, Projected]:
        with torch.autocast(nodes.device.type, enabled=False):
            rows = self.rows(nodes).to(at_least_float32(nodes).dtype)
            left, right = (
                Projected(x @ rows.to(x.dtype), x.square().sum(dim=-1, keepdim=True))
                for x in factors
            )
        return left, right


def _normal(turns: Tensor) -> Tensor:
    """Returns Phi^-1 of the fractional part, which is kept off the ends of the interval."""
    return torch.special.ndtri(turns.remainder(1.0).clamp(1e-12, 1 - 1e-12))
