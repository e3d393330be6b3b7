"""Spectra of masks that vanish outside a box: sums of powers of sinc functions.

See FLT (arXiv:2302.01925v1), "Local RPEs", eqs. 8-12.
"""

import functools
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from molflt.attention.checks import at_least_one, one_of
from molflt.attention.numerics import sinc
from molflt.attention.spectra.base import Spectrum, _log_spaced

# Beyond this order, the spline is close to a Gaussian and its closed form is inaccurate in float32.
_MAX_ORDER = 8


class SmoothLocal(Spectrum):
    """Piecewise polynomial masks with compact support, whose spectra are powers of sinc functions.

    combine="sum":      f(z) = sum_t a_t prod_j B(z_j / 2 v_t)
    combine="product":  f(z) = prod_j sum_t w_t B(z_j / 2 v_t)
    S_t(xi) = (sin(2 pi v_t xi) / (pi xi))^k / norm_t,  norm_t = M_k(0) (2 v_t)^(k - 1)

    g has the same form as f, with S_t(xi_j) in place of B(z_j / 2 v_t). B = M_k / M_k(0), where M_k
    is the centered B-spline of order k with unit knot spacing. B has support |z_j| <= k v_t and
    degree k - 1, and its first k - 2 derivatives are continuous. This is FLT's eq. 12 with the
    power on the whole fraction and C = a_t / norm_t; with the power on the sine alone, as printed,
    g would not be even for even k. "sum" is a sum over eq. 10. With "product", the mask at
    zero distance is (sum_t w_t)^l, which cannot be negative for even l.

    g decays as |xi_j|^-k along each axis; Gaussian nodes therefore have infinite variance.

    Args:
        num_boxes: number of splines T.
        dim: dimension l of positions.
        order: order k of the spline, 2 to 8; each increment adds one continuous derivative.
        radius_range: smallest and largest initial v_t, in units of length; the v_t are evenly
            spaced on a logarithmic scale.
        amplitude: standard deviation of the initial a_t (or w_t).
        per_axis: learn a separate v_t for each axis, as in the paper's eq. 10.
        combine: "sum" or "product"; see above.
    """

    paper: ClassVar[str] = "2302.01925v1, eq. 12"
    smallest_order = 2

    def __init__(
        self,
        heads: int,
        num_boxes: int = 8,
        dim: int = 3,
        order: int = 4,
        radius_range: tuple[float, float] = (0.7, 5.0),
        amplitude: float = 0.1,
        per_axis: bool = False,
        combine: Literal["sum", "product"] = "sum",
    ) -> None:
        super().__init__(heads, dim)
        at_least_one(num_boxes=num_boxes)
        if not self.smallest_order <= order <= _MAX_ORDER:
            raise ValueError(f"order must be {self.smallest_order} to {_MAX_ORDER}; got {order}")
        one_of("combine", combine, ("sum", "product"))
        self.order = order
        self.combine = combine
        at_zero = _truncated_powers(torch.zeros((), dtype=torch.float64, device="cpu"), order)
        self._peak = at_zero.item() / math.factorial(order - 1)  # M_k(0)
        radius = _log_spaced("radius_range", radius_range, num_boxes)
        axes = dim if per_axis else 1
        self.log_radius = nn.Parameter(radius[:, None].expand(heads, num_boxes, axes).clone())
        self.amplitude = nn.Parameter(amplitude * torch.randn(heads, num_boxes))

    def spectrum(self, xi: Tensor) -> Tensor:
        width = 2 * self.log_radius.exp()  # [h, t, l or 1]
        # sin(2 pi v xi) / (pi xi) = 2 v sinc(2 v xi), with the limit 2 v at xi = 0
        powers = sinc(width * xi.transpose(0, 1)[:, :, None]) ** self.order  # [s, h, t, l]
        return self._combine(width * powers / self._peak).T

    def mask(self, delta: Tensor) -> Tensor:
        distance = delta[..., None, None, :].abs()  # [b, ..., 1, 1, l]
        return self._combine(self._profile(distance, self.log_radius.exp())).movedim(-1, 1)

    def _profile(self, distance: Tensor, radius: Tensor) -> Tensor:
        """Computes B(z / 2 v): distances |z| (..., 1, 1, l) -> (..., heads, t, l)."""
        powers = _truncated_powers(distance / (2 * radius), self.order)
        return powers / (math.factorial(self.order - 1) * self._peak)

    def _combine(self, factors: Tensor) -> Tensor:
        """Combines B or S_t of all axes, as `combine` says: (..., heads, t, l) -> (..., heads)."""
        if self.combine == "sum":
            return (_product(factors) * self.amplitude).sum(dim=-1)
        return _product((factors * self.amplitude[..., None]).sum(dim=-2))


class Local(SmoothLocal):
    """Masks that are constant inside boxes and vanish outside: the paper's local RPE.

    This is `SmoothLocal` of order 1, with the same arguments, B(z_j / 2 v_t) = 1[|z_j| <= v_t] and
    S_t(xi) = sin(2 pi v_t xi) / (pi xi) (FLT, arXiv:2302.01925v1, eqs. 8-11, 13-14).

    The exact mask is not differentiable with respect to v_t; radii are learned with sampled masks
    but not with softmax. g decays as 1 / |xi| and is not absolutely integrable. Estimates from
    random nodes therefore have neither a finite variance nor an expectation; a model learns
    the trigonometric sum over its nodes.
    """

    paper: ClassVar[str] = "2302.01925v1, eqs. 8-11"
    without_slope: ClassVar[tuple[str, ...]] = ("log_radius",)
    smallest_order = 1

    def __init__(
        self,
        heads: int,
        num_boxes: int = 8,
        dim: int = 3,
        radius_range: tuple[float, float] = (0.7, 5.0),
        amplitude: float = 0.1,
        per_axis: bool = False,
        combine: Literal["sum", "product"] = "sum",
    ) -> None:
        super().__init__(heads, num_boxes, dim, 1, radius_range, amplitude, per_axis, combine)

    def _profile(self, distance: Tensor, radius: Tensor) -> Tensor:
        return (distance <= radius).to(self.amplitude.dtype)


def _product(factors: Tensor) -> Tensor:
    """Multiplies entries along the last axis; gradients are finite even where an entry is 0."""
    return functools.reduce(torch.mul, factors.unbind(dim=-1))


def _truncated_powers(distance: Tensor, order: int) -> Tensor:
    """Returns (k - 1)! M_k at distances |z| of any shape, from powers with knots at z > 0."""
    end = 0.5 * order - distance
    terms = (
        (-1) ** j * math.comb(order, j) * (end - j).clamp(min=0) ** (order - 1)
        for j in range((order + 1) // 2)
    )
    return functools.reduce(torch.add, terms)
